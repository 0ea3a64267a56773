"""The table of a plan."""

import re
from dataclasses import replace

import pytest
from hypothesis import given

from megatron_eopt.kernels.products import Products
from megatron_eopt.parallel.cost import Costs, plan_cost
from megatron_eopt.parallel.explain import explain
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.workspace import Workspace
from megatron_eopt.screen import figure
from tests.parallel.plans import WORK, WORKS, matrices, modes, some, work_of

MIXED = [
    *some(8, (4096, 16384), 1),
    *some(1, (16384, 4096), 0),
    *some(3, (48, 30), 0, ranks=1),
    *some(5, (64, 64), None, group="dp"),
]


def rows(text):
    """The lines below the titles as lists of cells, which two spaces or more divide."""
    lines = text.splitlines()
    under = next(number for number, line in enumerate(lines) if line.startswith("---"))
    return [re.split(r"\s{2,}", line.strip()) for line in lines[under + 1 :]]


def test_a_row_for_each_shape_and_the_totals():
    plan = make_plan(MIXED, "auto", WORKS)
    table = rows(explain(plan, WORKS))
    count = table.index([""])
    assert count == len(plan.buckets) - 1
    of_buckets = {row[0]: row for row in table[:count]}
    assert of_buckets["8 of 4096 x 16384"][1:3] == ["tp", "owner"]
    assert of_buckets["1 of 16384 x 4096"][1:3] == ["tp", "gram_split"]
    assert of_buckets["3 of 48 x 30"][1:3] == ["-", "local"]
    assert of_buckets["5 of 64 x 64"][1:3] == ["dp", "share"]  # in two buckets
    cost = Costs(plan, WORKS).of_bucket(plan.buckets[0])
    assert table[0][3:] == [figure(cost.flops / 1e12), figure(cost.bytes / 1e6), str(cost.collectives)]
    totals = {row[0]: row for row in table[count:]}
    assert float(totals["all 17: this plan"][1]) == pytest.approx(plan_cost(plan, WORKS).flops / 1e12, rel=5e-3)
    for mode in ("duplicated", "distributed", "blockwise"):
        other = plan_cost(make_plan(MIXED, mode, WORKS), WORKS)
        assert float(totals[mode][1]) == pytest.approx(other.flops / 1e12, rel=5e-3)
        assert int(totals[mode][-1]) == other.collectives


def test_it_says_why_temporaries_are_more_than_the_workspace():
    large = Workspace(bytes=2**28)
    text = explain(make_plan(some(1, (8192, 16384), None, ranks=1), "auto", WORKS), WORKS, workspace=large)
    assert "3,221 MB of momentum and update of shards.\nThat is more than the workspace" in text
    text = explain(make_plan(some(1, (8192, 16384), 0), "auto", WORKS, workspace=large), WORKS, workspace=large)
    assert "Peak: 671 MB of chunks" in text
    assert "more than the workspace" not in explain(make_plan(some(1, (64, 64), 0), "auto", WORKS), WORKS)


@given(matrices(), modes)
def test_it_is_at_most_80_columns_wide(given_matrices, mode):
    text = explain(make_plan(given_matrices, mode, WORKS), WORKS)
    assert max(map(len, text.splitlines())) <= 80


def test_it_says_what_each_iteration_runs():
    names = ["5 steps of quintic", "5 steps of cubic5"]
    works = dict(zip(names, [WORK, work_of("cubic5", Products())], strict=True))
    both = [replace(m, iteration=names[i % 2]) for i, m in enumerate(some(5, (4096, 16384), 1))]
    text = explain(make_plan(both, "owner", works), works)
    assert {row[0] for row in rows(text)[:2]} == {"3 of 4096 x 16384 #1", "2 of 4096 x 16384 #2"}
    assert "#1: 5 steps of quintic:\n  Gram form with 1 restart in float32, 50% of a symmetric product" in text
    assert "#2: 5 steps of cubic5:\n  Gram form with 0 restarts in float32, 100%" in text
    one = explain(make_plan(both[::2], "distributed", works), {names[0]: WORK})
    assert "#" not in one
    assert "\n  standard form in float32, 50%" in one


def test_what_is_compared_is_cut_into_chunks_as_the_plan_is():
    """Matrices of one parameter stay in one chunk."""
    fused = some(18, (256, 256), 0)
    parameters = [number // 3 for number in range(18)]
    workspace = Workspace(bytes=6 * 2**20)
    plan = make_plan(fused, "distributed", WORKS, workspace=workspace, parameters=parameters)
    table = {row[0]: row for row in rows(explain(plan, WORKS, workspace, parameters))}
    assert table["distributed"][1:] == table["all 18: this plan"][1:]
