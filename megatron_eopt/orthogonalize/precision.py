"""In which precision products run and are added up, for this package's products alone."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


def in_precision(dtype: torch.dtype, precision: MatmulPrecision) -> AbstractContextManager[None]:
    """In which products in ``dtype`` are exact enough, those in fp32 at ``precision``; bf16 and fp64 need nothing."""
    if dtype == torch.float32:
        return fp32_products(precision)
    return fp16_products() if dtype == torch.float16 else nullcontext()


@contextmanager
def fp16_products() -> Iterator[None]:
    """Add fp16 products inside the block up in fp32. By default torch lets a GPU add the parts of a sum in fp16, which
    ends at 65504, and in the Gram form they reach 2.7e8 before they are multiplied by 7.6e-9.
    """
    cuda, names = torch.backends.cuda.matmul, ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation")
    allowed = [name for name in names if getattr(cuda, name, False)]
    for name in allowed:
        setattr(cuda, name, False)
    try:
        yield
    finally:
        for name in allowed:
            setattr(cuda, name, True)


@contextmanager
def fp32_products(precision: MatmulPrecision, as_torch: bool = False) -> Iterator[None]:
    """Run the fp32 products inside the block at ``precision``: TF32 for all but ``highest``, where devices have it.

    With ``as_torch``, for users' own functions, ``medium`` and ``low`` are torch's ``medium``, which may be bf16.

    torch knows fp32 against TF32 only as process-wide settings. When the block is left, also by an exception, they are
    as before. Inside, whoever asks (compiled code does) can read the newer ones, of each backend, and the older one.
    """
    # torch has no bf16 products of fp32 tensors on a GPU, so for those ("low" and "medium") callers cast, and whatever
    # product of fp32 tensors is left (statistics, say) runs in TF32.
    wanted = {"low": "medium"}.get(precision, precision)
    wanted = "high" if wanted == "medium" and not as_torch else wanted
    newer: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    newer = [backend for backend in newer if hasattr(backend, "fp32_precision")]  # from torch 2.9 on
    before = [backend.fp32_precision for backend in newer]
    for backend in newer:
        backend.fp32_precision = "ieee"  # with any other value, torch may refuse to say what the older setting is
    older = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(wanted)  # sets the newer ones, too
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for backend, value in zip(newer, before, strict=True):
            backend.fp32_precision = "none"  # follows torch.backends.fp32_precision, which may be all that was set
            if backend.fp32_precision != value:
                backend.fp32_precision = value
