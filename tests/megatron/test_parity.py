"""The same Megatron run with Megatron's own Muon (on emerging-optimizers 0.3.0) and with ours."""

import pytest

from tests.megatron.runs import LAUNCHER, MUON, UPSTREAM, train

RUN = ["--num-layers", 4, "--train-iters", 20, *MUON, "--muon-fp32-matmul-prec", "high", "--seed", 42]
LAYOUTS = {
    "one rank": (1, []),
    "duplicated": (2, ["--tensor-model-parallel-size", 2, "--muon-tp-mode", "duplicated"]),
    "distributed": (2, ["--tensor-model-parallel-size", 2, "--muon-tp-mode", "distributed"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    return {
        (name, label): train(folder / label / name, ranks, *RUN, *flags, program=program)[0][0]
        for name, (ranks, flags) in LAYOUTS.items()
        for label, program in (("ours", LAUNCHER), ("theirs", UPSTREAM))
    }


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("figure", ["losses", "grad_norms"])
def test_equals_megatrons_own_muon(runs, name, figure):
    ours, theirs = runs[name, "ours"][figure], runs[name, "theirs"][figure]
    assert len(ours) == {"losses": 40, "grad_norms": 20}[figure]  # two micro-batches a step
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("name", ["duplicated", "distributed"])
@pytest.mark.parametrize("figure", ["losses", "grad_norms"])
def test_two_ranks_equal_one(runs, name, figure):
    assert runs[name, "ours"][figure] == pytest.approx(runs["one rank", "ours"][figure], rel=1e-4)


def test_the_runs_learn(runs):
    losses = runs["duplicated", "ours"]["losses"]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
