"""Stacks of equal matrices: made of pieces, orthogonalized, and taken apart again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.pieces import Piece, Shape


def orthogonalized(matrices: Sequence[Tensor] | Tensor, settings: NewtonSchulz, factor: float) -> list[Tensor]:
    """``factor`` times the orthogonal factors of equal matrices, computed as stacks as far as that is faster.

    Args:
        matrices: (rows x cols) each, or a stack of them; may be none, or empty ones.
        settings: of the iteration; stacks take about ``max_bytes``.
        factor: scale of the results.
    """
    if len(matrices) == 0:
        return []
    first = matrices[0]
    iteration = settings.compile(first.shape, first.dtype, first.device)
    size = 1 if iteration.one_by_one else iteration.chunk
    results: list[Tensor] = []
    for start in range(0, len(matrices), size):
        part = matrices[start : start + size]
        if len(part) == 1:
            results.append(iteration(part[0]).mul_(factor))
        else:
            stack = part if isinstance(part, Tensor) else torch.stack(list(part))
            results += iteration(stack).mul_(factor).unbind()
    return results


def assemble(parts: Sequence[Tensor], pieces: Sequence[Piece], shape: Shape) -> Tensor:
    """Matrices (n x rows x cols) of a global shape, of the pieces of each rank.

    Args:
        parts: of each rank its pieces of all ``n`` matrices, one behind the other.
        pieces: which rectangle each rank holds; together they are the matrix.
        shape: of the matrix.
    """
    count = next((part.numel() // piece.numel for part, piece in zip(parts, pieces, strict=True) if piece.numel), 0)
    stack = parts[0].new_empty(count, *shape)
    for part, piece in zip(parts, pieces, strict=True):
        cut_out(stack, piece).copy_(part.view(count, *piece.shape))
    return stack


def cut_out(x: Tensor, piece: Piece) -> Tensor:
    """The view of a piece of a matrix (rows x cols), or of each of a stack."""
    return x[..., piece.top : piece.bottom, piece.left : piece.right]
