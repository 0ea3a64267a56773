"""Scripts that time and count: figures are refused where others take the machine, and counts are right."""

import statistics

import models
import newton_schulz
import peers
import pytest
import timing
import torch
from counting import Products

from tests.distributed.ranks import run_ranks


@pytest.fixture
def machine(monkeypatch):
    """A machine whose load and clock are set."""
    now = {"load": 0.1, "seconds": 0.0}
    monkeypatch.setattr(timing.os, "getloadavg", lambda: (now["load"], 0.0, 0.0))
    monkeypatch.setattr(timing.time, "monotonic", lambda: now["seconds"])
    return now


def test_no_figures_while_others_take_the_machine(machine):
    load = timing.Load(own=2)
    machine.update(load=2.2, seconds=600.0)
    load.check()  # its own two are none of others
    machine.update(load=4.0, seconds=1200.0)
    with pytest.raises(SystemExit, match=r"a load of 2\.00 while it was measured"):
        load.check()
    with pytest.raises(SystemExit, match=r"before the first figure.*--any-load"):
        timing.Load(own=2)
    assert timing.Load(own=1, anyway=True).words.endswith("taken with --any-load")


def test_contestants_take_turns_after_a_call_that_does_not_count():
    calls = []
    times = timing.in_turns({name: lambda name=name: calls.append(name) for name in "ab"}, 2)
    assert calls == [*"ababab"]
    assert [len(each) for each in times.values()] == [2, 2]
    assert times["a"].median == statistics.fmean(times["a"])


def test_products_are_counted_with_their_operations():
    x = torch.ones(3, 4)
    with Products() as counted:
        x @ torch.ones(4, 5)
    assert (counted.products, counted.operations, counted.collectives) == (1, 2 * 3 * 4 * 5, 0)
    assert counted.peak >= 4 * (4 * 5 + 3 * 5)


@pytest.mark.parametrize(("model", "billions"), [("llama3-8b", 8.03), ("llama3-70b", 70.55)])
def test_models_have_as_many_parameters_as_is_published(model, billions):
    """With embedding and output layer; norms are less than the last digit."""
    sizes = models.LLAMAS[model]
    shapes = [matrix.shape for parameter in models.matrices_of(sizes) for matrix in parameter]
    entries = sum(rows * cols for rows, cols in shapes)
    assert (entries + 2 * 128256 * sizes.hidden_size) / 1e9 == pytest.approx(billions, rel=5e-4)


def test_every_contestant_orthogonalizes_by_its_own_polynomial():
    device = torch.device("cpu")
    for shape in ((16, 24), (2, 24, 8)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for name, one in (newton_schulz.peers(device, shape) | newton_schulz.ours(device)).items():
            error = newton_schulz.off(one.function(x), newton_schulz.exact(x, one.coefficients))
            assert error < (1e-5 if one.precision == "fp32" else 3e-2), name


def test_times_are_by_those_of_the_fastest_exact_one():
    def row(seconds, off):
        return {"seconds": [seconds], **dict.fromkeys(peers.COLUMNS, 0), "off one rank": off}

    table = peers.table({"a": row(2.0, 0.0), "b": row(1.0, 0.4), "c": row(3.0, 1e-6)}, "highest").splitlines()
    assert [line.split(" | ")[2] for line in table[2:]] == ["1.00", "0.50", "1.50"]


@pytest.mark.wide
def test_updates_of_two_ranks_are_those_of_one_but_blockwise():
    found = run_ranks(measured_of_a_layer, 2)[0]
    for name, figures in found.items():
        assert (figures["off one rank"] > peers.EXACT) == name.endswith("blockwise"), name
        assert figures["state B"] == 4, name


def measured_of_a_layer(rank, ranks):
    """Of every contestant in fp32, for small matrices."""
    peers.FOUR_LAYERS = peers.COMPARED = [(96, 36, 0), (36, 96, 1), (48, 48, 0)]
    return peers.measured(rank, ranks, "highest", 1)
