"""In which precision products run and are added up, for this package's products alone."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch

from megatron_eopt.orthogonalize.choices import check_choice

MatmulPrecision = Literal["low", "medium", "high", "highest"]

_FP16_SUMS = ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation")  # the second from torch 2.7 on


def validate_matmul_precision(precision: str) -> None:
    """Raise ``ValueError``, naming the known ones, unless a precision has this name."""
    check_choice("fp32_matmul_prec", precision, get_args(MatmulPrecision))


def product_dtype(dtype: torch.dtype, precision: MatmulPrecision) -> torch.dtype:
    """The dtype in which products of a matrix of ``dtype`` are computed.

    - ``medium`` (and ``low``, which torch itself reads as medium): bf16 with fp32 accumulation.
    - ``high`` (TF32 where the device has it) and ``highest`` (fp32): fp32 tensors.

    A matrix that comes in fp64 stays in fp64.
    """
    if dtype == torch.float64:
        return dtype
    return torch.bfloat16 if precision in ("low", "medium") else torch.float32


def gram_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """The dtype of the Gram form where products are asked for in ``dtype``; None where it must not or should not run.

    Never bf16, whose rounding it amplifies: where that is asked for, fp16, which GPUs multiply as fast. CPUs do not.
    """
    if dtype in (torch.float32, torch.float64):
        return dtype
    return torch.float16 if device.type == "cuda" else None


@contextmanager
def fp32_products(precision: MatmulPrecision, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Run the fp32 products inside the block at ``precision``: TF32 for all but ``highest``, where devices have it.

    Where the ``dtype`` of the products is fp16, add these up in fp32 instead. By default torch lets a GPU add the parts
    of a long sum in fp16, which ends at 65504; in the Gram form they reach 2.7e8 and are then multiplied by 7.6e-9.

    torch knows all this only as process-wide settings; they are as before when the block is left, also by an exception,
    and they are not touched where they are right already, nor for any other dtype.
    """
    # torch has no bf16 products of fp32 tensors on a GPU, so for those ("low" and "medium") callers cast, and whatever
    # product of fp32 tensors is left (statistics, a user's own function) runs in TF32.
    wanted = {"low": "tf32", "medium": "tf32", "high": "tf32", "highest": "ieee"}[precision]
    cuda = torch.backends.cuda.matmul
    # From torch 2.9 on each backend has its own setting; reading the older one raises where a user has set the newer.
    settings: list[tuple[Any, str, Any]] = []
    if dtype == torch.float16:
        settings = [(cuda, name, False) for name in _FP16_SUMS if hasattr(cuda, name)]
    elif dtype == torch.float32 and hasattr(cuda, "fp32_precision"):
        cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        settings = [(cuda, "fp32_precision", wanted), (cpu, "fp32_precision", wanted)]
    elif dtype == torch.float32:
        settings = [(cuda, "allow_tf32", wanted == "tf32")]
    with ExitStack() as undoing:
        for backend, name, value in settings:
            before = getattr(backend, name)
            if before != value:
                undoing.callback(setattr, backend, name, before)
                setattr(backend, name, value)
        yield
