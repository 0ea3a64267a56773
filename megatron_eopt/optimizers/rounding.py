"""Momenta in bf16, rounded at random.

Rounded to the nearest, a momentum would stand still where it moves by less than half a unit. So the average is computed
in fp32 and rounded to one of its two neighbours, with probabilities that give the error a mean of zero. The random bits
are a hash of parameter name, logical matrix, global row and column, and step: the same at any layout, and after a
resume. They are made by 32-bit integer arithmetic, with the same result on every device.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice

import torch
from torch import Tensor

from megatron_eopt.matrices import LocalRows, Split
from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.foreach import Tensors
from megatron_eopt.parallel.layout import Layout, local_rows, split_layout

_LARGEST = torch.finfo(torch.bfloat16).max
_OF_ENTRY = 16  # bytes of the copies that are in memory of an entry at a time


@dataclass(frozen=True)
class Numbered:
    """Local part of a parameter, as logical matrices' entries."""

    rows: LocalRows  # what splits the part into its shards of them
    stacked: bool  # whether the part has three dimensions
    places: Sequence[Tensor]  # of each two words of its seed, and the row and column its shard begins at: 4, in int32
    words: Sequence[tuple[int, int, int, int]]  # the same on the host

    def split(self, x: Tensor) -> list[Tensor]:
        """The shards of the part."""
        return self.rows.split(x if self.stacked else x.flatten(1))


def numbered(
    names: Sequence[str], layouts: Sequence[Layout], splits: Sequence[Split], device: torch.device
) -> list[Numbered]:
    """Locate the entries of parameters, once; waits for the device."""
    words = []
    for name, layout, split in zip(names, layouts, splits, strict=True):
        of_part = []
        for number, matrix in enumerate(split_layout(layout, split)):
            seed = struct.unpack("<ii", blake2b(f"{name} {number}".encode(), digest_size=8).digest())
            of_part.append((*seed, matrix.rectangle.top, matrix.rectangle.left))
        words.append(of_part)
    places = iter(torch.tensor(list(chain(*words)), dtype=torch.int32, device=device).view(-1, 4).unbind())
    parts = []
    for layout, split, of_part in zip(layouts, splits, words, strict=True):
        rows = local_rows(layout, split)
        parts.append(Numbered(rows, split.stacked is not None, list(islice(places, len(of_part))), of_part))
    return parts


def store(momenta: Tensors, averages: Tensors, parts: Sequence[Numbered], step: int) -> None:
    """Round averages in fp32 into momenta in bf16.

    An average that is a number of bf16, as of a parameter that is left out, stays.
    """
    shards: list[Tensor] = []
    places: list[Tensor] = []
    for average, part in zip(averages, parts, strict=True):
        shards += part.split(average)
        places += part.places
    rounded = iter(rounded_at_random(shards, places, step))
    new = []
    for momentum, part in zip(momenta, parts, strict=True):
        of_part = list(islice(rounded, len(part.places)))
        new.append(part.rows.merge(of_part).view(momentum.shape))
    torch._foreach_copy_(list(momenta), new)


def rounded_at_random(shards: Tensors, places: Tensors, step: int) -> list[Tensor]:
    """Round shards in fp32 to bf16, by :class:`Numbered` places."""
    rounded = [torch.empty_like(x, dtype=torch.bfloat16) for x in shards]
    for equal, rows, x, noise in _pieces(shards, places, step):
        torch._foreach_copy_([rounded[i][rows] for i in equal], list(between(x, noise).unbind()))
    return rounded


def _pieces(shards: Tensors, places: Tensors, step: int) -> Iterator[tuple[list[int], slice, Tensor, Tensor]]:
    """Stacks of a few rows of equal shards: indices, rows, entries, and 16 random bits of each."""
    for equal in foreach.alike(shards):
        rows, columns = shards[equal[0]].shape
        place = torch.stack([places[i] for i in equal])
        keys = mixed(place[:, :2] + step % 2**31)
        numbers = torch.arange(max(rows, columns), dtype=torch.int32, device=place.device)
        down = mixed(keys[:, :1] + place[:, 2:3] + numbers[:rows])
        across = mixed(keys[:, 1:] + place[:, 3:] + numbers[:columns])
        height = max(1, foreach.MOST_BYTES // (_OF_ENTRY * len(equal) * max(1, columns)))
        for first in range(0, rows, height):
            piece = slice(first, min(rows, first + height))
            noise = mixed(down[:, piece, None] + across[:, None])
            x = torch.stack([shards[i][piece] for i in equal])
            yield equal, piece, x, noise.bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def between(x: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 to bf16 by ``noise``, 0 to 65535.

    Noise is added to the 16 bits that bf16 lacks, and what is carried counts: ``d`` of the way from the smaller
    neighbour to the larger, by magnitude, rounds up for ``65536 d`` of all noises. Numbers of bf16, infinities and NaN
    stay, and what is finite stays finite.
    """
    carried = (x.abs() < _LARGEST) * noise
    return carried.add_(x.view(torch.int32)).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def mixed(x: Tensor) -> Tensor:
    """Mix int32 in place by the bijection fmix32 of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= (x >> shift) & (2 ** (32 - shift) - 1)  # int32 is shifted with its sign
        x *= factor - 2**32  # as int32 has it, which overflows as unsigned numbers do
    x ^= (x >> 16) & 0xFFFF
    return x
