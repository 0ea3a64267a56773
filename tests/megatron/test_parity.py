"""The same Megatron run with Megatron's own Muon (on emerging-optimizers 0.3.0) and with ours."""

import functools

import pytest

from tests.megatron.runs import LAUNCHER, MUON, TP2, UPSTREAM, train

RUN = ["--num-layers", 4, "--train-iters", 20, *MUON, "--muon-fp32-matmul-prec", "high", "--seed", 42]
LAYOUTS = {
    "one rank": (1, []),
    "duplicated": (2, [*TP2, "--muon-tp-mode", "duplicated"]),
    "distributed": (2, [*TP2, "--muon-tp-mode", "distributed"]),
}
ALONE, DISTRIBUTED = (pytest.param(name, marks=pytest.mark.wide) for name in ("one rank", "distributed"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Gives what the first rank of a layout reported, with our Muon or with theirs."""
    folder = tmp_path_factory.mktemp("parity")

    @functools.cache
    def run(name, label):
        ranks, flags = LAYOUTS[name]
        program = {"ours": LAUNCHER, "theirs": UPSTREAM}[label]
        return train(folder / label / name, ranks, *RUN, *flags, program=program)[0][0]

    return run


@pytest.mark.parametrize("name", [ALONE, "duplicated", DISTRIBUTED])
@pytest.mark.parametrize("figure", ["losses", "grad_norms"])
def test_equals_megatrons_own_muon(runs, name, figure):
    ours, theirs = runs(name, "ours")[figure], runs(name, "theirs")[figure]
    assert len(ours) == {"losses": 40, "grad_norms": 20}[figure]  # two micro-batches a step
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("name", ["duplicated", DISTRIBUTED])
@pytest.mark.parametrize("figure", ["losses", "grad_norms"])
def test_two_ranks_equal_one(runs, name, figure):
    assert runs(name, "ours")[figure] == pytest.approx(runs("one rank", "ours")[figure], rel=1e-4)


def test_the_runs_learn(runs):
    losses = runs("duplicated", "ours")["losses"]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
