"""A checksum of global tensors, which is a sum over shards."""

from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_AT_ONCE = 2**22  # entries
_SPREAD = 0x1E3779B97F4A7C14  # even, and no simple number


def checksum(shard: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A shard's summand of a global tensor's checksum, int64 scalar.

    It is the sum of each entry's bits times an odd number that depends on the entry's index in the global tensor,
    modulo 2^64: it changes with any one entry, and where entries are exchanged. Entries have 1, 2, 4 or 8 bytes.
    """
    sizes = [1] * (len(shape) - shard.ndim) + list(shard.shape)
    entries = shard.detach().contiguous().view(-1)
    device = entries.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    bits = entries.view(_INTEGERS[entries.element_size()])
    *leading, (width, first, _) = _joined_axes(sizes, offset, shape)
    done = 0
    while done < len(bits):
        row, column = divmod(done, width)
        left = len(bits) - done
        if column or left < width or width > _AT_ONCE:
            rows = 1
            columns = min(width - column, left, _AT_ONCE)
        else:
            rows = min(left, _AT_ONCE) // width
            columns = width
        part = bits[done : done + rows * columns].view(rows, columns)
        along = torch.arange(first + column, first + column + columns, device=device)
        positions = _positions(row, rows, leading, device)[:, None] + along
        total += (part.long() * (positions * _SPREAD + 1)).sum()
        done += rows * columns
    return total


def _joined_axes(sizes: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> list[tuple[int, int, int]]:
    """Axes as (size, offset, stride in the global tensor).

    An axis is joined with the one before it where the shard has the whole of it: then rows are as long as can be.
    """
    axes = [(1, 0, 1)]
    length = 1  # of the first axis in the global tensor
    stride = 1  # the same
    for size, start, extent in reversed(list(zip(sizes, offset, shape, strict=True))):
        inner_size, _, _ = axes[0]
        if inner_size == length:
            axes[0] = (size * inner_size, start * inner_size, stride)
            length *= extent
        else:
            stride *= length
            axes.insert(0, (size, start, stride))
            length = extent
    return axes


def _positions(
    row: int,
    rows: int,
    leading: Sequence[tuple[int, int, int]],
    device: torch.device,
) -> Tensor:
    """Where some rows of a shard begin in the flat global tensor."""
    index = torch.arange(row, row + rows, device=device)
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    for size, start, stride in reversed(leading):
        positions += (index % size + start) * stride
        index = index.div(size, rounding_mode="floor")
    return positions
