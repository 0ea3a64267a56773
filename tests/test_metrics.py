"""What an optimizer shows of its steps in plain torch, against what follows from its parameters and gradients."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_eopt
from megatron_eopt import OptimizerConfig, TensorParallelMuon, build_optimizer, metrics, watch
from megatron_eopt.metrics import line
from megatron_eopt.parallel.watched import PHASES, Watched
from tests.distributed.ranks import run_ranks
from tests.distributed.test_workspace import OPTIMIZERS, stepped

STEPS = 5
PAGE = Path(megatron_eopt.__file__).parents[1] / "docs" / "metrics.md"
DOCUMENTED = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))


def matrix(rows, cols, seed=0):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def muon(*shapes, **settings):
    parameters = [nn.Parameter(matrix(*shape, seed)) for seed, shape in enumerate(shapes)]
    return parameters, TensorParallelMuon(parameters, lr=0.1, fp32_matmul_prec="highest", **settings)


def step(parameters, optimizer, gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def watched(optimizer, interval=1):
    seen = {}
    watch(optimizer, lambda number, metrics: seen.update({number: metrics}), interval)
    return seen


def effective_rank(x):
    squares = torch.linalg.svdvals(x.double()).square()
    return (squares.sum().square() / squares.square().sum()).item()


@pytest.mark.parametrize("form", ["quintic", "cubic5"])
def test_figures_are_those_of_the_matrices(form):
    shapes, rates = [(24, 40), (40, 24), (16, 16)], {"weight_decay": 0.0, "momentum": 0.5, "nesterov": False}
    parameters, optimizer = muon(*shapes, coefficient_type=form, **rates)
    seen, gradients = watched(optimizer), [matrix(*shape, 7 + i) for i, shape in enumerate(shapes)]
    before = [parameter.detach().clone() for parameter in parameters]
    step(parameters, optimizer, gradients)
    updates = torch.cat([(a - b.detach()).flatten() / 0.1 for a, b in zip(before, parameters, strict=True)])
    assert seen[1].keys() == {"muon"}
    figures = seen[1]["muon"]
    expected = [optimizer.predicted_rms(*shape) ** 2 * math.prod(shape) for shape in shapes]
    ranks = [effective_rank(gradient) for gradient in gradients]  # the first momentum is a multiple of the gradient
    shares = [rank / min(shape) for rank, shape in zip(ranks, shapes, strict=True)]
    wanted = {
        "update_rms": updates.square().mean().sqrt().item(),
        "predicted_update_rms": math.sqrt(sum(expected) / len(updates)),
        "effective_rank": sum(ranks) / 3,
        "effective_rank_share": sum(shares) / 3,
        "smallest_effective_rank_share": min(shares),
        "grad_norm": math.sqrt(sum(gradient.square().sum().item() for gradient in gradients)),
        **{"learning_rate": 0.1, "skipped": 0, "sent_mb": 0},
    }
    assert {key: figures[key] for key in wanted} == pytest.approx(wanted, rel=1e-4)
    assert 0 < figures["residual"] < figures["largest_residual"] < 1
    assert figures["orthogonalize_ms"] > 0
    assert figures["update_ms"] > 0
    assert figures.keys() == DOCUMENTED


def test_what_is_watched_changes_no_bit_and_happens_at_the_interval(monkeypatch):
    shapes = [(24, 40), (300, 260)]
    gradients = [[matrix(*shape, 10 * number + i) for i, shape in enumerate(shapes)] for number in range(STEPS)]
    runs, made = [], []
    monkeypatch.setattr(metrics, "Watched", lambda device: made.append(Watched(device)) or made[-1])
    for interval in (None, 1, 2):
        parameters, optimizer = muon(*shapes)
        seen = {} if interval is None else watched(optimizer, interval)
        for each in gradients:
            step(parameters, optimizer, each)
        numbers = [] if interval is None else list(range(interval, STEPS + 1, interval))
        assert list(seen) == numbers
        # other steps measure nothing
        assert [len(each.figures()[0]) for each in made] == [len(shapes)] * len(numbers)
        made.clear()
        runs.append([parameter.detach() for parameter in parameters])
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


def test_a_gradient_that_is_not_finite_is_counted():
    parameters, optimizer = muon((24, 40), (16, 16))
    seen = watched(optimizer)
    bad = matrix(24, 40)
    bad[0, 0] = math.nan
    for first in (bad, bad, matrix(24, 40)):
        step(parameters, optimizer, [first, matrix(16, 16)])
    assert [figures["muon"]["skipped"] for figures in seen.values()] == [1, 2, 2]
    assert "update_rms" not in seen[1]["muon"]  # the whole step is skipped
    assert math.isfinite(seen[3]["muon"]["update_rms"])
    assert "stepped by a rate of 0.1 | muon: " in line(seen[3])
    assert "skipped 2" in line(seen[3])


def test_an_adam_beside_the_matrices_has_figures_of_its_own():
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 24), nn.Linear(24, 32))
    seen = watched(optimizer := build_optimizer(model, OptimizerConfig(name="muon", lr=0.02, muon_adam_lr=3e-3)))
    model(torch.arange(32)).square().sum().backward()
    optimizer.step()
    assert seen[1].keys() == {"muon", "adam"}
    assert seen[1]["adam"]["learning_rate"] == 3e-3
    assert "residual" not in seen[1]["adam"]
    assert line(seen[1]).startswith("stepped by a rate of 0.02 (muon), 0.003 (adam) | ")
    total = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()
    assert math.hypot(*(figures["grad_norm"] for figures in seen[1].values())) == pytest.approx(total, rel=1e-5)


def test_a_shard_counts_once_in_the_norm_and_what_all_ranks_have_by_its_share():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        found = []
        for placement in (Shard(0), Replicate()):
            weight = nn.Parameter(DTensor.from_local(torch.ones(3, 4), mesh, [placement]))
            weight.grad = DTensor.from_local(torch.full((3, 4), 2.0), mesh, [placement])
            found.append(metrics._squared_gradients(torch.optim.SGD([weight], lr=0.1)))
    finally:
        dist.destroy_process_group()
    assert found == pytest.approx([48.0, 24.0])


@pytest.mark.parametrize("name", ["soap", "lion", "spectron", "polargrad", "muon_hyperball"])
def test_every_optimizer_has_its_rate_and_its_times(name):
    cls = megatron_eopt.family.OPTIMIZERS[name].cls
    parameter = nn.Parameter(matrix(24, 40))
    seen = watched(optimizer := cls([parameter], lr=0.01, **({"rank": 4} if name == "spectron" else {})))
    step([parameter], optimizer, [matrix(24, 40, 1)])
    assert seen[1][name]["learning_rate"] == 0.01
    assert sum(seen[1][name][f"{phase}_ms"] for phase in PHASES) > 0


def test_what_cannot_be_watched_is_refused():
    _, optimizer = muon((4, 4))
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match=f"interval is a number of steps, 1 or more, got {wrong}"):
            watch(optimizer, print, wrong)
    with pytest.raises(ValueError, match="there is nothing to watch"):
        watch([], print)


MODES = ("duplicated", "owner", "gram", "distributed", "auto")
SEEN = ("update_rms", "residual", "largest_residual", "effective_rank", "smallest_effective_rank_share", "skipped")


def of_ranks(rank, ranks):
    """Of each mode the figures of each step, and the bytes of all steps as they are counted."""
    from megatron_eopt.parallel.collectives import counters

    found = {}
    for mode in MODES:
        steps, counted = [], []

        def make(named, steps=steps, **settings):
            optimizer = OPTIMIZERS["muon"](named, **settings)
            optimizer.prepare()
            counters.reset()
            watch(optimizer, lambda number, metrics: steps.append(metrics["muon"]), 1)
            return optimizer

        def count(optimizer, counted=counted):
            counted.append(sum(counters.bytes.values()) / 1e6)
            counters.reset()

        stepped(make, rank, ranks, count, tp_mode=mode, fp32_matmul_prec="highest")
        found[mode] = steps, counted
    return found


def test_ranks_have_the_figures_of_one():
    (alone,), (first, second) = run_ranks(of_ranks, 1), run_ranks(of_ranks, 2)
    for mode in MODES:
        expected, _ = alone[mode]
        (found, sent), (others, sent_by_other) = first[mode], second[mode]
        assert found == others
        for of_one, of_two in zip(expected, found, strict=True):
            assert of_two.keys() == of_one.keys()
            for key in of_one.keys() & set(SEEN):
                assert of_two[key] == pytest.approx(of_one[key], rel=1e-3), (mode, key)
        assert [figures["sent_mb"] for figures in found] == pytest.approx(list(map(max, sent, sent_by_other)))
