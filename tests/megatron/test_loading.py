"""Checkpoints of other optimizers and other settings: imported or refused with the reason, never loaded in part."""

import functools
import re

import pytest
import torch

from tests.megatron import runs
from tests.megatron.runs import (
    FILES,
    LAUNCHER,
    MUON,
    SHARED,
    UPSTREAM,
    assert_same,
    losses,
    saving,
    train,
    whole,
    wide,
)

RUN = ["--num-layers", 2, *FILES, "--train-iters", 4]
ADAM = ["--optimizer", "adam"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a checkpoint after two steps, and what its run recorded, by the flags that made it."""

    @functools.cache
    def make(*flags, program=tuple(LAUNCHER)):
        folder = tmp_path_factory.mktemp("saved")
        how = {"program": [*program]}
        (rank,), _ = train(folder / "run", 1, *RUN, *flags, *saving(folder / "checkpoint", 2), **how)
        return folder / "checkpoint", rank

    return make


def load(tmp_path, checkpoint, *flags):
    return train(tmp_path / "resumed", 1, *RUN, *flags, "--load", checkpoint)


def refused(checkpoint, *flags):
    """The message with which a load is refused; nothing was trained."""
    said = runs.refused(*RUN, *flags, "--load", checkpoint)
    (message,) = filter(None, (line.partition("CheckpointError: ")[2] for line in said.splitlines()))
    return message


def test_on_request_adams_first_moment_is_the_momentum(tmp_path, saved):
    checkpoint, adam = saved(*ADAM)
    message = refused(checkpoint, *MUON)
    assert "holds exp_avg, exp_avg_sq for decoder." in message
    assert "TensorParallelMuon needs momentum_buffer: Adam wrote it. Pass --muon-momentum-from-adam" in message
    (muon,), output = load(tmp_path, checkpoint, *MUON, "--muon-momentum-from-adam")
    assert "the momenta of 8 parameters are Adam's first moments" in output
    matrices = 0
    for name, state in muon["before"].items():
        was = adam["after"][name]
        assert torch.equal(state["parameter"], was["parameter"])
        if "momentum_buffer" in state:
            matrices += 1
            assert state.keys() == {"parameter", "momentum_buffer", "cut"}
            assert torch.equal(state["momentum_buffer"], was["exp_avg"])
        else:
            assert_same({name: state}, {name: was})
    assert matrices == 8
    assert muon["losses"][-1] < adam["losses"][0]


@pytest.mark.wide
@pytest.mark.parametrize("saved_by_parameter", [True, False])
def test_adams_checkpoint_of_the_distributed_optimizer(tmp_path, saved_by_parameter):
    run, checkpoint = [*RUN, "--bf16", *SHARED], tmp_path / "checkpoint"
    by_parameter = ["--dist-ckpt-optim-fully-reshardable"] if saved_by_parameter else []
    adam, _ = train(tmp_path / "adam", 2, *run, *ADAM, *by_parameter, *saving(checkpoint, 2))
    if not saved_by_parameter:
        message = refused(checkpoint, "--bf16", *MUON, "--muon-momentum-from-adam")
        assert "flat buffers of the distributed optimizer" in message
        assert "save with --dist-ckpt-optim-fully-reshardable" in message
        return
    assert "Adam wrote it. Pass --muon-momentum-from-adam" in refused(checkpoint, "--bf16", *MUON)
    muon, _ = train(tmp_path / "muon", 2, *run, *MUON, "--muon-momentum-from-adam", "--load", checkpoint)
    now = whole([rank["before"] for rank in muon])
    for name, state in now.items():
        was = {"momentum_buffer": "exp_avg"}
        for key in state.keys() & {"main", "momentum_buffer", "exp_avg", "exp_avg_sq"}:
            parts = [rank["after"][name].get(was.get(key, key), torch.zeros(0)) for rank in adam]  # ranges of entries
            assert torch.equal(state[key].flatten(), torch.cat([part.flatten() for part in parts])), (name, key)
    assert sum("momentum_buffer" in state for state in now.values()) == 8
    assert {state["step"].item() for state in now.values() if "step" in state} == {2}
    assert max(losses(muon)) < max(losses(adam))


HIGH = [*MUON, "--muon-fp32-matmul-prec", "high"]


@pytest.mark.parametrize(
    ("here", "there", "flags"),
    [(LAUNCHER, UPSTREAM, ["--muon-tp-mode", "duplicated"]), wide(UPSTREAM, LAUNCHER, [])],
    ids=["theirs here", "ours there"],
)
def test_megatrons_own_muon_and_ours_go_on_from_one_another(tmp_path, saved, here, there, flags):
    checkpoint, before = saved(*HIGH, *flags, program=tuple(there))
    (found,), _ = train(tmp_path / "resumed", 1, *RUN, *HIGH, "--load", checkpoint, program=here)
    assert_same(found["before"], before["after"])
    (straight,), _ = train(tmp_path / "straight", 1, *RUN, *HIGH)
    assert found["losses"] == pytest.approx(straight["losses"][4:], rel=1e-5)


def test_a_changed_learning_rate_is_what_the_user_asked_for(tmp_path, saved):
    checkpoint, _ = saved(*MUON)
    rates = [*MUON, "--lr", 5e-3, "--min-lr", 5e-3]
    # Megatron's scheduler wants to be told which of the two counts
    assert "do not match" in runs.refused(*RUN, *rates, "--load", checkpoint)
    others = ["--muon-momentum", 0.9, "--muon-num-ns-steps", 8, "--muon-coefficient-type", "polar_express"]
    (rank,), output = load(tmp_path, checkpoint, *rates, *others, "--override-opt_param-scheduler")
    muon, adam = [line for line in output.splitlines() if "goes on with other settings" in line]
    assert muon.endswith(
        "coefficient_type quintic -> polar_express, max_lr 0.01 -> 0.005, min_lr 0.01 -> 0.005, "
        "momentum 0.95 -> 0.9, num_ns_steps 5 -> 8"
    )
    assert adam.endswith("in groups 0, 1: max_lr 0.01 -> 0.005, min_lr 0.01 -> 0.005")
    (changed,) = re.findall("changed since the checkpoint: (.*)", output)
    assert re.fullmatch(r"all \d+ parameters: lr 0.01 -> 0.005; min_lr 0.01 -> 0.005", changed)
    assert {group["lr"] for groups in rank["groups"] for group in groups} == {5e-3}
    assert rank["groups"][0][0]["momentum"] == 0.9


def test_a_schedule_of_the_checkpoint_counts_from_the_first_step(tmp_path, saved):
    """Megatron's scheduler alone would let the first step decay as the command line says."""
    checkpoint, _ = saved(*MUON)
    others = [*MUON, "--lr", 5e-3, "--min-lr", 5e-3, "--weight-decay", 0.3]
    (rank,), output = load(tmp_path / "kept", checkpoint, *others, "--use-checkpoint-opt_param-scheduler")
    (same,), _ = load(tmp_path / "same", checkpoint, *MUON)
    assert rank["groups_of_steps"] == same["groups_of_steps"]
    assert_same(rank["after"], same["after"])
    assert "changed since the checkpoint" not in output
    assert "goes on with other settings" not in output
    assert "lr 0.005 -> 0.01; min_lr 0.005 -> 0.01; weight decay 0.3 -> 0.01" in output
