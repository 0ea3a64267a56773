"""Stochastic rounding to bf16: its distribution, and random bits that follow from an entry and the step alone."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt.step import foreach
from megatron_eopt.step.rounding import between, store

WORD = 2**32
ALL_NOISES = torch.arange(2**16, dtype=torch.int32)
LARGEST = torch.finfo(torch.bfloat16).max


def fmix32(h):
    """The finalizer of MurmurHash3 as it is published, on unsigned numbers."""
    h ^= h >> 16
    h = h * 0x85EBCA6B % WORD
    h ^= h >> 13
    h = h * 0xC2B2AE35 % WORD
    return h ^ h >> 16


def word_of(x):
    """The bits of a number of fp32."""
    return struct.unpack("<I", struct.pack("<f", x))[0]


def expected(before, x, step):
    """One entry as it is to be rounded, from numbers of Python alone."""
    key = word_of(before) | word_of(x) >> 16
    noise = fmix32((fmix32(key) + step) % WORD) >> 16
    return struct.unpack("<f", struct.pack("<I", (word_of(x) + noise) >> 16 << 16))[0]


def stored(before, x, step):
    """Momenta that were ``before``, and now are averages."""
    momenta = [m.clone() for m in before]
    store(momenta, x, step)
    return momenta


@pytest.mark.parametrize("step", [0, 3, 2**31 + 5])
def test_an_entry_is_rounded_by_what_it_was_and_by_the_step(step):
    before, x = torch.randn(7, 5).bfloat16(), torch.randn(7, 5)
    (found,) = stored([before], [x], step)
    for at in [(0, 0), (6, 4), (3, 1)]:
        assert found[at].item() == expected(before[at].item(), x[at].item(), step % 2**31)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda x: abs(x) < LARGEST))
@settings(max_examples=60, deadline=None)
def test_of_all_noises_as_many_round_up_as_the_distance_says(x):
    found = between(torch.full((2**16,), x), ALL_NOISES)
    below = word_of(x) >> 16 << 16
    smaller, larger = (
        struct.unpack("<f", struct.pack("<I", word))[0]
        for word in (below, below + 2**16 if word_of(x) % 2**16 else below)
    )
    assert set(found.tolist()) <= {smaller, larger}
    assert (found.float() != smaller).sum() == word_of(x) % 2**16
    assert math.copysign(1, x) == math.copysign(1, found[0].item())


def test_what_bf16_has_stays_and_finite_is_finite():
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    for noise in (0, 2**16 - 1):
        found = between(numbers.float(), torch.full((2**16,), noise, dtype=torch.int32))
        same = numbers.isnan() & found.isnan() | (numbers.view(torch.int16) == found.view(torch.int16))
        assert same.all()
        beyond = torch.tensor([3.4e38, -3.4e38, torch.finfo(torch.float32).max])
        assert between(beyond, torch.full((3,), noise, dtype=torch.int32)).tolist() == [LARGEST, -LARGEST, LARGEST]
    not_numbers = torch.tensor([0x7FFFFFFF, -1, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert between(not_numbers, torch.full((3,), 2**16 - 1, dtype=torch.int32)).isnan().all()


def test_pieces_company_and_layouts_make_no_difference(monkeypatch):
    shapes = [(9, 6), (9, 6), (6, 9), (2, 3, 4), (0, 4), (4, 0)]
    before, xs = [torch.randn(shape).bfloat16() for shape in shapes], [torch.randn(shape) for shape in shapes]
    together = stored(before, xs, 1)
    monkeypatch.setattr(foreach, "MOST_COPY_BYTES", 400)
    for m, x, other in zip(before, xs, together, strict=True):
        assert torch.equal(stored([m], [x], 1)[0], other)
    shard = before[0].clone()
    store([shard[2:, 1:4]], [xs[0][2:, 1:4]], 1)
    assert torch.equal(shard[2:, 1:4], together[0][2:, 1:4])


def test_averages_that_hardly_differ_are_rounded_alike():
    before, x = torch.randn(300, 400).bfloat16(), torch.randn(300, 400)
    one, other = stored([before, before], [x, torch.nextafter(x, x + 1)], 3)
    assert (one != other).double().mean() < 1e-3


def test_a_factor_is_rounded_to_no_default_dtype():
    x = torch.ones(3, dtype=torch.float64)
    foreach.scale([x], 1 - 1e-5, torch.tensor(True))
    assert x.tolist() == [1 - 1e-5] * 3
