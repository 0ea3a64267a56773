"""Means and norms of global matrices from shards are those of one process."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.parallel.collectives import counters
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.parallel.rectangles import Rectangle, cut_at, whole
from megatron_eopt.parallel.statistics import StatisticsRequest, statistics_of
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import part_of
from tests.optimizers.field import drawn

ROWS, COLS = 14, 22


def layouts(ranks):
    shape = (ROWS, COLS)
    edges = [round(ROWS * part / (ranks - 1)) for part in range(ranks)]
    return {
        "rows": cut_at(shape, 0, [ROWS * part // ranks for part in range(ranks + 1)]),
        "columns": cut_at(shape, 1, [COLS * part // ranks for part in range(ranks + 1)]),
        "all rows on one": cut_at(shape, 0, [0] + [ROWS] * ranks),
        "all columns on one": cut_at(shape, 1, [0] + [COLS] * ranks),
        "blocks": (*(Rectangle(top, end, 0, 8) for top, end in pairwise(edges)), Rectangle(0, ROWS, 8, COLS)),
        "whole": (whole(shape),) * ranks,
    }


def crossing(name, ranks, of_rows, of_columns, norm):
    """Numbers that are summed over the ranks."""
    rows = ROWS if name in ("columns", "all columns on one", "blocks") else 0
    columns = COLS if name in ("rows", "all rows on one") or (name == "blocks" and ranks > 2) else 0
    return of_rows * rows + of_columns * columns + (norm and name != "whole")


def matrix_of(index, factor=1.0, dtype=torch.float32):
    return (drawn((ROWS, COLS), index) * factor + 0.1 * factor).to(dtype)


NAMES = ("row_squares", "column_squares", "squared_norm")


def check(found, x, rectangle, names):
    squares = x.double().square()
    of_whole = squares.mean(1)[rectangle.top : rectangle.bottom], squares.mean(0)[rectangle.left : rectangle.right]
    expected = dict(zip(NAMES, (*of_whole, squares.sum()), strict=True))
    assert found.keys() == set(names)
    for name in names:
        tolerance = {"rtol": 1e-6, "atol": 1e-6 * float(squares.max())}
        torch.testing.assert_close(found[name].double(), expected[name], **tolerance)
    assert "squared_norm" not in names or found["squared_norm"].dtype == torch.float64


def on_ranks(rank, ranks):
    groups = {"tp": dist.group.WORLD}
    matrices = [Matrix(name, (ROWS, COLS), rectangles) for name, rectangles in layouts(ranks).items()]
    # a mean in fp32 has no 1e-50
    cases = [(NAMES, 1.0, torch.float32), (NAMES, 1e6, torch.bfloat16), (NAMES[2:], 1e-25, torch.float32)]
    cases += [((name,), 1.0, torch.float32) for name in NAMES]
    xs = [(m, matrix_of(i, *of_x), names) for i, m in enumerate(matrices) for names, *of_x in cases]
    wanted = [
        StatisticsRequest(matrix=m, x=part_of(x, m.rectangles[rank]), **dict.fromkeys(names, True))
        for m, x, names in xs
    ]
    counters.reset()
    found = statistics_of(wanted, groups)
    for (matrix, x, names), statistics in zip(xs, found, strict=True):
        check(statistics, x, matrix.rectangles[rank], names)
    numbers = sum(crossing(m.name, ranks, *(name in names for name in NAMES)) for m, _, names in xs)
    assert counters.calls == {"all_reduce": 1}
    assert counters.bytes == {"all_reduce": -(-2 * (ranks - 1) * 8 * numbers // ranks)}
    # one matrix that is not finite leaves the others as they are
    if wanted[0].x.numel() and rank == 0:
        wanted[0].x[0, 0] = torch.nan
    first, *others = statistics_of(wanted, groups)
    assert first["squared_norm"].isnan()
    for other, before in zip(others, found[1:], strict=True):
        assert all(torch.equal(x, before[name]) for name, x in other.items())
    inner_products(matrices, rank)
    return [each["squared_norm"] for each in found if "squared_norm" in each]


def inner_products(matrices, rank):
    """Of two matrices in every layout, and in two dtypes, by one exchange."""
    x, y = matrix_of(0), matrix_of(1, dtype=torch.bfloat16)
    wanted = [
        StatisticsRequest(matrix=matrix, x=part_of(x.to(dtype), rectangle), inner=part_of(y, rectangle))
        for matrix in matrices
        for rectangle in [matrix.rectangles[rank]]
        for dtype in (torch.float32, torch.float64)
    ]
    counters.reset()
    for each in statistics_of(wanted, {"tp": dist.group.WORLD}):
        assert each.keys() == {"inner_product"}
        torch.testing.assert_close(each["inner_product"], (x.double() * y.double()).sum(), rtol=1e-12, atol=0)
    assert counters.calls == {"all_reduce": 1}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.wide), 4])
def test_statistics_are_those_of_one_process(ranks):
    first, *others = run_ranks(on_ranks, ranks)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
