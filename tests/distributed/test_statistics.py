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


CHOICES = [(True, True, True), (True, False, False), (False, True, True), (False, False, False)]


def matrix_of(index, factor=1.0, dtype=torch.float32):
    return (drawn((ROWS, COLS), index) * factor + 0.1 * factor).to(dtype)


def check(found, x, rectangle, choice):
    of_rows, of_columns, norm = choice
    squares = x.double().square()
    for asked, actual, expected in (
        (of_rows, found.get("row_squares"), squares.mean(1)[rectangle.top : rectangle.bottom]),
        (of_columns, found.get("column_squares"), squares.mean(0)[rectangle.left : rectangle.right]),
        (norm, found.get("squared_norm"), squares.sum()),
    ):
        assert (actual is not None) == asked
        if asked:
            torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6 * float(squares.max()))
    if norm:
        assert (found["squared_norm"].dtype, found["squared_norm"].shape) == (torch.float64, ())


def on_ranks(rank, ranks):
    group = dist.group.WORLD
    matrices = [Matrix(name, (ROWS, COLS), rectangles) for name, rectangles in layouts(ranks).items()]
    for choice in CHOICES:
        names = ("row_squares", "column_squares", "squared_norm")
        chosen = dict(zip(names, choice, strict=True))
        cases = [
            (matrix, matrix_of(index, factor, dtype))
            for index, matrix in enumerate(matrices)
            for factor, dtype in ((1.0, torch.float32), (1e-25, torch.float32), (1e6, torch.bfloat16))
            if not (any(choice[:2]) and factor == 1e-25)  # a mean in fp32 has no 1e-50
        ]
        wanted = [
            StatisticsRequest(matrix=matrix, x=part_of(x, matrix.rectangles[rank]), **chosen) for matrix, x in cases
        ]
        counters.reset()
        found = statistics_of(wanted, {"tp": group})
        for (matrix, x), statistics in zip(cases, found, strict=True):
            check(statistics, x, matrix.rectangles[rank], choice)
        numbers = sum(crossing(matrix.name, ranks, *choice) for matrix, _ in cases)
        if numbers:
            assert counters.calls == {"all_reduce": 1}
            assert counters.bytes == {"all_reduce": -(-2 * (ranks - 1) * 8 * numbers // ranks)}
        else:
            assert not counters.calls

        # one matrix that is not finite leaves the others as they are
        index = next(index for index, (matrix, _) in enumerate(cases) if matrix.name == "rows")
        if wanted[index].x.numel() and rank == 0:
            wanted[index].x[0, 0] = torch.nan
        again = statistics_of(wanted, {"tp": group})
        if choice[2]:
            assert again[index]["squared_norm"].isnan()
            assert all(
                torch.equal(a["squared_norm"], b["squared_norm"])
                for a, b in zip(again[index + 1 :], found[index + 1 :], strict=True)
            )
    inner_products(matrices, rank)
    return [each["squared_norm"] for each in statistics_of(norms(matrices, rank), {"tp": group})]


def norms(matrices, rank):
    return [
        StatisticsRequest(matrix=matrix, x=part_of(matrix_of(0), matrix.rectangles[rank]), squared_norm=True)
        for matrix in matrices
    ]


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
