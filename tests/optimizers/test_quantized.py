"""Momenta in 8 bits: values against numbers of Python, how often rounding goes up, and blocks that no shard cuts."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt import TensorParallelMuon
from megatron_eopt.matrices import WHOLE, interleaved, per_shard, transposed
from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.quantized import quantized, widened
from megatron_eopt.optimizers.rounding import in_fp32, numbered, store
from megatron_eopt.parallel.layout import Layout, on_one_rank
from megatron_eopt.parallel.records import Rectangle

BLOCK, MOST = 128, 127
CPU = torch.device("cpu")
ALL_NOISES = torch.arange(2**16, dtype=torch.int32).view(1024, 64)


def fp32(x):
    """The nearest number of fp32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def expected(row, noises):
    """Codes and scales of a row of Python's numbers, one after another."""
    codes, scales = [], []
    for start in range(0, len(row), BLOCK):
        block = row[start : start + BLOCK]
        scale = fp32(max(map(abs, block)) / MOST)
        scales.append(scale)
        for x, noise in zip(block, noises[start : start + BLOCK], strict=True):
            count = min(MOST, fp32(abs(x) / scale)) if scale else 0.0
            codes.append(int(math.copysign(math.floor(count + (noise + 0.5) / 65536), x)))
    return codes, scales


@pytest.mark.parametrize("columns", [1, 128, 129, 300])
def test_codes_and_scales_are_those_of_the_formula(columns):
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(6, columns, generator=generator) * 10.0 ** torch.arange(-20, 16, 6)[:, None]
    x[1, columns // 2 :] = 0
    x[2, :128] = 0
    noise = torch.randint(2**16, x.shape, generator=generator, dtype=torch.int32)
    codes, scales = quantized(x, noise)
    for row, noises, of_row, of_blocks, back in zip(
        *(each.tolist() for each in (x, noise, codes, scales, widened(codes, scales))), strict=True
    ):
        assert (of_row, of_blocks) == expected(row, noises)
        assert back == [fp32(code * of_blocks[i // BLOCK]) for i, code in enumerate(of_row)]


@given(st.floats(0, MOST), st.booleans())
@settings(max_examples=60, deadline=None)
def test_of_all_noises_as_many_round_up_as_the_distance_says(count, negative):
    x = torch.full((1024, 65), -count if negative else count)
    x[:, -1] = MOST
    codes, scales = quantized(x, torch.nn.functional.pad(ALL_NOISES, (0, 1)))
    assert (scales == 1).all()
    codes = codes[:, :-1].flatten()
    magnitudes, below = codes.abs().long(), math.floor(fp32(count))
    assert set(magnitudes.tolist()) <= {below, below + 1}
    assert abs((magnitudes - below).sum().item() - 65536 * (fp32(count) - below)) <= 1
    assert not ((codes > 0) if negative else (codes < 0)).any()


@given(st.floats(2**-110, 2**120, width=32), st.integers(0, BLOCK - 1), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_largest_of_a_block_stays(largest, at, negative):
    x = torch.zeros(2, BLOCK)
    x[:, at] = -largest if negative else largest
    codes, scales = quantized(x, torch.tensor([[0], [2**16 - 1]], dtype=torch.int32).expand(2, BLOCK))
    assert (codes[:, at] == (-MOST if negative else MOST)).all()
    torch.testing.assert_close(widened(codes, scales), x, rtol=2**-23, atol=0)


@pytest.mark.parametrize("noise", [0, 2**16 - 1])
def test_zero_tiny_huge_and_what_is_no_number(noise):
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    rows = [[0.0, -0.0], [tiny, -tiny / 8], [100 * tiny, tiny], [huge, 1.0], [-math.inf, 2.0], [math.nan, 1.0]]
    x = torch.tensor(rows)
    codes, scales = quantized(x, torch.full(x.shape, noise, dtype=torch.int32))
    back = widened(codes, scales)
    assert (codes[:3] == 0).all()
    assert (back[:3] == 0).all()
    assert (scales[:3] == 0).all()
    assert back[3:5].isfinite().all()
    assert back[3:5, 0].tolist() == [MOST * 2.0**120, -MOST * 2.0**120]
    assert back[5].isnan().all()
    # and of rows without entries there is nothing
    for shape in ((0, 300), (4, 0)):
        codes, scales = quantized(torch.zeros(shape), torch.zeros(shape, dtype=torch.int32))
        assert codes.shape == widened(codes, scales).shape == shape
        assert scales.shape == (shape[0], -(-shape[1] // BLOCK))


def kept_of(average, layout, split, step, stacked=False):
    """What :func:`store` makes of an average: codes and scales."""
    codes = torch.zeros(average.shape, dtype=torch.int8)
    rows, columns = average.shape[-2:]
    of_blocks = (-(-rows // BLOCK), columns) if split.transposed else (rows, -(-columns // BLOCK))
    scales = torch.zeros(*average.shape[:-2], *of_blocks)
    parts = numbered(["w"], [layout], [split], CPU)
    store([codes], [average], parts, step, [scales])
    (back,) = in_fp32([codes], [scales], parts)
    error = (back - average).abs()
    assert error.max() <= average.abs().max() / MOST * 1.001
    assert back.any()
    return codes, scales


@st.composite
def cuts(draw):
    """A matrix of some fused rows, and rectangles that it is cut into, at whole blocks of columns."""
    split, rows = draw(st.sampled_from([(WHOLE, 12), (interleaved(q=2, k=1, v=1), 12)]))
    columns = draw(st.integers(1, 520))
    edges = [
        [0, *sorted(draw(st.lists(st.integers(0, rows), max_size=3))), rows],
        [0, *sorted(draw(st.lists(st.sampled_from(range(0, columns, BLOCK)), max_size=2))), columns],
    ]
    rectangles = [
        Rectangle(top, bottom, left, right)
        for top, bottom in zip(edges[0], edges[0][1:], strict=False)
        for left, right in zip(edges[1], edges[1][1:], strict=False)
    ]
    return split, (rows, columns), rectangles


@given(cuts(), st.integers(0, 2**40), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_shard_is_rounded_as_a_part_of_the_whole(cut, step, turned):
    split, shape, rectangles = cut
    split = transposed(split) if turned else split

    def kept(x, layout):
        codes, scales = kept_of(x.T.contiguous() if turned else x, layout, split, step)
        return (codes.T, scales.T) if turned else (codes, scales)

    average = torch.randn(shape) * torch.randn(shape[0], 1).exp()
    codes, scales = kept(average, on_one_rank(shape))
    for own in rectangles:
        if own.numel:
            shard = average[own.top : own.bottom, own.left : own.right]
            of_shard, of_blocks = kept(shard.contiguous(), Layout(shape, (own,), label="a rank"))
            assert torch.equal(of_shard, codes[own.top : own.bottom, own.left : own.right])
            blocks = slice(own.left // BLOCK, -(-own.right // BLOCK))
            assert torch.equal(of_blocks, scales[own.top : own.bottom, blocks])


def test_pieces_and_company_make_no_difference(monkeypatch):
    xs = [torch.randn(shape) for shape in [(9, 200), (9, 200), (6, 9)]]
    names, layouts = ["w0", "w1", "w2"], [on_one_rank(x.shape) for x in xs]

    def stored(indices):
        parts = numbered([names[i] for i in indices], [layouts[i] for i in indices], [WHOLE] * len(indices), CPU)
        codes = [torch.zeros(xs[i].shape, dtype=torch.int8) for i in indices]
        scales = [torch.zeros(len(xs[i]), -(-xs[i].shape[1] // BLOCK)) for i in indices]
        store(codes, [xs[i] for i in indices], parts, 1, scales)
        return codes + scales

    together = stored([0, 1, 2])
    monkeypatch.setattr(foreach, "MOST_BYTES", 4000)
    for i in range(3):
        codes, scales = stored([i])
        assert torch.equal(codes, together[i])
        assert torch.equal(scales, together[3 + i])


def test_rows_of_padding_are_zero():
    average = torch.randn(6, 150)
    whole, scales = kept_of(average, on_one_rank((6, 150)), WHOLE, 3)
    padded = torch.cat([average[4:], torch.zeros(2, 150)])
    last = Layout((6, 150), (Rectangle(4, 6, 0, 150),), label="the last rank", padding=2)
    codes, of_blocks = kept_of(padded, last, WHOLE, 3)
    assert torch.equal(codes[:2], whole[4:])
    assert torch.equal(of_blocks[:2], scales[4:])
    assert not codes[2:].any()
    assert not of_blocks[2:].any()


def test_what_is_not_accepted_keeps_codes_and_scales():
    parts = numbered(["a", "b"], [on_one_rank((4, 130))] * 2, [WHOLE] * 2, CPU)
    codes = [torch.full((4, 130), 3, dtype=torch.int8) for _ in range(2)]
    scales = [torch.full((4, 2), 0.25) for _ in range(2)]
    store(codes, [torch.randn(4, 130) for _ in range(2)], parts, 5, scales, torch.tensor([True, False]))
    assert (codes[1] == 3).all()
    assert (scales[1] == 0.25).all()
    assert not (codes[0] == 3).all()
    assert (scales[0] != 0.25).all()


def test_a_layout_that_cuts_a_block_is_refused():
    def parameter(columns):
        p = torch.nn.Parameter(torch.ones(8, columns))
        p.logical_matrices = per_shard(gate=4, up=4)
        return p

    class CutAt(TensorParallelMuon):
        """As on a rank of two that share columns."""

        edge = 0

        def layout(self, p):
            whole = on_one_rank(tuple(p.shape))
            halves = Rectangle(0, 8, 0, self.edge), Rectangle(0, 8, self.edge, p.shape[1])
            return Layout(whole.shape, halves, label="two ranks") if self.edge else whole

    CutAt.edge = 256
    CutAt([("w", parameter(300))], momentum_dtype=torch.int8)
    CutAt.edge = 150
    CutAt([("w", parameter(300))], momentum_dtype=torch.bfloat16)
    message = r"CutAt: w, a matrix \(8, 300\), is cut at column 150, and a momentum in int8 has one scale for every 128"
    with pytest.raises(ValueError, match=message):
        CutAt([("w", parameter(300))], momentum_dtype=torch.int8)
