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
from megatron_eopt import (
    DistributedMuon,
    Execution,
    OptimizerConfig,
    TensorParallelMuon,
    build_optimizer,
    metrics,
    watch,
)
from megatron_eopt.metrics import line
from tests.distributed.ranks import run_ranks
from tests.distributed.test_workspace import OPTIMIZERS, stepped
from tests.optimizers.family import build, every

STEPS = 5
PAGE = Path(megatron_eopt.__file__).parents[1] / "docs" / "manifest.md"
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


def residual(update):
    """Of ``update`` over its own scale."""
    squares = torch.linalg.svdvals(update.double()).square()
    return (squares.std(correction=0) / squares.mean()).item()


@pytest.mark.parametrize("method", ["decoupled", "l2"])
def test_figures_are_those_of_the_matrices(method):
    shapes = [(24, 40), (40, 24), (16, 16)]
    parameters, optimizer = muon(*shapes, weight_decay=0.3, weight_decay_method=method)
    seen, gradients = watched(optimizer), [matrix(*shape, 7 + i) for i, shape in enumerate(shapes)]
    before = [parameter.detach().clone() for parameter in parameters]
    step(parameters, optimizer, gradients)
    updates = [(a - b.detach()) / 0.1 for a, b in zip(before, parameters, strict=True)]
    orthogonal = updates[1] - 0.3 * before[1] if method == "decoupled" else updates[1]
    assert seen[1].keys() == {"muon"}
    expected = {
        "learning_rate": 0.1,
        "grad_norm": torch.nn.utils.get_total_norm(gradients).item(),
        "weight_norm": torch.nn.utils.get_total_norm(parameters).item(),
        "momentum_norm": torch.nn.utils.get_total_norm([x["momentum_buffer"] for x in optimizer.state.values()]).item(),
        "update_rms": torch.cat([x.flatten() for x in updates]).square().mean().sqrt().item(),
        "residual": residual(orthogonal),
        "skipped": 0,
    }
    assert seen[1]["muon"] == pytest.approx(expected, rel=1e-4)
    assert expected.keys() == DOCUMENTED
    assert 0.01 < expected["residual"] < 0.5


def test_what_is_watched_changes_no_bit(monkeypatch):
    shapes = [(24, 40), (300, 260)]
    gradients = [[matrix(*shape, 10 * number + i) for i, shape in enumerate(shapes)] for number in range(STEPS)]
    runs, made = [], []
    sample = metrics.Sample
    monkeypatch.setattr(metrics, "Sample", lambda *args: made.append(1) or sample(*args))
    for interval in (None, 1, 2):
        parameters, optimizer = muon(*shapes)
        seen = {} if interval is None else watched(optimizer, interval)
        for each in gradients:
            step(parameters, optimizer, each)
        numbers = [] if interval is None else list(range(interval, STEPS + 1, interval))
        assert list(seen) == numbers
        assert len(made) == len(numbers)  # other steps measure nothing
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
    assert seen[1]["muon"]["update_rms"] == 0  # the whole step is skipped
    assert "residual" not in seen[1]["muon"]
    assert seen[3]["muon"]["update_rms"] > 0
    assert line(seen[3]).startswith("muon: learning rate 0.1, ")
    assert "skipped 2" in line(seen[3])


def test_an_adam_beside_the_matrices_has_figures_of_its_own():
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 24), nn.Linear(24, 32))
    seen = watched(optimizer := build_optimizer(model, OptimizerConfig(name="muon", lr=0.02, muon_adam_lr=3e-3)))
    model(torch.arange(32)).square().sum().backward()
    optimizer.step()
    assert seen[1].keys() == {"muon", "adam", "layers"}
    assert seen[1]["adam"]["learning_rate"] == 3e-3
    assert "residual" not in seen[1]["adam"]
    assert seen[1]["adam"]["update_rms"] == pytest.approx(1, rel=0.1)  # the first of AdamW
    assert "adam: learning rate 0.003, " in line(seen[1])
    total = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()
    assert math.hypot(*(seen[1][name]["grad_norm"] for name in ("muon", "adam"))) == pytest.approx(total, rel=1e-5)


def test_layers_of_one_kind_have_one_norm_and_one_ratio():
    model = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(16, 24), "norm": nn.LayerNorm(24)}) for _ in range(3))
    seen = watched(optimizer := build_optimizer(model, OptimizerConfig(name="muon", lr=0.02)))
    for layer in model:
        layer["norm"](layer["up"](matrix(8, 16))).pow(4).sum().backward()
    weights = [layer["up"].weight for layer in model]
    before = [weight.detach().clone() for weight in weights]
    optimizer.step()
    norm = torch.nn.utils.get_total_norm(weights).item()
    moved = torch.nn.utils.get_total_norm([a - b.detach() for a, b in zip(before, weights, strict=True)]).item()
    layers = seen[1]["layers"]
    assert layers["weight_norm of up"] == pytest.approx(norm)
    assert layers["update_ratio of up"] == pytest.approx(moved / norm, rel=1e-4)
    assert {key.partition(" of ")[2] for key in layers} == {"up", "norms and biases"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decoder.layers.3.mlp.linear_fc1.weight", "linear_fc1"),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight12", "experts.linear_fc1"),
        ("model.layers.3.mlp.experts.gate_up_proj", "experts.gate_up_proj"),
        ("decoder.layers.3.mlp.linear_fc1.layer_norm_weight", "norms and biases"),
        ("decoder.final_layernorm.weight", "norms and biases"),
        ("decoder.layers.0.self_attention.linear_qkv.bias", "norms and biases"),
        ("0.weight", "weight"),
    ],
)
def test_kinds_of_layers(name, kind):
    assert metrics.kind_of_layer(name) == kind


@every
def test_every_optimizer_has_its_rate_and_its_update(name):
    parameter = nn.Parameter(matrix(24, 40))
    seen = watched(optimizer := build(name, [parameter]))
    before = parameter.detach().clone()
    step([parameter], optimizer, [matrix(24, 40, 1)])
    assert seen[1][name]["learning_rate"] == 0.01
    moved = (before - parameter.detach()).square().mean().sqrt().item() / 0.01
    assert seen[1][name]["update_rms"] == pytest.approx(moved, rel=1e-4)


def test_what_cannot_be_watched_is_refused():
    _, optimizer = muon((4, 4))
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match=f"interval is a number of steps, 1 or more, got {wrong}"):
            watch(optimizer, print, wrong)
    with pytest.raises(ValueError, match="there is nothing to watch"):
        watch(TensorParallelMuon([{"params": []}]), print)


MODES = ("duplicated", "owner")


def of_ranks(rank, ranks):
    """The figures of each step, by mode, and of other optimizers."""
    found = {}

    def steps_of(called, make):
        steps = found[called] = []

        def watched(named, **settings):
            optimizer = make(named, **settings)
            watch(optimizer, lambda number, metrics: steps.append(metrics["muon"]), 1)
            return optimizer

        return watched

    for mode in MODES:
        stepped(steps_of(mode, OPTIMIZERS["muon"]), rank, ranks, tp_mode=mode, fp32_matmul_prec="highest")
    make = steps_of("in host memory", OPTIMIZERS["muon"])
    stepped(make, rank, ranks, tp_mode="owner", fp32_matmul_prec="highest", execution=Execution(offload_fraction=0.5))
    parameters = [nn.Parameter(matrix(8, 6, seed)) for seed in range(3)]
    seen = watched(optimizer := DistributedMuon(parameters, lr=0.1, collective_state_dict=False))
    step(parameters, optimizer, [matrix(8, 6, 5 + seed) for seed in range(3)])
    found["dealt"] = [*seen[1].values()]
    return found


def test_ranks_have_the_figures_of_one():
    (alone,), (first, second) = run_ranks(of_ranks, 1), run_ranks(of_ranks, 2)
    for called, steps in alone.items():
        assert steps
        for of_one, *of_two in zip(steps, first[called], second[called], strict=True):
            assert of_two[0] == pytest.approx(of_two[1], rel=0, nan_ok=True)
            assert of_two[0] == pytest.approx(of_one, rel=1e-3, nan_ok=True), called


def test_of_many_entries_some_are_compared(monkeypatch):
    found = []
    for most in (2**26, 500):
        monkeypatch.setattr(metrics, "_SAMPLE", most)
        parameters, optimizer = muon((64, 48), (48, 64))
        seen = watched(optimizer)
        step(parameters, optimizer, [matrix(64, 48, 2), matrix(48, 64, 3)])
        found.append(seen[1]["muon"])
    assert found[1].pop("update_rms") == pytest.approx(found[0].pop("update_rms"), rel=0.1)
    assert found[0] == found[1]


def test_a_shard_counts_once_and_a_copy_by_its_share(monkeypatch):
    monkeypatch.setattr(metrics, "values_of", lambda ranks, value, group: [value])  # a fake group brings nothing
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        found = []
        for placement in (Shard(0), Replicate()):
            weight = nn.Parameter(DTensor.from_local(torch.ones(3, 4), mesh, [placement]))
            weight.grad = DTensor.from_local(torch.full((3, 4), 2.0), mesh, [placement])
            seen = watched(optimizer := torch.optim.SGD([weight], lr=0.1))
            optimizer.step()
            found.append(seen[1]["sgd"])
    finally:
        dist.destroy_process_group()
    # of this rank alone, since a fake group adds nothing up
    assert [each["grad_norm"] for each in found] == pytest.approx([48**0.5, 24**0.5])
    assert [each["update_rms"] for each in found] == pytest.approx([2, 2], rel=1e-5)
