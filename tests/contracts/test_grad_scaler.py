"""torch's GradScaler, as scripts that train in fp16 have it: scaled steps are the steps, and an inf leaves one out."""

import copy

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from megatron_eopt import OptimizerConfig, build_optimizer
from megatron_eopt.family import OPTIMIZERS
from tests.optimizers.family import build, options
from tests.plain.made import assert_same, parameters

SCALE = 2.0**13
PLAIN = ["adamw", *(name for name, row in OPTIMIZERS.items())]
BAD = {"a matrix": ("2.weight", None), "an embedding": ("0.weight", None), "a clipped norm": ("1.weight", 1.0)}
by_config = pytest.mark.parametrize("name", PLAIN)


def scaler_of(**settings):
    return GradScaler("cpu", init_scale=SCALE, **settings)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7))


def optimizer_of(trained, name="muon"):
    return build_optimizer(trained, OptimizerConfig(name=name, lr=0.02, options=options(name)))


def train(trained, optimizer, steps, scaler=None, bad=None, most=None):
    """Train as in torch's recipe; ``bad`` is a parameter whose gradient has an inf, ``most`` bounds the norm."""
    scaler = scaler or scaler_of(enabled=False)
    for step in steps:
        tokens = torch.randint(7, (5,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(trained(tokens), (tokens + 1) % 7)
        scaler.scale(loss).backward()
        if bad is not None:
            trained.get_parameter(bad).grad.view(-1)[1] = torch.inf
        if most is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(trained.parameters(), most)
        scaler.step(optimizer)
        scaler.update()
    return optimizer


def all_of(trained, optimizer):
    return copy.deepcopy([trained.state_dict(), optimizer.state_dict()])


@by_config
def test_a_scaled_run_is_the_run(name):
    for most in (None, 0.1):  # clipped by torch between unscaling and the step
        plain, scaled = model(), model()
        expected = train(plain, optimizer_of(plain, name), range(4), most=most)
        found = train(scaled, optimizer_of(scaled, name), range(4), scaler_of(), most=most)
        assert_same(all_of(scaled, found), all_of(plain, expected))


@by_config
def test_an_inf_anywhere_leaves_everything_as_it_is(name):
    trained, scaler = model(), scaler_of()
    optimizer = train(trained, optimizer_of(trained, name), range(2), scaler)
    for number, (bad, most) in enumerate(BAD.values(), 1):
        before = all_of(trained, optimizer)
        train(trained, optimizer, [2], scaler, bad, most)
        assert_same(all_of(trained, optimizer), before)
        assert scaler.get_scale() == SCALE / 2**number
    train(trained, optimizer, [3], scaler)
    assert not torch.equal(trained[0].weight, before[0]["0.weight"])


@pytest.mark.parametrize("name", ["muon", "adaptive_muon", "soap"])
def test_an_optimizer_by_itself_steps_scaled(name):
    both = parameters((6, 4), (5, 7)), parameters((6, 4), (5, 7))
    plain, scaled = (build(name, params) for params in both)
    scaler = scaler_of()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for p, q in zip(*both, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad * scaler.scale(torch.ones(())).item()
        plain.step()
        scaler.step(scaled)
        scaler.update()
        assert_same(copy.deepcopy(scaled.state_dict()), plain.state_dict())
        assert all(map(torch.equal, *both))
    both[1][0].grad[1, 1] = torch.nan
    scaler.step(scaled)
    assert_same(scaled.state_dict(), plain.state_dict())
    assert all(map(torch.equal, *both))


def test_a_copy_and_a_loaded_optimizer_are_unscaled_too():
    plain, scaled = model(), model()
    train(plain, optimizer_of(plain), range(4))
    first = train(scaled, optimizer_of(scaled), range(2), scaler_of())
    copied, other = copy.deepcopy((scaled, first))
    resumed = optimizer_of(scaled)
    resumed.load_state_dict(first.state_dict())
    for trained, optimizer in ((copied, other), (scaled, resumed)):
        train(trained, optimizer, [2, 3], scaler_of())
        assert_same(trained.state_dict(), plain.state_dict())
