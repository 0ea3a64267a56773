"""The Triton kernel is compiled for GPUs that need not be there; the interpreter lets more pass than the compiler."""

import importlib.util
import inspect
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from tests.kernels.test_triton_kernel import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

TARGETS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}  # products of 16 bits and TF32 there
MOST_SHARED = 99 * 1024  # bytes of a program on the smallest device of capability 8 and more
MOST_REGISTERS, MOST_SPILLED = 255, 0  # of a thread; bytes


def compiled(target, dtype, width, depth, warps, stages, precision, even, transposed):
    """Shared memory, machine code, registers and bytes spilled of the kernel for a GPU that need not be there."""
    from megatron_eopt.kernels.triton_kernel import _kernel

    names = _kernel.arg_names
    fixed = {"USE_C": True, "EVEN": even, "PRECISION": precision, "WIDTH": width, "DEPTH": depth, "BAND": 8}
    fixed |= {"WIDEN": False, "c_col": 1, "out_col": 1}
    fixed |= dict.fromkeys(("a_row", "b_row") if transposed else ("a_col", "b_col"), 1)
    kinds = dict.fromkeys(names, "i32") | dict.fromkeys(("alpha", "beta"), "fp32") | dict.fromkeys(fixed, "constexpr")
    kinds |= dict.fromkeys(("a", "b", "c", "out"), f"*{dtype}")
    aligned = [name for name in names if name not in fixed and name not in ("alpha", "beta", "per_matrix")]
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return resources(_kernel, kinds, fixed, aligned, target, options)


def resources(kernel, kinds, fixed, aligned, target, options):
    """Shared memory, machine code, registers and bytes spilled of a kernel for a GPU that need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: kinds[name] for name in names},
        {(names.index(name),): value for name, value in fixed.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in names},
    )
    result = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(result.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used, spilled = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))
    return result.metadata.shared, result.asm["ptx"], used, spilled


def compile_all(target):
    """Compile what the table of tiles can ask for, and say what is wrong; None where triton is too old."""
    from triton.compiler import ASTSource

    from megatron_eopt.kernels.triton_kernel import _kernel, tiles_for

    if "constexprs" not in inspect.signature(ASTSource.__init__).parameters:
        return None
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
    kinds = [(torch.float16, "ieee"), (torch.bfloat16, "ieee"), (torch.float32, "tf32"), (torch.float32, "ieee")]
    # as constants they would make one kernel for each value
    wrong = [each.name for each in _kernel.params if each.name in ("alpha", "beta") and each.is_constexpr]
    for number, (dtype, precision) in enumerate(kinds):
        for index, chosen in enumerate(tiles_for(rows, dtype, precision) for rows in (512, 4096)):
            shape = (chosen.width, chosen.depth, chosen.warps, chosen.stages)
            # masks and transposed factors, each with half of the rest
            even, transposed = number % 2 == 0, index == 0
            shared, code, used, spilled = compiled(target, names[dtype], *shape, precision, even, transposed)
            fits = shared <= MOST_SHARED and used <= MOST_REGISTERS and spilled <= MOST_SPILLED
            said = f"{names[dtype]} {precision} {chosen}: {shared} bytes shared, {used} registers, {spilled} spilled"
            print(said)
            if not fits or (precision == "tf32" or dtype != torch.float32) != (TARGETS[target] in code):
                wrong.append(said)
    for kernel, kinds, fixed in quotients():
        aligned = [name for name in kernel.arg_names if name not in fixed and kinds[name] != "fp32"]
        shared, _, used, spilled = resources(kernel, kinds, fixed, aligned, target, {"enable_fp_fusion": True})
        print(said := f"{kernel.__name__} {fixed}: {shared} bytes shared, {used} registers, {spilled} spilled")
        if shared > MOST_SHARED or used > MOST_REGISTERS or spilled > MOST_SPILLED:
            wrong.append(said)
    return wrong


def quotients():
    """Kernels of norms, the kinds of their arguments, and their constants."""
    from megatron_eopt.kernels import triton_norms as norms

    flat = {"HEIGHT": 1, "WIDTH": norms._WIDE, "x_col": 1, "out_col": 1}
    crossed = {"HEIGHT": norms._SIDE, "WIDTH": norms._SIDE, "x_row": 1, "out_col": 1}
    cases = [
        (norms._squares_of_blocks, {"BLOCK": norms._BLOCK}),
        (norms._norms_of_matrices, {"WIDTH": 1024}),
        *((norms._quotients, {**lie, "KEEP_BAD": True}) for lie in (flat, crossed)),
    ]
    pointers = {"x": "*bf16", "out": "*fp16"} | dict.fromkeys(("powers", "squares", "power", "norm"), "*fp32")
    for kernel, fixed in cases:
        kinds = dict.fromkeys(kernel.arg_names, "i32") | pointers | {"unit": "fp32"}
        yield kernel, kinds | dict.fromkeys(fixed, "constexpr"), fixed


@pytest.mark.wide
@pytest.mark.parametrize(
    "target", [pytest.param(each, marks=[pytest.mark.full] if each == 80 else []) for each in TARGETS]
)
def test_compiles(target, tmp_path):
    compiles(__name__, target, tmp_path)


def compiles(module, target, folder):
    """Nothing is wrong with what ``compile_all`` of a module compiles, in a process that does not interpret."""
    code = f"import json; from {module} import compile_all; print(json.dumps(compile_all({target})))"
    wrong = run(["-c", code], interpret=False, TRITON_CACHE_DIR=str(folder))
    if wrong is None:
        pytest.skip("this release of triton describes sources to its compiler in another way")
    assert wrong == []
