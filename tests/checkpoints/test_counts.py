"""Numbers of the common state: those with which Megatron would go on elsewhere, or end well at once, are refused."""

import math

import pytest
import torch

from megatron_eopt.checkpoints.contents import read_contents
from megatron_eopt.checkpoints.counts import check_counts
from megatron_eopt.cli import main
from tests.checkpoints import made

WRONG = [math.nan, 1e30, math.inf, -1, "5", None, 10**30, True, [5]]


def state_of(where, value):
    """A common state with one number replaced."""
    state = made.common()
    state["opt_param_scheduler"] = made.SCHEDULE | {"num_steps": 20}
    state["optimizer"][0]["megatron_eopt"] = made.block()
    if where == "step":
        state["optimizer"][1]["megatron_eopt"] = made.block("AdamW", ["norm"], common_step=value)
    elif where == "clock":
        state["optimizer"][0]["megatron_eopt"]["groups"][0]["settings"]["clock"] = value
    elif where == "num_steps":
        state["opt_param_scheduler"]["num_steps"] = value
    elif where.endswith("_samples"):
        setattr(state["args"], where, value)
    else:
        state[where] = value
    return state


COUNTS = [
    "iteration",
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "num_steps",
    "clock",
]


CASES = [(where, value) for where in COUNTS for value in WRONG]
CASES += [("num_floating_point_operations_so_far", value) for value in WRONG if value not in (1e30, 10**30)]
CASES += [("step", value) for value in WRONG if value is not None]  # which optimizers without a step of their own have


@pytest.mark.parametrize(("where", "value"), CASES, ids=repr)
def test_what_is_no_count(tmp_path, where, value):
    contents = read_contents(made.save(tmp_path / "iter_0000005", state=state_of(where, value)))
    (problem,) = check_counts(contents)
    assert problem.severity == "error"
    assert where in problem.what
    assert "from 0 on" in problem.what


@pytest.mark.parametrize("where", COUNTS[1:])
@pytest.mark.parametrize("value", [0, 8, 2**40])
def test_what_is_one(tmp_path, where, value):
    contents = read_contents(made.save(tmp_path / "iter_0000005", state=state_of(where, value)))
    assert list(check_counts(contents)) == []


@pytest.mark.parametrize("value", [2, 2.0, torch.tensor(2.0), None])
def test_a_step_of_adamw(tmp_path, value):
    contents = read_contents(made.save(tmp_path / "iter_0000005", state=state_of("step", value)))
    assert list(check_counts(contents)) == []


def test_the_iteration_is_that_of_the_folders_name(tmp_path, capsys):
    folder = made.save(tmp_path / "iter_0000007")
    assert main(["verify-checkpoint", str(folder)]) == 1
    assert "it is of iteration 5, and its folder is named iter_0000007" in capsys.readouterr().out
    for name in ("iter_0000005", "release", "best"):
        assert list(check_counts(read_contents(folder.rename(tmp_path / name)))) == []
        folder = tmp_path / name
