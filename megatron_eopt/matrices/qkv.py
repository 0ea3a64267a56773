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
    groups = rows // sum(shapes)
    parts = x.reshape(groups, sum(shapes), cols).split(list(shapes), dim=1)
    return [part.reshape(groups * size, cols) for part, size in zip(parts, shapes, strict=True)]


def merge_rows(parts: Sequence[Tensor], shapes: Sequence[int]) -> Tensor:
    """The inverse of :func:`split_rows`."""
    rows, cols = parts[0].shape
    groups = rows // shapes[0]
    grouped = [part.reshape(groups, size, cols) for part, size in zip(parts, shapes, strict=True)]
    return torch.cat(grouped, dim=1).reshape(groups * sum(shapes), cols)


def part_rows(top: int, bottom: int, shapes: Sequence[int]) -> list[tuple[int, int]]:
    """Which rows of each part lie in the rows from ``top`` to ``bottom`` of the fused matrix, ends excluded.

    Every part's rows have the order of the fused matrix, so they are consecutive; a shard may end within a group.

    Returns:
        Start and end within the part's own matrix, for each of ``shapes``.
    """
    result, before = [], 0
    for rows in shapes:
        start, end = (
            edge // sum(shapes) * rows + min(max(edge % sum(shapes) - before, 0), rows) for edge in (top, bottom)
        )
        result.append((start, end))
        before += rows
    return result


def split_piece(x: Tensor, top: int, shapes: Sequence[int]) -> list[Tensor]:
    """Split rows of a fused matrix into their parts, as :func:`split_rows` does for whole groups.

    Args:
        x: rows x cols of the fused matrix, from row ``top`` on; they may begin and end within a group.
        top: first row.
        shapes: rows of each part within one group.

    Returns:
        For each part its rows in :func:`part_rows`; views where no rows have to be brought together.
    """
    head, whole = _sections(top, x.size(0), sum(shapes))
    if x.size(0) == whole:
        return split_rows(x, shapes)
    end = head + whole
    sections = [
        _split_section(x[:head], top, shapes),
        split_rows(x[head:end], shapes),
        _split_section(x[end:], top + end, shapes),
    ]
    return [_joined(parts) for parts in zip(*sections, strict=True)]


def merge_piece(parts: Sequence[Tensor], top: int, rows: int, shapes: Sequence[int]) -> Tensor:
    """The inverse of :func:`split_piece`, for ``rows`` rows of the fused matrix from ``top`` on.

    Raises:
        ValueError: if the parts have other rows than those of :func:`part_rows`.
    """
    found = [part.size(0) for part in parts]
    expected = [end - start for start, end in part_rows(top, top + rows, shapes)]
    if found != expected:
        raise ValueError(
            f"rows {top} to {top + rows} of groups {list(shapes)} are parts of {expected} rows, got parts of {found}"
        )
    head, whole = _sections(top, rows, sum(shapes))
    if rows == whole:
        return merge_rows(parts, shapes)
    sections = []
    for part, (start, end), size in zip(parts, part_rows(top, top + head, shapes), shapes, strict=True):
        first, middle = end - start, whole // sum(shapes) * size
        sections.append(part.split([first, middle, part.size(0) - first - middle]))
    heads, middles, tails = zip(*sections, strict=True)
    return _joined([*heads, merge_rows(middles, shapes), *tails])


def _sections(top: int, rows: int, group: int) -> tuple[int, int]:
    """Rows up to the first group that begins within the rows, and those of all whole groups from there."""
    head = min(-top % group, rows)
    return head, (rows - head) // group * group


def _split_section(x: Tensor, top: int, shapes: Sequence[int]) -> Sequence[Tensor]:
    """Split rows of one group, which need not be all of it."""
    return x.split([end - start for start, end in part_rows(top, top + x.size(0), shapes)])


def _joined(sections: Sequence[Tensor]) -> Tensor:
    """The sections behind one another, without a copy where all but one are empty."""
    filled = [section for section in sections if section.size(0)]
    return torch.cat(filled) if len(filled) > 1 else (filled or sections)[0]
