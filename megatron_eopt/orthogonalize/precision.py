"""In which precision fp32 products run, for this package's products alone."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
    with _set([(backend, name, getattr(backend, name), value) for backend, name, value in settings]):
        yield


@contextmanager
def fp16_products() -> Iterator[None]:
    """Add the fp16 products inside the block up in fp32, those of the parts too into which a GPU splits a long sum.

    torch lets these parts be fp16 by default. The Gram form has sums of 2.7e8 before it multiplies them by 7.6e-9, and
    fp16 ends at 65504. Process-wide settings are handled as by :func:`fp32_products`.
    """
    cuda, reduced = torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"
    before: Any = getattr(cuda, reduced)
    wanted: Any = False
    if hasattr(cuda, f"{reduced}_split_k"):  # in newer releases set by the same name: whether sums may be split at all
        split = getattr(cuda, f"{reduced}_split_k")
        before, wanted = (before, split), (False, split)
    settings = [(cuda, reduced, before, wanted)]
    if hasattr(cuda, "allow_fp16_accumulation"):  # from torch 2.7 on
        settings.append((cuda, "allow_fp16_accumulation", cuda.allow_fp16_accumulation, False))
    with _set(settings):
        yield


def in_precision(dtype: torch.dtype, precision: MatmulPrecision) -> AbstractContextManager[None]:
    """In which products of tensors of ``dtype`` are as exact as they should be, those in fp32 at ``precision``.

    No setting is touched where they are in bf16 or fp64.
    """
    if dtype == torch.float32:
        return fp32_products(precision)
    return fp16_products() if dtype == torch.float16 else nullcontext()


@contextmanager
def _set(settings: Sequence[tuple[Any, str, Any, Any]]) -> Iterator[None]:
    """Have other values of attributes inside the block: each an object, a name, the value before and the other one."""
    with ExitStack() as undoing:
        for owner, name, before, value in settings:
            if before != value:
                undoing.callback(setattr, owner, name, before)
                setattr(owner, name, value)
        yield
