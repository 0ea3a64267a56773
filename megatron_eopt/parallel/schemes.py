"""How the matrices of one parameter are orthogonalized where they lie on several ranks.

``blockwise`` treats each shard as a matrix of its own: an approximation that exchanges nothing. The others are exact,
the update is the one a single rank would have computed:

- ``duplicated``: gather the parameter once, compute everything on every rank, keep the own shard.
- ``distributed``: keep the shards and sum their Gram matrices in each step. The Gram matrix is that of the dimension
  that is not cut, so for a matrix cut along its short side it is the larger one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from torch import Tensor

from megatron_eopt.matrices import merge_rows, split_rows
from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.orthogonalize.coefficients import Coefficients, get_coefficients
from megatron_eopt.orthogonalize.newton_schulz import newton_schulz
from megatron_eopt.orthogonalize.normalize import normalized
from megatron_eopt.orthogonalize.precision import (
    MatmulPrecision,
    fp32_products,
    product_dtype,
    validate_matmul_precision,
)
from megatron_eopt.orthogonalize.standard import iterate
from megatron_eopt.parallel.exchange import all_reduce, gather, own_shard
from megatron_eopt.parallel.layout import Layout

TpMode = Literal["blockwise", "duplicated", "distributed"]


def validate_tp_mode(tp_mode: str) -> None:
    """Check the name of a tp_mode.

    Raises:
        ValueError: for an unknown name, naming the known ones.
    """
    check_choice("tp_mode", tp_mode, get_args(TpMode))


@dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
    """Settings of the iteration, checked when they are made.

    Attributes:
        steps: number of steps.
        coefficient_type: name of a coefficient set, or a list of ``(a, b, c)``.
        fp32_matmul_prec: precision of the products.

    Raises:
        ValueError: for a set, a number of steps or a precision that does not exist.
    """

    steps: int = 5
    coefficient_type: str | Sequence[Coefficients] = "quintic"
    fp32_matmul_prec: MatmulPrecision = "medium"

    def __post_init__(self) -> None:
        validate_matmul_precision(self.fp32_matmul_prec)
        _ = self.schedule

    @cached_property
    def schedule(self) -> tuple[Coefficients, ...]:
        """One ``(a, b, c)`` per step."""
        return get_coefficients(self.coefficient_type, self.steps)

    def __call__(self, x: Tensor, layout: Layout) -> Tensor:
        """This rank's shard of the orthogonal factor, from its shard of the matrix."""
        if layout.sharded:
            return self._of_shards(x, layout)
        # A gradient that is not finite has to show: a matrix that gets no update would stand still in silence.
        return newton_schulz(
            x, self.steps, self.coefficient_type, fp32_matmul_prec=self.fp32_matmul_prec, propagate_nan=True
        )

    def _of_shards(self, shard: Tensor, layout: Layout) -> Tensor:
        X = shard.mT if layout.dim == 0 else shard  # the columns are cut, so Gram matrices of the rows add up
        X, _ = normalized(X, lambda squared: all_reduce(squared, layout))
        X = X.to(product_dtype(shard.dtype, self.fp32_matmul_prec))
        with fp32_products(self.fp32_matmul_prec):
            X = iterate(X, self.schedule, lambda gram: all_reduce(gram, layout))
        return (X.mT if layout.dim == 0 else X).to(shard.dtype)


def orthogonalize(
    update: Tensor,
    layout: Layout,
    tp_mode: TpMode,
    newton_schulz: NewtonSchulz,
    scale: Callable[[int, int], float],
    split_shapes: Sequence[int] | None = None,
) -> Tensor:
    """Orthogonalize and scale every logical matrix of one parameter.

    Args:
        update: this rank's part, (rows x cols).
        layout: where the parameter lies.
        tp_mode: the scheme.
        newton_schulz: settings of the iteration.
        scale: factor of a logical matrix from its global rows and columns (a shard's own under ``blockwise``).
        split_shapes: rows of each logical matrix within one query group; None for a parameter that is one matrix.

    Returns:
        A new tensor of the shape and dtype of ``update``.
    """
    if layout.sharded and tp_mode != "distributed":
        if tp_mode == "blockwise":
            layout = Layout(layout.shard_shape)
        else:
            whole = gather(update, layout)
            return own_shard(_each_matrix(whole, Layout(layout.shape), newton_schulz, scale, split_shapes), layout)
    return _each_matrix(update, layout, newton_schulz, scale, split_shapes)


def _each_matrix(
    update: Tensor,
    layout: Layout,
    newton_schulz: NewtonSchulz,
    scale: Callable[[int, int], float],
    split_shapes: Sequence[int] | None,
) -> Tensor:
    parts = [update] if split_shapes is None else split_rows(update, split_shapes)
    factors = []
    for part in parts:
        of_part = layout.with_shard_rows(part.size(0))
        factors.append(newton_schulz(part, of_part).mul_(scale(*of_part.shape)))
    return factors[0] if split_shapes is None else merge_rows(factors, split_shapes)
