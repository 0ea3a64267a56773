"""The same Megatron run with Megatron's own Muon or SOAP (on emerging-optimizers 0.3.0) and with ours."""

import functools

import pytest

from tests.megatron.runs import LAUNCHER, MUON, SMALL_GPT, TP2, UPSTREAM, assert_trains_as, losses, train, wide

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


# Megatron's own SOAP takes QKV, and gate and up, for one matrix each.
ONE_EACH = [flag for flag in SMALL_GPT if flag != "--swiglu"]
SOAP = "--optimizer soap --lr 3e-3 --min-lr 3e-3 --muon-no-split-qkv".split()
TOKENS = "--seq-length 256 --max-position-embeddings 256".split()  # whose gradients span more of the sides


@pytest.mark.wide
def test_equals_megatrons_own_soap(tmp_path):
    """In the first two steps bit for bit; then losses drift, as rounding is a part of the bases."""
    run = ["--num-layers", 2, "--train-iters", 12, *SOAP, *TOKENS]
    theirs, _ = train(tmp_path / "theirs", 1, *run, program=UPSTREAM, model=ONE_EACH)
    ours, _ = train(tmp_path / "ours", 1, *run, "--muon-preset", "megatron", model=ONE_EACH)
    assert losses(ours)[:4] == pytest.approx(losses(theirs)[:4], rel=1e-6)  # two micro-batches a step
    assert losses(ours) == pytest.approx(losses(theirs), rel=5e-3)
    assert losses(theirs)[-1] < 0.6 * losses(theirs)[0]
