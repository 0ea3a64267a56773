"""Newton-Schulz iteration for one matrix or a stack of them: the entry, and the standard form."""

from collections.abc import Callable, Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.orthogonalize.coefficients import Coefficients, get_coefficients
from megatron_eopt.orthogonalize.form import Form, can_iterate_gram, choose_form, validate_form
from megatron_eopt.orthogonalize.gram import iterate_gram
from megatron_eopt.orthogonalize.health import Health
from megatron_eopt.orthogonalize.precision import (
    MatmulPrecision,
    fp32_products,
    product_dtype,
    validate_matmul_precision,
)
from megatron_eopt.orthogonalize.restarts import PRESETS, Preset, restarts_for
from megatron_eopt.orthogonalize.symmetric import SMALLEST_BLOCKED, Blocked, Dense, Products

MAX_BYTES = 2**30
"""How much memory the work on one part of a stack may take, unless a single matrix needs more."""

Watch = Callable[[int, Tensor], None]


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
        fp32_matmul_prec: precision of the products: ``medium`` (or ``low``) bf16 with fp32 accumulation, ``high`` TF32
            where the device has it, ``highest`` fp32. An fp64 input stays in fp64.
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
    transposed = x.size(-2) > x.size(-1)
    X = x.mT if transposed else x
    restarts = None
    if form != "standard" and can_iterate_gram(dtype):
        # Unasked from the tables only: a simulation takes its time, and might choose otherwise on another rank.
        restarts = restarts_for(coefficient_type, steps, PRESETS[preset][2], simulate=form == "gram")
    if form == "auto":
        form = choose_form(X.size(-2), X.size(-1), schedule, restarts, dtype)
    elif form == "gram" and restarts is None:
        raise ValueError(
            f"the Gram form is not safe with {coefficient_type!r} in {steps} steps and {dtype} products: take the "
            f"standard form, or precision 'high' or 'highest'"
        )
    parts = []
    with fp32_products(fp32_matmul_prec):
        for part in _parts(X, dtype, max_bytes):
            N, squared = _normalized(X[part], dtype, propagate_nan)
            serving = products or _default_products(N)
            result, seen = _iterated(N, schedule, restarts if form == "gram" else None, serving, squared, health)
            parts.append(((result.mT if transposed else result).to(x.dtype), seen))
    out = parts[0][0] if len(parts) == 1 else torch.cat([result for result, _ in parts])
    return (out, _joined([seen for _, seen in parts])) if health else out


def _parts(X: Tensor, dtype: torch.dtype, max_bytes: int) -> list[slice]:
    """The parts of a stack that are worked on in turn; a matrix is one part, and so is an empty stack."""
    if X.ndim == 2 or X.size(0) <= 1:
        return [slice(None)]
    rows, cols = X.shape[-2:]
    of_one = (3 * rows * cols + 5 * rows * rows) * dtype.itemsize
    size = max(1, max_bytes // max(1, of_one))
    return [slice(start, start + size) for start in range(0, X.size(0), size)]


def _normalized(X: Tensor, dtype: torch.dtype, propagate_nan: bool) -> tuple[Tensor, Tensor]:
    """Matrices of norm 1 in the dtype of the products, and their squared norms before."""
    if X.numel() == 0:
        return X.to(dtype), X.new_zeros(*X.shape[:-2], 1, 1)
    X, squared = normalized(X)
    if not propagate_nan:
        X.masked_fill_(~squared.isfinite(), 0)
    return X.to(dtype), squared


def _iterated(
    X: Tensor,
    schedule: Sequence[Coefficients],
    restarts: Sequence[int] | None,
    products: Products,
    squared: Tensor,
    health: bool,
) -> tuple[Tensor, Health | None]:
    """Iterate, in the Gram form where there are restarts."""
    first, last = _Trace(), _Trace()

    def watch(step: int, R: Tensor) -> None:
        if step == 0:
            first.keep(R)
        if step == len(schedule) - 1:
            last.keep(R)

    shown = watch if health else None
    if restarts is None:
        X = iterate(X, schedule, products=products, watch=shown)
    else:
        X = iterate_gram(X, schedule, restarts, products, watch=shown)
    if not health:
        return X, None
    rows = X.size(-2)
    return X, Health(
        norm=squared.sqrt().squeeze((-2, -1)),
        effective_rank=first.trace.square() / _divisor(first.squares),
        residual=((last.squares - 2 * last.trace + rows).clamp(min=0) / max(1, rows)).sqrt(),
        finite=squared.isfinite().squeeze((-2, -1)),
    )


class _Trace:
    """Trace and squared norm of a Gram matrix, kept while the matrix itself is overwritten."""

    trace: Tensor
    squares: Tensor

    def keep(self, R: Tensor) -> None:
        """Take the figures of ``R``."""
        self.trace = R.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)
        self.squares = torch.linalg.vector_norm(R.float(), dim=(-2, -1)).double().square()


def _joined(figures: Sequence[Health | None]) -> Health:
    parts = [figure for figure in figures if figure is not None]
    if len(parts) == 1:
        return parts[0]
    return Health(*(torch.cat([getattr(part, name) for part in parts]) for name in Health.__dataclass_fields__))


def _default_products(X: Tensor) -> Products:
    fp32_on_cpu = X.device.type == "cpu" and X.dtype == torch.float32
    return Blocked() if fp32_on_cpu and X.ndim == 2 and X.size(0) >= SMALLEST_BLOCKED else Dense()


def check_matrices(x: Tensor) -> None:
    """Check that ``x`` is a matrix or a stack of matrices of floating dtype.

    Raises:
        TypeError: for another dtype.
        ValueError: for another number of dimensions.
    """
    if not x.is_floating_point():
        raise TypeError(f"only floating-point matrices can be orthogonalized, got {x.dtype}")
    if x.ndim not in (2, 3):
        raise ValueError(f"expected a matrix or a stack of matrices (2-D or 3-D), got shape {tuple(x.shape)}")


def normalized(x: Tensor, all_reduce: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Matrices divided by their Frobenius norms, and the squares of these; a zero matrix stays zero.

    The norm is taken of ``x`` divided by its largest entry, because squares of entries below 1e-19 vanish in fp32, and
    those of entries above 1e19 overflow.

    Args:
        x: (rows x cols) or (n x rows x cols), with at least one entry.
        all_reduce: sums squared norms over the ranks that hold the other parts of ``x``.

    Returns:
        A new tensor in fp32 (fp64 for an fp64 ``x``), and the squared norms, (1 x 1) or (n x 1 x 1) in fp64.
    """
    dims = (-2, -1)
    # the norm of order infinity, which torch reduces ten times more slowly
    largest = torch.maximum(x.amax(dims, keepdim=True), -x.amin(dims, keepdim=True)).to(_wide(x.dtype))
    x = x.to(_wide(x.dtype)) / _divisor(largest)
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True)
    squared = (norm.double() * largest.double()).square()
    if all_reduce is not None:
        squared = all_reduce(squared)
        norm = (squared.sqrt() / _divisor(largest.double())).to(x.dtype)
    return x.div_(_divisor(norm)), squared


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _divisor(norm: Tensor) -> Tensor:
    # a zero matrix divided by 1 stays zero, without asking the device whether it is one
    return torch.where(norm == 0, torch.ones_like(norm), norm)


def iterate(
    X: Tensor,
    schedule: Sequence[Coefficients],
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    products: Products | None = None,
    watch: Watch | None = None,
) -> Tensor:
    """Apply the polynomials of a schedule to a normalized ``X``, iterating on the Gram matrix of its rows.

    Args:
        X: (rows x cols) or (n x rows x cols), best with the short side first; written to.
        schedule: one ``(a, b, c)`` per step.
        all_reduce: sums a Gram matrix over the ranks that hold the other columns of ``X``.
        products: computes the symmetric products; plainly where None is given.
        watch: is shown the number of each step, from 0, and the Gram matrix before it.
    """
    fused = torch.baddbmm if X.ndim == 3 else torch.addmm
    products = products or Dense()
    gram, factor = (X.new_empty(*X.shape[:-1], X.size(-2)) for _ in range(2))
    # torch multiplies a stack in bf16 into a transposed result some thousand times more slowly than into a plain one
    X = X.contiguous() if X.ndim == 3 else X
    Y = torch.empty_like(X)
    for step, (a, b, c) in enumerate(schedule):
        A = products.gram(X, out=gram)
        if all_reduce is not None:
            A = all_reduce(A)
        if watch is not None:
            watch(step, A)
        if c == 0:
            X, Y = fused(X, A, X, beta=a, alpha=b, out=Y), X
        else:
            X, Y = fused(X, products.addmm(A, A, A, beta=b, alpha=c, out=factor), X, beta=a, out=Y), X
    return X
