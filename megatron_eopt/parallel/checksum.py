"""A checksum of global tensors, which is a sum over shards."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_AT_ONCE = 2**22  # entries
_SPREAD = 0x1E3779B97F4A7C14  # even, and no simple number


def checksum(shard: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A shard's summand of a global tensor's checksum, int64 scalar.

    It is the sum of each entry's bits times an odd number that depends on the entry's index in the global tensor,
    modulo 2^64: it changes with any one entry, and where entries are exchanged. Entries have 1, 2, 4 or 8 bytes.
    """
    device = shard.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    if not shard.numel():
        return total
    sizes = [1] * (len(shape) - shard.ndim) + list(shard.shape)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axes = zip(sizes, offset, strides, strict=True)  # -> where their indices are in the global tensor, flat
    along = [torch.arange(start, start + size, device=device) * stride for size, start, stride in axes]
    *leading, columns = along or [torch.zeros(1, dtype=torch.int64, device=device)]
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for indices in leading:
        rows = (rows[:, None] + indices).flatten()
    bits = shard.detach().contiguous().view(INTEGERS[shard.element_size()]).view(len(rows), len(columns))
    height = max(1, _AT_ONCE // len(columns))
    for top in range(0, len(rows), height):
        band = slice(top, top + height)
        total += (bits[band].long() * ((rows[band, None] + columns) * _SPREAD + 1)).sum()
    return total
