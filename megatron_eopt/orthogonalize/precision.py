"""In which precision fp32 products run, for this package's products alone."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch

from megatron_eopt.orthogonalize.choices import check_choice

MatmulPrecision = Literal["low", "medium", "high", "highest"]


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
def fp32_products(precision: MatmulPrecision) -> Iterator[None]:
    """Run the fp32 products inside the block at ``precision``: TF32 for all but ``highest``, where devices have it.

    torch knows fp32 against TF32 only as a process-wide setting; it is as before when the block is left, also by an
    exception, and it is not touched where it is right already.
    """
    # torch has no bf16 products of fp32 tensors on a GPU, so for those ("low" and "medium") callers cast, and whatever
    # product of fp32 tensors is left (statistics, a user's own function) runs in TF32.
    wanted = {"low": "tf32", "medium": "tf32", "high": "tf32", "highest": "ieee"}[precision]
    cuda = torch.backends.cuda.matmul
    # From torch 2.9 on each backend has its own setting; reading the older one raises where a user has set the newer.
    if hasattr(cuda, "fp32_precision"):
        cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        settings: list[tuple[Any, str, Any]] = [(cuda, "fp32_precision", wanted), (cpu, "fp32_precision", wanted)]
    else:
        settings = [(cuda, "allow_tf32", wanted == "tf32")]
    with ExitStack() as undoing:
        for backend, name, value in settings:
            before = getattr(backend, name)
            if before != value:
                undoing.callback(setattr, backend, name, before)
                setattr(backend, name, value)
        yield
