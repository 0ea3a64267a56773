"""Which kernel computes symmetric products: by a rule, or the one that a setting names.

The rule knows device and dtype alone, so that every rank and every resume has the same kernel without asking.
"""

from importlib.util import find_spec
from typing import Literal, get_args

import torch

from megatron_eopt.kernels.precision import MatmulPrecision
from megatron_eopt.kernels.products import Blocked, Products

Kernel = Literal["triton", "blocked", "torch"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)

FAST_TRITON = {(9, 0)}
"""Compute capabilities of GPUs on which Triton's kernels were measured to be faster than torch's.

An H200 has 9.0: docs/benchmarks.md has its figures. Everything else takes torch until somebody has measured it.
"""


def rule(device: torch.device, dtype: torch.dtype) -> tuple[Kernel, str]:
    """The kernel of products in a dtype, and why."""
    if device.type == "cpu":
        if dtype in (torch.float32, torch.bfloat16):
            return "blocked", "fp32 and bf16 on a CPU"
        return "torch", "on a CPU"
    if dtype.itemsize != 2:
        return "torch", f"{dtype} on a GPU"
    reason = fast_triton(device)
    return ("torch", reason) if reason else ("triton", "16 bits on a GPU of compute capability 9.0")


def fast_triton(device: torch.device) -> str | None:
    """Why Triton's kernels do not serve unasked, or None."""
    reason = triton_missing(device)
    if reason is not None:
        return reason
    if device.type == "cpu":
        return "on a CPU Triton is interpreted"
    if device.type == "meta":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability not in FAST_TRITON:
        return "no GPU of compute capability {}.{} was measured".format(*capability)
    return None


def triton_missing(device: torch.device) -> str | None:
    """Why Triton cannot run on a device, or None."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu":
        from megatron_eopt.kernels.triton_kernel import INTERPRETED

        return None if INTERPRETED else "no GPU: the matrices are on the CPU"
    if device.type == "meta":  # a model that is planned for a GPU
        return None
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"no GPU that triton can use: the matrices are on {device.type!r}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"the GPU has compute capability {major}.{minor}, and 8.0 is needed"


def check_kernel(kernel: str | None, device: torch.device) -> None:
    """Raise ``ValueError`` if a named kernel cannot run on a device."""
    if kernel != "triton":
        return
    reason = triton_missing(device)
    if reason:
        raise ValueError(
            f"the kernel 'triton' of symmetric products cannot serve: {reason}; without a name "
            "(symmetric_products, --muon-use-syrk) the one that serves here is taken"
        )


def products_for(
    wanted: Products | str | None,
    device: torch.device,
    dtype: torch.dtype,
    precision: MatmulPrecision,
) -> Products:
    """What computes products in a dtype: the wanted ones, a named kernel, or by the rule."""
    if isinstance(wanted, Products):
        return wanted
    if wanted is None:
        wanted, _ = rule(device, dtype)
    if wanted == "triton":
        from megatron_eopt.kernels.triton_kernel import Triton

        if dtype == torch.float64:
            raise ValueError("the kernel 'triton' of symmetric products has no fp64: take 'torch'")
        return Triton("ieee" if precision == "highest" else "tf32")
    if wanted == "blocked":
        return Blocked()
    return Products()
