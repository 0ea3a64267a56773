"""Checkpoints of other optimizers and other settings: imported or refused with the reason, never loaded in part."""

import pytest
import torch

from tests.megatron.runs import LAUNCHER, MUON, SMALL_GPT, UPSTREAM, assert_same, start, train

RUN = ["--num-layers", 2, "--ckpt-format", "torch_dist", "--train-iters", 4]
ADAM = ["--optimizer", "adam"]
ADAPTIVE = ["--optimizer", "adaptive_muon", "--muon-nesterov", "--adaptive-muon-moment2-method"]
SAVE = ["--save-interval", 2, "--exit-interval", 2, "--save"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a checkpoint after two steps, and what its run recorded, by the flags that made it."""
    made = {}

    def make(*flags, program=LAUNCHER):
        key = (*map(str, flags), *program)
        if key not in made:
            folder = tmp_path_factory.mktemp("saved")
            (rank,), _ = train(folder / "run", 1, *RUN, *flags, *SAVE, folder / "checkpoint", program=program)
            made[key] = folder / "checkpoint", rank
        return made[key]

    return make


def load(tmp_path, checkpoint, *flags):
    return train(tmp_path / "resumed", 1, *RUN, *flags, "--load", checkpoint)


def refused(checkpoint, *flags):
    """The message with which a load is refused; nothing was trained and nothing changed."""
    before = {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")}
    done = start(1, *SMALL_GPT, *RUN, *flags, "--load", checkpoint)
    assert done.returncode != 0
    assert {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")} == before
    assert "iteration        3/" not in done.stdout
    said = [line.partition("CheckpointError: ")[2] for line in done.stdout.splitlines()]
    (message,) = filter(None, said)
    return message


def test_adams_checkpoint_is_refused_and_on_request_its_first_moment_is_the_momentum(tmp_path, saved):
    checkpoint, adam = saved(*ADAM)
    message = refused(checkpoint, *MUON)
    assert "holds exp_avg, exp_avg_sq for decoder." in message
    assert "TensorParallelMuon needs momentum_buffer: Adam wrote it. Pass --muon-momentum-from-adam" in message
    (muon,), _ = load(tmp_path, checkpoint, *MUON, "--muon-momentum-from-adam")
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


def test_megatrons_own_muon_goes_on_here(tmp_path, saved):
    flags = [*MUON, "--muon-fp32-matmul-prec", "high"]
    checkpoint, theirs = saved(*flags, "--muon-tp-mode", "duplicated", program=UPSTREAM)
    (ours,), _ = load(tmp_path, checkpoint, *flags)
    assert_same(ours["before"], theirs["after"])
    (straight,), _ = train(tmp_path / "straight", 1, *RUN, *flags)
    assert ours["losses"] == pytest.approx(straight["losses"][4:], rel=1e-5)


@pytest.mark.full
def test_other_settings_of_the_same_family_are_refused(saved):
    message = refused(saved(*MUON)[0], *ADAPTIVE, "normuon")
    assert "it holds momentum_buffer for decoder." in message
    assert "TensorParallelAdaptiveMuon needs moment2_buffer" in message
    assert "resume with that one, or pass --no-load-optim" in message


@pytest.mark.full
def test_weights_alone_load_where_the_user_says_so(tmp_path, saved):
    checkpoint, muon = saved(*MUON)
    (adaptive,), _ = load(tmp_path, checkpoint, *ADAPTIVE, "namo", "--no-load-optim")
    for name, state in adaptive["before"].items():
        assert torch.equal(state["parameter"], muon["after"][name]["parameter"])
        assert not state.get("momentum_buffer", torch.zeros(1)).any()


def test_a_changed_learning_rate_is_what_the_user_asked_for(tmp_path, saved):
    checkpoint, _ = saved(*MUON)
    changed = ["--lr", 5e-3, "--min-lr", 5e-3, "--muon-momentum", 0.9]
    done = start(1, *SMALL_GPT, *RUN, *MUON, *changed, "--load", checkpoint)
    assert "do not match" in done.stdout  # Megatron's scheduler wants to be told which of the two counts
    assert done.returncode != 0
    (rank,), output = load(tmp_path, checkpoint, *MUON, *changed, "--override-opt-param-scheduler")
    said = [line for line in output.splitlines() if "goes on with other settings" in line]
    assert "group 0 of TensorParallelMuon" in said[0]
    assert "max_lr 0.01 -> 0.005, min_lr 0.01 -> 0.005, momentum 0.95 -> 0.9" in said[0]
    assert {group["lr"] for groups in rank["groups"] for group in groups} == {5e-3}
    assert rank["groups"][0][0]["momentum"] == 0.9
    (rank,), _ = train(
        tmp_path / "kept", 1, *RUN, *MUON, *changed[:4], "--load", checkpoint, "--use-checkpoint-opt_param-scheduler"
    )
    assert {group["lr"] for groups in rank["groups"] for group in groups} == {1e-2}
