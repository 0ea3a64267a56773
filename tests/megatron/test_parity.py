"""The same Megatron run with Megatron's own Muon (on emerging-optimizers 0.3.0) and with ours."""

import functools

import pytest

from tests.megatron.runs import LAUNCHER, MUON, TP2, UPSTREAM, assert_trains_as, train, wide

RUN = ["--num-layers", 4, "--train-iters", 20, *MUON, "--muon-fp32-matmul-prec", "high", "--seed", 42]
LAYOUTS = {
    "one rank": (1, []),
    "duplicated": (2, [*TP2, "--muon-tp-mode", "duplicated"]),
    "distributed": (2, [*TP2, "--muon-tp-mode", "distributed"]),
}
PROGRAMS = {"ours": LAUNCHER, "theirs": UPSTREAM}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Gives what the ranks of a layout recorded, with our Muon or with theirs."""
    folder = tmp_path_factory.mktemp("parity")

    @functools.cache
    def run(name, whose):
        ranks, flags = LAYOUTS[name]
        return train(folder / whose / name, ranks, *RUN, *flags, program=PROGRAMS[whose])[0]

    return run


@pytest.mark.parametrize("name", [wide("one rank"), "duplicated", wide("distributed")])
def test_equals_megatrons_own_muon_and_one_rank(runs, name):
    ours, theirs = runs(name, "ours"), runs(name, "theirs")
    losses = ours[0]["losses"]
    assert (len(losses), len(ours[0]["grad_norms"])) == (40, 20)  # two micro-batches a step
    assert_trains_as(ours, theirs, rel=1e-4)
    assert_trains_as(ours, runs("one rank", "ours"), rel=1e-4)
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
