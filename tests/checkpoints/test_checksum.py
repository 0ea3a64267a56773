"""One checksum for a global tensor, however it is cut."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.checkpoints.checksum import checksum
from tests.checkpoints.made import sums

WORD = 2**64
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8]


@st.composite
def cut_tensors(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    dtype = draw(st.sampled_from(DTYPES))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 50
    return x.to(dtype), edges


@given(cut_tensors())
def test_shards_add_up_to_the_whole(case):
    x, edges = case
    boxes = itertools.product(*(itertools.pairwise(along) for along in edges))
    shards = [(x[tuple(slice(*side) for side in box)], [start for start, _ in box]) for box in boxes]
    total = sum(int(checksum(shard, offset, x.shape)) for shard, offset in shards)
    assert total % WORD == int(checksum(x, [0] * x.ndim, x.shape)) % WORD == sums({"x": x})["x"][0]


def test_large_tensors_are_taken_in_bands():
    x = torch.arange(3 * 2**21, dtype=torch.int32).view(3, -1)
    whole = int(checksum(x, (0, 0), x.shape))
    assert (sum(int(checksum(x[i : i + 1], (i, 0), x.shape)) for i in range(3)) - whole) % WORD == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bit_or_an_exchange_of_entries_shows(dtype):
    x = (torch.randn(4, 5, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)  # rows of different sums
    before = int(checksum(x, (0, 0), (4, 5)))
    swapped = x[[1, 0, 2, 3]]
    assert int(checksum(swapped, (0, 0), (4, 5))) != before
    flipped = x.clone()
    flipped.view(torch.uint8)[2, 3] ^= 1
    assert int(checksum(flipped, (0, 0), (4, 5))) != before


def test_nothing_is_zero():
    assert int(checksum(torch.empty(0, 4), (0, 0), (3, 4))) == 0
