"""Stochastic rounding to bf16: its distribution, and random bits that follow from the place of an entry alone."""

import math
import struct
from hashlib import blake2b

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt.matrices import WHOLE, interleaved, per_shard
from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.rounding import between, numbered, rounded_at_random, store
from megatron_eopt.parallel.layout import Layout, on_one_rank
from megatron_eopt.parallel.rectangles import Rectangle

WORD = 2**32
CPU = torch.device("cpu")
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


def expected(x, name, matrix, row, column, step):
    """One entry as it is to be rounded, from numbers of Python alone."""
    seeds = struct.unpack("<II", blake2b(f"{name} {matrix}".encode(), digest_size=8).digest())
    of_row, of_column = (
        fmix32((fmix32((seed + step) % WORD) + index) % WORD) for seed, index in zip(seeds, (row, column), strict=True)
    )
    noise = fmix32((of_row + of_column) % WORD) >> 16
    return struct.unpack("<f", struct.pack("<I", (word_of(x) + noise) >> 16 << 16))[0]


def whole(shape, name="w", split=WHOLE):
    return numbered([name], [on_one_rank(shape)], [split], CPU)


@pytest.mark.parametrize("step", [0, 3, 2**31 + 5])
def test_an_entry_is_rounded_by_its_name_its_place_and_the_step(step):
    x = torch.randn(7, 5)
    (part,) = whole((7, 5), "layers.0.weight")
    (found,) = rounded_at_random([x], part.places, step)
    for row, column in [(0, 0), (6, 4), (3, 1)]:
        entry = expected(x[row, column].item(), "layers.0.weight", 0, row, column, step % 2**31)
        assert found[row, column].item() == entry


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


@pytest.mark.parametrize("share", [1 / 16, 0.5, 0.8])
def test_the_frequency_of_a_neighbour_is_its_nearness_over_entries_and_over_steps(share):
    x = torch.full((200, 300), 1 + share * 2**-7)
    (part,) = whole((200, 300))
    up = torch.stack([rounded_at_random([x], part.places, step)[0] > 1 for step in range(40)]).double()
    for over in (range(3), [0], [1], [2], [0, 1], [1, 2]):  # of all, of each entry, along each row and so on
        frequency = up.mean(list(over))
        deviation = math.sqrt(share * (1 - share) / (up.numel() / frequency.numel()))
        z = (frequency - share) / deviation
        # the largest of so many, and their spread: neither too random nor too even
        assert z.abs().max() < math.sqrt(2 * math.log(2 * z.numel())) + 3
        if z.numel() > 30:
            assert abs(z.square().mean() - 1) < 6 * math.sqrt(2 / z.numel())


def test_pieces_and_company_make_no_difference(monkeypatch):
    shapes = [(9, 6), (9, 6), (6, 9), (0, 4), (4, 0)]
    xs = [torch.randn(shape) for shape in shapes]
    parts = numbered([f"w{i}" for i, _ in enumerate(shapes)], list(map(on_one_rank, shapes)), [WHOLE] * 5, CPU)
    places = [place for part in parts for place in part.places]
    together = rounded_at_random(xs, places, 1)
    monkeypatch.setattr(foreach, "MOST_BYTES", 400)
    for x, place, other in zip(xs, places, together, strict=True):
        assert torch.equal(rounded_at_random([x], [place], 1)[0], other)


@st.composite
def cuts(draw):
    """A matrix of some fused rows, and rectangles that it is cut into."""
    split, rows = draw(st.sampled_from([(WHOLE, 12), (interleaved(q=2, k=1, v=1), 12)]))
    columns = draw(st.integers(1, 9))
    along = [sorted(draw(st.lists(st.integers(0, end), max_size=3))) for end in (rows, columns)]
    edges = [[0, *inner, end] for inner, end in zip(along, (rows, columns), strict=True)]
    rectangles = [
        Rectangle(top, bottom, left, right)
        for top, bottom in zip(edges[0], edges[0][1:], strict=False)
        for left, right in zip(edges[1], edges[1][1:], strict=False)
    ]
    return split, (rows, columns), rectangles


@given(cuts(), st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_a_shard_is_rounded_as_a_part_of_the_whole(cut, step):
    split, shape, rectangles = cut
    average, momentum = torch.randn(shape), torch.zeros(shape, dtype=torch.bfloat16)
    store([momentum], [average], whole(shape, split=split), step)
    for own in rectangles:
        if not own.numel:
            continue
        layout = Layout(shape, (own,), label="a rank")
        shard = average[own.top : own.bottom, own.left : own.right]
        found = torch.zeros(shard.shape, dtype=torch.bfloat16)
        store([found], [shard.contiguous()], numbered(["w"], [layout], [split], CPU), step)
        assert torch.equal(found, momentum[own.top : own.bottom, own.left : own.right])


def test_rows_that_follow_the_ranks_are_numbered_by_their_matrix():
    split, gate, up = per_shard(gate=4, up=4), torch.randn(4, 3), torch.randn(4, 3)

    def rounded(x, *rectangles):
        layout = Layout((8, 3), rectangles, label="tp", shards=len(rectangles))
        momentum = torch.zeros(x.shape, dtype=torch.bfloat16)
        store([momentum], [x], numbered(["w"], [layout], [split], CPU), 2)
        return momentum

    one = rounded(torch.cat([gate, up]), Rectangle(0, 8, 0, 3))
    first = rounded(torch.cat([gate[:2], up[:2]]), Rectangle(0, 4, 0, 3), Rectangle(4, 8, 0, 3))
    assert torch.equal(first, torch.cat([one[:2], one[4:6]]))
