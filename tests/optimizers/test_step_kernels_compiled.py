"""The kernels of a step are compiled for GPUs that need not be there."""

import importlib.util
import inspect
import re

import pytest

from tests.kernels.test_triton_kernel_compiled import TARGETS, compiles, resources

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

MOST_REGISTERS, MOST_SHARED, MOST_SPILLED = 200, 16 * 1024, 8  # of a thread; bytes of a program, and of a thread
COMMON = {"LIE": 1, "ALIGNED": True, "INTERPRETED": False}
OF_MOMENTUM = {"L2": False, "DECAY_ON_DEVICE": False, "HEAVY": False, "NESTEROV": True, "AT_RANDOM": False}
OF_MOMENTUM |= {"MEASURED": False, "AVERAGED": False, "PREVIOUS": None}
OF_SUBTRACT = {"DECAYS": True, "CAUTIOUS": False, "RATES_ON_DEVICE": False, "SCALED": True, "SCALES_ON_DEVICE": False}
OF_SUBTRACT |= {"LINES": 0, "DIVIDED": False, "ON_SPHERE": False}
# Constants of each kernel beside those that hold by default: whether it reads four numbers at once is said by the last.
MOMENTUM = (
    ({}, True),
    ({"HEIGHT": 256, "WIDTH": 16}, True),
    ({"MOMENTUM": "bfloat16", "AT_RANDOM": True}, True),
    ({"PARAMETER": "bfloat16", "MOMENTUM": "bfloat16", "AVERAGE": "bfloat16"}, True),
    ({"L2": True, "DECAY_ON_DEVICE": True}, True),
    ({"HEAVY": True, "LIE": 2, "ALIGNED": False}, False),
    ({"MEASURED": True}, True),
    ({"PARAMETER": "bfloat16", "MOMENTUM": "bfloat16", "AVERAGE": "bfloat16", "MEASURED": True}, True),
    ({"AVERAGED": True, "NESTEROV": False}, True),
    ({"AVERAGED": True, "L2": True, "OTHERS_LIE": 0, "HEIGHT": 64, "WIDTH": 64}, True),
    ({"AVERAGED": True, "LIE": 2, "ALIGNED": False}, False),
    ({"PREVIOUS": "float32"}, True),
    ({"PREVIOUS": "float32", "MOMENTUM": "bfloat16", "AT_RANDOM": True}, True),
)
CORRECTIONS = (
    ({}, True),
    ({"HEIGHT": 64, "WIDTH": 64, "PREVIOUS": "bfloat16"}, True),
    ({"LIE": 2, "ALIGNED": False}, False),
)
MOMENT = (
    ({"MEASURED": True}, True),
    ({"MEASURED": False, "PARAMETER": "bfloat16"}, True),
    ({"MEASURED": True, "HEIGHT": 64, "WIDTH": 64, "OTHERS_LIE": 0}, True),
    ({"MEASURED": True, "LIE": 2, "ALIGNED": False}, False),
)
LINES = ({"LINES": 1}, {"LINES": 2, "OTHERS_LIE": 0}, {"LINES": 2, "ALIGNED": False})
PRODUCTS = (
    ({}, True),
    ({"HEIGHT": 64, "WIDTH": 64, "OTHERS_LIE": 0}, True),
    ({"LIE": 2, "ALIGNED": False, "PARAMETER": "bfloat16"}, False),
)
SUBTRACT = (
    ({}, True),
    ({"HEIGHT": 64, "WIDTH": 64, "OTHERS_LIE": 0}, True),
    ({"PARAMETER": "bfloat16", "SCALES_ON_DEVICE": True, "RATES_ON_DEVICE": True}, True),
    ({"ON_SPHERE": True}, True),
    ({"LIE": 2, "ALIGNED": False}, False),
    ({"DIVIDED": True, "SCALES_ON_DEVICE": True, "CAUTIOUS": True}, True),
    ({"LINES": 1, "SCALES_ON_DEVICE": True}, True),
    ({"LINES": 2, "SCALES_ON_DEVICE": True, "PARAMETER": "bfloat16"}, True),
)


def compiled(kernel, constants, target):
    """Shared memory, machine code, registers and bytes spilled."""
    import triton.language as tl

    from megatron_eopt.kernels.triton_step import OPTIONS

    dtypes = {name: getattr(tl, x) if isinstance(x, str) else x for name, x in constants.items()}
    arguments = [name for name in kernel.arg_names if name not in dtypes]
    kinds = {"table": "*i64", "flag": "*i1", "out": "*bf16", "factors": "*bf16", "step": "i32", "tiles": "i32"}
    kinds |= {"norms": "*fp64", "corrections": "*fp32"}
    on_device = {"weight_decay": "DECAY_ON_DEVICE", "lr": "RATES_ON_DEVICE", "decay": "RATES_ON_DEVICE"}
    on_device["scale"] = "ON_SPHERE" if constants.get("ON_SPHERE") else "SCALES_ON_DEVICE"
    for name in arguments:
        kinds.setdefault(name, "*fp32" if constants.get(on_device.get(name)) else "fp32")
    types = {name: kinds[name] for name in arguments} | dict.fromkeys(dtypes, "constexpr")
    return resources(kernel, types, dtypes, ["table", "out", "factors", "norms", "corrections"], target, OPTIONS)


def compile_all(target):
    """Compile each variant, and say what is wrong; None where triton is too old."""
    from triton.compiler import ASTSource

    from megatron_eopt.kernels import triton_step

    if "constexprs" not in inspect.signature(ASTSource.__init__).parameters:
        return None
    wrong = []
    of_kernels = (
        (triton_step.corrections_kernel, CORRECTIONS, {}),
        (triton_step.momentum_kernel, MOMENTUM, OF_MOMENTUM),
        (triton_step.moment_kernel, MOMENT, {}),
        (triton_step.lines_kernel, [({**more, "HEIGHT": 64, "WIDTH": 64}, None) for more in LINES], {}),
        (triton_step.products_kernel, PRODUCTS, {}),
        (triton_step.subtract_kernel, SUBTRACT, OF_SUBTRACT),
    )
    for kernel, variants, settings in of_kernels:
        kinds = dict.fromkeys(("GRADIENT", "MOMENTUM", "PREVIOUS", "PARAMETER", "AVERAGE"), "float32")
        standard = {**COMMON, **kinds, **settings, "HEIGHT": 4, "WIDTH": 1024, "OTHERS_LIE": 1}
        for more, wide in variants:
            constants = {name: x for name, x in (standard | more).items() if name in kernel.arg_names}
            shared, code, used, spilled = compiled(kernel, constants, target)
            said = f"{kernel.__name__} {more}: {shared} bytes shared, {used} registers, {spilled} spilled"
            print(said)
            by_four = len(re.findall(r"ld\.global\.v4\.b32", code)) > 1
            if used > MOST_REGISTERS or shared > MOST_SHARED or spilled > MOST_SPILLED or wide not in (by_four, None):
                wrong.append(f"{said}, four numbers at once: {by_four}")
    return wrong


@pytest.mark.wide
@pytest.mark.parametrize(
    "target", [pytest.param(each, marks=[pytest.mark.full] if each == 80 else []) for each in TARGETS]
)
def test_compiles(target, tmp_path):
    compiles(__name__, target, tmp_path)
