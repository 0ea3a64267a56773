"""torch_dist checkpoints: a resumed run is the run that never stopped, and state moves between layouts unchanged."""

import pytest

from tests.megatron.runs import MUON, assert_same, train, whole

RUN = ["--num-layers", 2, *MUON, "--ckpt-format", "torch_dist"]
TP2 = ["--tensor-model-parallel-size", 2]


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_ten_steps_are_five_and_five(tmp_path, precision):
    run = [*RUN, *TP2, *precision]
    straight, _ = train(tmp_path / "straight", 2, *run, "--train-iters", 10)
    saved = ["--save", tmp_path / "checkpoint", "--save-interval", 5]
    first, _ = train(tmp_path / "first", 2, *run, *saved, "--train-iters", 10, "--exit-interval", 5)
    second, _ = train(tmp_path / "second", 2, *run, "--load", tmp_path / "checkpoint", "--train-iters", 10)
    for rank in range(2):
        kept = [name for name, state in straight[rank]["after"].items() if "momentum_buffer" in state]
        assert len(kept) == 8  # qkv, proj, fc1 and fc2 of two layers
        assert_same(second[rank]["before"], first[rank]["after"])
        assert_same(second[rank]["after"], straight[rank]["after"])
        assert first[rank]["losses"] + second[rank]["losses"] == straight[rank]["losses"]
        assert first[rank]["grad_norms"] + second[rank]["grad_norms"] == straight[rank]["grad_norms"]


def test_momentum_moves_from_two_ranks_to_one_and_back(tmp_path):
    def go(name, ranks, steps, load=None):
        flags = [*RUN, *(TP2 if ranks == 2 else []), "--train-iters", 10, "--exit-interval", steps]
        flags += ["--save", tmp_path / f"{name} checkpoint", "--save-interval", steps]
        flags += ["--load", tmp_path / f"{load} checkpoint"] if load else []
        return train(tmp_path / name, ranks, *flags)[0]

    two = go("two", 2, 3)
    one = go("one", 1, 4, load="two")
    assert_same(one[0]["before"], whole([each["after"] for each in two]))
    again = go("again", 2, 5, load="one")
    assert_same(whole([each["before"] for each in again]), one[0]["after"])
    assert all(loss < two[0]["losses"][0] for loss in again[0]["losses"])
