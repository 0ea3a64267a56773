"""Newton-Schulz iteration for one matrix or a stack of them: the entry, which chooses the form."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.orthogonalize.coefficients import Coefficients, get_coefficients
from megatron_eopt.orthogonalize.form import Form, choose_form, gram_dtype, validate_form
from megatron_eopt.orthogonalize.gram import iterate_gram, iterate_gram_fp16
from megatron_eopt.orthogonalize.health import Health, Watch, health_of_nothing, joined
from megatron_eopt.orthogonalize.normalize import check_matrices, normalized, scaled
from megatron_eopt.orthogonalize.precision import (
    MatmulPrecision,
    fp32_products,
    product_dtype,
    validate_matmul_precision,
)
from megatron_eopt.orthogonalize.restarts import PRESETS, Preset, restarts_for
from megatron_eopt.orthogonalize.standard import iterate
from megatron_eopt.orthogonalize.symmetric import Products, default_products

MAX_BYTES = 2**30
"""How much memory the work on one part of a stack may take, unless a single matrix needs more."""


@overload
def newton_schulz(
    x: Tensor,
    steps: int = 5,
    coefficient_type: str | Sequence[Coefficients] = "quintic",
    *,
    fp32_matmul_prec: MatmulPrecision = "highest",
    form: Form = "auto",
    preset: Preset = "default",
    max_bytes: int = MAX_BYTES,
    propagate_nan: bool = False,
    products: Products | None = None,
    health: Literal[False] = False,
) -> Tensor: ...


@overload
def newton_schulz(
    x: Tensor,
    steps: int = 5,
    coefficient_type: str | Sequence[Coefficients] = "quintic",
    *,
    fp32_matmul_prec: MatmulPrecision = "highest",
    form: Form = "auto",
    preset: Preset = "default",
    max_bytes: int = MAX_BYTES,
    propagate_nan: bool = False,
    products: Products | None = None,
    health: Literal[True],
) -> tuple[Tensor, Health]: ...


def newton_schulz(
    x: Tensor,
    steps: int = 5,
    coefficient_type: str | Sequence[Coefficients] = "quintic",
    *,
    fp32_matmul_prec: MatmulPrecision = "highest",
    form: Form = "auto",
    preset: Preset = "default",
    max_bytes: int = MAX_BYTES,
    propagate_nan: bool = False,
    products: Products | None = None,
    health: bool = False,
) -> Tensor | tuple[Tensor, Health]:
    """Orthogonal factor of a matrix, approximately: ``U p(S) V^T`` for ``x = U S V^T``, with ``p(S)`` near 1.

    With the short side of ``X = x / ||x||_F`` first, each step is ``X <- a X + (b A + c A^2) X``, ``A = X X^T``
    (Jordan et al., 2024; https://kellerjordan.github.io/posts/muon/). The Gram form computes the same on the short
    side (:mod:`~megatron_eopt.orthogonalize.gram`). The norm of the input does not matter, however small: there is no
    epsilon that would stop layers whose gradients were clipped hard. A zero matrix gives zero, and so does one with
    entries that are not finite; the others of a stack are not affected.

    Args:
        x: matrix (rows x cols) or stack of matrices (n x rows x cols), of any floating dtype; may be empty.
        steps: number of steps; see :func:`~megatron_eopt.orthogonalize.coefficients.get_coefficients` for what a set
            can serve.
        coefficient_type: name of a coefficient set, or a list of ``(a, b, c)``.
        fp32_matmul_prec: precision of the products: ``medium`` (or ``low``) bf16 with fp32 accumulation, in the Gram
            form fp16, on a GPU only; ``high`` TF32 where the device has it, ``highest`` fp32. An fp64 input stays in
            fp64.
        form: ``standard``, ``gram``, or ``auto``: the one that
            :func:`~megatron_eopt.orthogonalize.form.choose_form` finds cheaper; the Gram form only of schedules whose
            restarts are in a table. Asked for by name, it simulates those of others.
        preset: ``fast`` takes the set cubic5 in place of ``steps`` and ``coefficient_type``; ``accurate`` restarts the
            Gram form once more than ``default``. Their errors are in
            :data:`~megatron_eopt.orthogonalize.restarts.PUBLISHED_ERRORS`.
        max_bytes: a stack is worked on in parts whose work takes at most so much memory, or one matrix at a time.
        propagate_nan: return no numbers instead of zero for a matrix with entries that are not finite.
        products: computes the symmetric products, such as what :func:`~megatron_eopt.orthogonalize.ladder.choose` found
            for the device; by default torch, in blocks for a large fp32 matrix on a CPU.
        health: also return figures that the Gram matrices tell.

    Returns:
        A new tensor of the shape and dtype of ``x``; with ``health`` also the figures. Nothing waits for the device.

    Raises:
        TypeError: if ``x`` is not floating point.
        ValueError: if ``x`` is neither 2-D nor 3-D, for a schedule, precision, form or preset that does not exist, and
            for a Gram form that is not safe for the schedule or the precision.
    """
    check_matrices(x)
    validate_matmul_precision(fp32_matmul_prec)
    validate_form(form)
    check_choice("preset", preset, PRESETS)
    if preset == "fast":
        coefficient_type, steps, _ = PRESETS[preset]
    schedule = get_coefficients(coefficient_type, steps)
    dtype = product_dtype(x.dtype, fp32_matmul_prec)
    of_gram = gram_dtype(dtype, x.device)
    transposed = x.size(-2) > x.size(-1)
    X = x.mT if transposed else x
    restarts = None
    if form != "standard" and of_gram is not None:
        # Unasked from the tables only: a simulation takes its time, and might choose otherwise on another rank.
        restarts = restarts_for(coefficient_type, steps, PRESETS[preset][2], simulate=form == "gram")
    if form == "gram" and restarts is None:
        raise ValueError(
            f"the Gram form is not safe with {coefficient_type!r} in {steps} steps and {dtype} products on "
            f"{x.device.type!r}: take the standard form, or precision 'high' or 'highest'"
        )
    if form == "auto" and restarts is not None and of_gram is not None:
        share = (products or default_products(x.device, of_gram)).share(X.size(-2))
        form = choose_form(X.size(-2), X.size(-1), schedule, restarts, share)
    if x.numel() == 0:
        return (torch.empty_like(x), health_of_nothing(x)) if health else torch.empty_like(x)
    if form != "gram":
        restarts, of_gram = None, None
    run = _Run(schedule, restarts, of_gram or dtype, propagate_nan, products, health)
    parts, figures = [], []
    with fp32_products(fp32_matmul_prec):
        for part in _parts(X, run.dtype, max_bytes):
            result, figure = run(X[part])
            parts.append((result.mT if transposed else result).to(x.dtype))
            if figure is not None:
                figures.append(figure)
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (out, joined(figures)) if health else out


def _parts(X: Tensor, dtype: torch.dtype, max_bytes: int) -> list[slice]:
    """The parts of a stack that are worked on in turn; a matrix is one part, and so is a stack of one."""
    if X.ndim == 2 or X.size(0) == 1:
        return [slice(None)]
    rows, cols = X.shape[-2:]
    of_one = (3 * rows * cols + 4 * rows * rows) * dtype.itemsize
    size = max(1, max_bytes // of_one)
    return [slice(start, start + size) for start in range(0, X.size(0), size)]


@dataclass(frozen=True)
class _Run:
    """The iteration in the form that was chosen: restarts are None in the standard one."""

    schedule: Sequence[Coefficients]
    restarts: Sequence[int] | None
    dtype: torch.dtype
    propagate_nan: bool
    products: Products | None
    health: bool

    def __call__(self, X: Tensor) -> tuple[Tensor, Health | None]:
        """The result, and the figures where they are asked for."""
        products = self.products or default_products(X.device, self.dtype)
        watch = Watch(len(self.schedule)) if self.health else None
        if self.restarts is not None and self.dtype != torch.float16:
            N, largest = scaled(X, self.propagate_nan)
            result = iterate_gram(N, self.schedule, self.restarts, products, watch=watch, normalize=True)
            if watch is None:
                return result, None
            return result, watch.health(largest.double().square() * watch.trace.reshape(largest.shape))
        N, squared = normalized(X, propagate_nan=self.propagate_nan)
        if self.restarts is None:
            result = iterate(N.to(self.dtype), self.schedule, products=products, watch=watch)
        else:
            result = iterate_gram_fp16(N, self.schedule, self.restarts, products, watch=watch)
        return result, None if watch is None else watch.health(squared)
