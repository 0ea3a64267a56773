"""Momenta in bf16, rounded at random.

Rounded to the nearest, a momentum would stand still where it moves by less than half a unit. So the average is computed
in fp32 and rounded to one of its two neighbours, with probabilities that give the error a mean of zero. The random bits
are a hash of what the entry was, of its smaller neighbour, and of the step: the same at any layout, and after a resume.
They are made by 32-bit integer arithmetic, with the same result on every device.
"""

import torch
from torch import Tensor

from megatron_eopt.step import foreach
from megatron_eopt.step.foreach import Tensors

_LARGEST = torch.finfo(torch.bfloat16).max
_COPIES_OF_ENTRY = 16  # bytes of the copies that are in memory of an entry at a time


def store(momenta: Tensors, averages: Tensors, step: int) -> None:
    """Round averages in fp32 into momenta in bf16.

    An average that is a number of bf16, as of a parameter that is left out, stays.
    """
    for equal in foreach.alike(averages):
        first = averages[equal[0]]
        of_row = len(equal) * max(1, first[:1].numel())
        height = max(1, foreach.MOST_COPY_BYTES // (_COPIES_OF_ENTRY * of_row))
        for top in range(0, len(first), height):
            piece = slice(top, top + height)
            before = [momenta[i][piece] for i in equal]
            x = torch.stack([averages[i][piece] for i in equal])
            rounded = between(x, noise_of(torch.stack(before), x, step))
            torch._foreach_copy_(before, list(rounded.unbind()))


def noise_of(before: Tensor, x: Tensor, step: int) -> Tensor:
    """Random numbers from 0 to 65535, by which entries that were ``before`` become ``x``.

    Bits that bf16 lacks have no part in them: layouts that differ by the rounding of fp32 round alike.
    """
    key = x.view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF)
    key |= before.float().view(torch.int32)
    return murmur_mix(murmur_mix(key).add_(step % 2**31)).bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def between(x: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 to bf16 by ``noise``, 0 to 65535.

    Noise is added to the 16 bits that bf16 lacks, and what is carried counts: ``d`` of the way from the smaller
    neighbour to the larger, by magnitude, rounds up for ``65536 d`` of all noises. Numbers of bf16, infinities and NaN
    stay, and what is finite stays finite.
    """
    carried = (x.abs() < _LARGEST) * noise
    return carried.add_(x.view(torch.int32)).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def murmur_mix(x: Tensor) -> Tensor:
    """Mix int32 in place by the bijection fmix32 of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= (x >> shift) & (2 ** (32 - shift) - 1)  # int32 is shifted with its sign
        x *= factor - 2**32  # as int32 has it, which overflows as unsigned numbers do
    x ^= (x >> 16) & 0xFFFF
    return x
