"""Precision of products, for this package's products alone."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

MatmulPrecision = Literal["low", "medium", "high", "highest"]


def product_dtype(dtype: torch.dtype, precision: MatmulPrecision) -> torch.dtype:
    """The dtype in which products of a matrix are computed.

    ``low`` and ``medium`` are bf16 with fp32 accumulation; ``high`` (TF32) and ``highest`` keep fp32. fp64 stays fp64.
    """
    if dtype == torch.float64:
        return dtype
    return torch.bfloat16 if precision in ("low", "medium") else torch.float32


def gram_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """The dtype of the Gram form, if it should run."""
    if dtype in (torch.float32, torch.float64):
        return dtype
    # the form amplifies the rounding of bf16; GPUs, for which meta is planned, multiply fp16 as fast, CPUs do not
    return torch.float16 if device.type in ("cuda", "meta") else None


def in_precision(dtype: torch.dtype, precision: MatmulPrecision) -> AbstractContextManager[None]:
    """Context for products in ``dtype``; fp32 ones run at ``precision``."""
    if dtype == torch.float32:
        return fp32_products(precision)
    return fp16_products() if dtype == torch.float16 else nullcontext()


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which a caller's ``torch.autocast`` changes no dtype."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@contextmanager
def fp16_products() -> Iterator[None]:
    """Accumulate fp16 products in fp32 inside the block."""
    # By default a GPU may add them in fp16, up to 65504; in the Gram form they reach 2.7e8 before a factor of 7.6e-9.
    cuda = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation")
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
    """Run fp32 products inside the block at ``precision``.

    That is TF32 for all but ``highest``, where devices have it; ``as_torch``, for users' functions, leaves ``medium``
    and ``low`` to torch, perhaps as bf16. torch has these settings for the process only: they are restored on leaving.
    Inside, compiled code can read the newer ones (of each backend) and the older one.
    """
    # Where bf16 is asked for, callers cast: a GPU has no bf16 products of fp32 tensors. What is left runs in TF32.
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
