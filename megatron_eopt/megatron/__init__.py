"""The room that speaks with Megatron-Core; no other imports it."""

try:
    import megatron.core  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("megatron", "megatron.core"):
        raise
    raise ModuleNotFoundError(
        f"{error}: pip install 'megatron-eopt[megatron]', or name the folder of Megatron's sources in PYTHONPATH",
        name=error.name,
    ) from error
