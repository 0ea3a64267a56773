"""A checksum of a global tensor that is the same however the tensor is cut: the sum of its shards' checksums."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_AT_ONCE = 2**22  # entries
_SPREAD = 0x1E3779B97F4A7C14  # even, and no simple number
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(shard: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """What a shard of a tensor adds to the tensor's checksum: an int64 without dimensions, on the shard's device.

    It is the sum of each entry's bits times an odd number that depends on the entry's index in the global tensor,
    modulo 2^64. So it changes with any one entry, and where entries are exchanged.

    Args:
        shard: of any dtype of 1, 2, 4 or 8 bytes; its dimensions are the last of ``shape``.
        offset: of the shard in the global tensor.
        shape: of the global tensor.
    """
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    if not shard.numel():
        return total
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    sizes = [1] * (len(shape) - shard.ndim) + list(shard.shape)
    *leading, (size, start, stride) = [(1, 0, 1), *zip(sizes, offset, strides, strict=True)]
    rows = torch.zeros(1, dtype=torch.int64, device=shard.device)
    for axis in leading:
        rows = (rows[:, None] + _offsets(*axis, shard.device)).flatten()
    columns = _offsets(size, start, stride, shard.device)
    bits = shard.detach().contiguous().view(_INTEGERS[shard.element_size()]).view(len(rows), size)
    height = max(1, _AT_ONCE // size)
    for top in range(0, len(rows), height):
        band = slice(top, top + height)
        total += (bits[band].long() * ((rows[band, None] + columns) * _SPREAD + 1)).sum()
    return total


def _offsets(size: int, start: int, stride: int, device: torch.device) -> Tensor:
    return torch.arange(start, start + size, device=device) * stride
