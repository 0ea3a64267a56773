"""Numbers of the common state: those with which Megatron would go on elsewhere, or end well at once, are refused."""

import math
from dataclasses import replace

import pytest

from megatron_eopt.checkpoints.contents import read_contents
from megatron_eopt.checkpoints.faults import check_counts
from megatron_eopt.cli import main
from tests.checkpoints import made

COUNTS = ["iteration", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples", "num_steps"]


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """What is found wrong with a checkpoint in which one number is another."""
    contents = read_contents(made.save(tmp_path_factory.mktemp("saved") / "iter_0000005"))

    def of(where, value):
        state = made.common(**({where: value} if where.endswith("_samples") else {}))
        state["opt_param_scheduler"] = made.SCHEDULE | {"num_steps": value if where == "num_steps" else 20}
        state |= {where: value} if where == "iteration" else {}
        return list(check_counts(replace(contents, common=state)))

    return of


@pytest.mark.parametrize("where", COUNTS)
def test_numbers_that_are_no_count(problems, where):
    for value in (math.nan, 1e30, math.inf, -1, "5", None, 10**30, True, [5]):
        problem = problems(where, value)[0]
        assert problem.severity == "error"
        assert where in problem.what
        assert "from 0 on" in problem.what
    for value in (0, 8, 2**40) if where != "iteration" else (5,):
        assert problems(where, value) == []


def test_the_iteration_is_that_of_the_folders_name(tmp_path, capsys):
    folder = made.save(tmp_path / "iter_0000007")
    assert main(["verify-checkpoint", str(folder)]) == 1
    assert "it is of iteration 5, and its folder is named iter_0000007" in capsys.readouterr().out
    for name in ("iter_0000005", "release", "best"):
        assert list(check_counts(read_contents(folder.rename(tmp_path / name)))) == []
        folder = tmp_path / name
