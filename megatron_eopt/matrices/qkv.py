"""Fused query, key and value projections: rows that belong to several logical matrices.

Megatron interleaves them by query group: rows are ``(groups, q + k + v, hidden)`` flattened, with an output gate
``(groups, q + gate + k + v, hidden)``. Plain ``[q; k; v]`` is the case of one group.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def check_split_shapes(shapes: Sequence[int] | None, lengths: Sequence[int] = (3,)) -> tuple[int, ...]:
    """The rows of each part within one group, checked.

    Args:
        shapes: rows of q, k and v, or of q, gate, k and v, in one group.
        lengths: how many parts are accepted.

    Raises:
        ValueError: where they are missing, of another number, not integers, or not positive.
    """
    wanted = " or ".join(str(length) for length in lengths)
    if shapes is None:
        raise ValueError(f"split_qkv needs qkv_split_shapes: {wanted} positive integers, got None")
    if len(shapes) not in lengths:
        raise ValueError(f"qkv_split_shapes must be {wanted} positive integers, got {len(shapes)}: {list(shapes)}")
    if any(not isinstance(rows, int) or isinstance(rows, bool) for rows in shapes):
        raise ValueError(f"qkv_split_shapes must be integers, got {list(shapes)}")
    if any(rows <= 0 for rows in shapes):
        raise ValueError(f"qkv_split_shapes must be positive, got {list(shapes)}")
    return tuple(shapes)


def split_rows(x: Tensor, shapes: Sequence[int]) -> list[Tensor]:
    """Split a fused matrix into its parts; every part has its rows of all groups, in the order of the groups.

    Args:
        x: (groups * sum(shapes)) x cols.
        shapes: rows of each part within one group.

    Returns:
        One matrix (groups * rows) x cols for each of ``shapes``.

    Raises:
        ValueError: if the rows of ``x`` are not a whole number of groups.
    """
    rows, cols = x.shape
    if rows % sum(shapes):
        raise ValueError(f"{rows} rows are not a multiple of the {sum(shapes)} of one query group {list(shapes)}")
    grouped = x.reshape(-1, sum(shapes), cols)
    return [part.reshape(-1, cols) for part in grouped.split(list(shapes), dim=1)]


def merge_rows(parts: Sequence[Tensor], shapes: Sequence[int]) -> Tensor:
    """The inverse of :func:`split_rows`."""
    cols = parts[0].size(-1)
    grouped = [part.reshape(-1, rows, cols) for part, rows in zip(parts, shapes, strict=True)]
    return torch.cat(grouped, dim=1).reshape(-1, cols)
