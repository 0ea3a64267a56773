"""Momenta in bf16: rounded at random, by bits that follow from the entry and the step alone.

A momentum moves by ``1 - beta`` of its distance to the gradient. Rounded to the nearest, one in bf16 would stand still
wherever that is less than half the distance of two numbers of bf16. So the average is computed in fp32, and kept as one
of its two neighbours in bf16, the nearer one with more probability: the error has a mean of zero.

The random bits of an entry are a hash of the name of its parameter, of its logical matrix, of its row and column in
that (of all ranks), and of the number of the step. So they are the same wherever the entry lies, and after a resume.
Everything is integer arithmetic of 32 bits, which has the same result on every device.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

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
    """This rank's part of a parameter, as entries of its logical matrices."""

    rows: LocalRows  # what splits the part into its shards of them
    stacked: bool  # whether the part has three dimensions
    places: Sequence[Tensor]  # of each two words of its seed, and the row and column its shard begins at: 4, in int32


def numbered(
    names: Sequence[str], layouts: Sequence[Layout], splits: Sequence[Split], device: torch.device
) -> list[Numbered]:
    """The entries of parameters. Waits for the device, so it is called once, and not in every step."""
    words, counts = [], []
    for name, layout, split in zip(names, layouts, splits, strict=True):
        matrices = split_layout(layout, split)
        counts.append(len(matrices))
        for number, matrix in enumerate(matrices):
            seed = struct.unpack("<ii", blake2b(f"{name} {number}".encode(), digest_size=8).digest())
            words.append((*seed, matrix.rectangle.top, matrix.rectangle.left))
    places = iter(torch.tensor(words, dtype=torch.int32, device=device).view(-1, 4).unbind())
    several = zip(layouts, splits, counts, strict=True)
    return [
        Numbered(local_rows(layout, split), split.stacked is not None, list(islice(places, count)))
        for layout, split, count in several
    ]


def store(momenta: Tensors, averages: Tensors, parts: Sequence[Numbered], step: int) -> None:
    """Write averages, in fp32, into momenta in bf16 of the same shapes, which are ``parts`` of parameters."""
    pairs = zip(averages, parts, strict=True)
    shards = [shard for x, part in pairs for shard in part.rows.split(x if part.stacked else x.flatten(1))]
    rounded = iter(rounded_at_random(shards, [place for part in parts for place in part.places], step))
    merged = (part.rows.merge(list(islice(rounded, len(part.places)))) for part in parts)
    torch._foreach_copy_(list(momenta), [x.view(m.shape) for x, m in zip(merged, momenta, strict=True)])


def rounded_at_random(shards: Tensors, places: Tensors, step: int) -> list[Tensor]:
    """Shards of matrices, (rows x columns) in fp32, in bf16, where ``places`` are those of :class:`Numbered`."""
    found = [torch.empty_like(x, dtype=torch.bfloat16) for x in shards]
    for some in foreach.alike(shards):
        rows, columns = shards[some[0]].shape
        place = torch.stack([places[i] for i in some])
        keys = mixed(place[:, :2] + step % 2**31)
        numbers = torch.arange(max(rows, columns), dtype=torch.int32, device=place.device)
        down = mixed(keys[:, :1] + place[:, 2:3] + numbers[:rows])
        across = mixed(keys[:, 1:] + place[:, 3:] + numbers[:columns])
        height = max(1, foreach.MOST_BYTES // (_OF_ENTRY * len(some) * max(1, columns)))
        for first in range(0, rows, height):
            end = min(rows, first + height)
            noise = mixed(down[:, first:end, None] + across[:, None])
            x = torch.stack([shards[i][first:end] for i in some])
            pieces = between(x, noise.bitwise_right_shift_(16).bitwise_and_(0xFFFF))
            torch._foreach_copy_([found[i][first:end] for i in some], list(pieces.unbind()))
    return found


def between(x: Tensor, noise: Tensor) -> Tensor:
    """Numbers of fp32 as one of their two neighbours in bf16, by ``noise`` from 0 to 65535, in int32.

    Noise is added to the 16 bits that bf16 does not have, and what is carried counts. So a number that lies ``d`` of
    the way from the smaller of its neighbours to the larger one, by magnitude, becomes that for ``65536 d`` of all
    noises, and one that bf16 has stays. What is finite stays finite: beyond the largest number of bf16 it becomes
    that. Infinities and NaN stay what they are.
    """
    carried = (x.abs() < _LARGEST) * noise
    return carried.add_(x.view(torch.int32)).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def mixed(x: Tensor) -> Tensor:
    """Mix the bits of int32 in place: the finalizer of MurmurHash3 [1], a bijection.

    [1] Austin Appleby, MurmurHash3 (2011), fmix32.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= (x >> shift) & (2 ** (32 - shift) - 1)  # int32 is shifted with its sign
        x *= factor - 2**32  # as int32 has it, which overflows as unsigned numbers do
    x ^= (x >> 16) & 0xFFFF
    return x
