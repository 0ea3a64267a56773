"""Numbers of the common state: those with which Megatron would go on elsewhere, or end well at once, are refused."""

import math

import pytest

from megatron_eopt.checkpoints.contents import read_contents
from megatron_eopt.checkpoints.faults import check_counts
from megatron_eopt.cli import main
from tests.checkpoints import made

WRONG = [math.nan, 1e30, math.inf, -1, "5", None, 10**30, True, [5]]


def state_of(where, value):
    """A common state with one number replaced."""
    state = made.common()
    state["opt_param_scheduler"] = made.SCHEDULE | {"num_steps": 20}
    if where == "num_steps":
        state["opt_param_scheduler"]["num_steps"] = value
    elif where.endswith("_samples"):
        setattr(state["args"], where, value)
    else:
        state[where] = value
    return state


COUNTS = ["iteration", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples", "num_steps"]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("where", COUNTS)
def test_what_is_no_count(tmp_path, where, value):
    contents = read_contents(made.save(tmp_path / "iter_0000005", state=state_of(where, value)))
    problem = next(check_counts(contents))
    assert problem.severity == "error"
    assert where in problem.what
    assert "from 0 on" in problem.what


@pytest.mark.parametrize("where", COUNTS[1:])
@pytest.mark.parametrize("value", [0, 8, 2**40])
def test_what_is_one(tmp_path, where, value):
    contents = read_contents(made.save(tmp_path / "iter_0000005", state=state_of(where, value)))
    assert list(check_counts(contents)) == []


def test_the_iteration_is_that_of_the_folders_name(tmp_path, capsys):
    folder = made.save(tmp_path / "iter_0000007")
    assert main(["verify-checkpoint", str(folder)]) == 1
    assert "it is of iteration 5, and its folder is named iter_0000007" in capsys.readouterr().out
    for name in ("iter_0000005", "release", "best"):
        assert list(check_counts(read_contents(folder.rename(tmp_path / name)))) == []
        folder = tmp_path / name
