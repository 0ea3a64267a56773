"""The room that speaks with Megatron-Core; no other imports it."""

from importlib.util import find_spec

if find_spec("megatron") is None:
    raise ModuleNotFoundError(
        "No module named 'megatron': pip install 'megatron-eopt[megatron]', or name the folder of Megatron's sources "
        "in PYTHONPATH",
        name="megatron",
    )
