"""The registry and the builders of plain torch, written against KempnerForge's: groups, configs and names."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import megatron_eopt
from megatron_eopt.plain import (
    build_optimizer,
    get_optimizer,
    get_optimizer_builder,
    list_optimizers,
    register_optimizer,
)
from tests.plain.test_build import Model, train


@dataclass
class OptimizerConfig:
    """The fields of the original's, with its defaults."""

    name: str = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    fused: bool = True
    muon_momentum: float = 0.95
    muon_ns_steps: int = 5
    muon_adam_lr: float | None = None
    schedule_free_warmup_steps: int = 0


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(megatron_eopt.registry, "_BUILDERS", dict(megatron_eopt.registry._BUILDERS))


def test_names_are_listed_and_looked_up():
    assert {"adamw", "muon", "lion", "schedule_free_adamw", "soap", "spectron"} <= set(list_optimizers())
    for name in list_optimizers():
        assert get_optimizer(name) is get_optimizer_builder(name)
    for error in (KeyError, ValueError):
        with pytest.raises(error) as caught:
            get_optimizer("moun")
        assert str(caught.value).startswith("unknown optimizer 'moun' (did you mean 'muon'")
        with pytest.raises(error, match="unknown optimizer 'adamax'"):
            build_optimizer(Model(), OptimizerConfig(name="adamax"))


@pytest.mark.parametrize("model", [nn.Linear(4, 4, bias=False), nn.LayerNorm(4)], ids=["matrices", "vectors"])
def test_a_builder_is_given_two_groups_also_where_one_is_empty(registry, model):
    @register_optimizer("sgd")
    def build(param_groups, config):
        decayed, others = param_groups
        assert (decayed["weight_decay"], others["weight_decay"]) == (config.weight_decay, 0.0)
        return torch.optim.SGD([*decayed["params"], *others["params"]], lr=config.lr)

    assert len(build_optimizer(model, OptimizerConfig(name="sgd")).param_groups) == 1
    assert build_optimizer(model, OptimizerConfig(name="adamw")).param_groups[0]["params"]


ORIGINALS = ("adamw", "muon", "lion", "schedule_free_adamw")


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_originals_config_builds_every_one_of_its_names(name):
    config = OptimizerConfig(name=name, lr=2e-3, betas=(0.8, 0.9))
    for given in (config, SimpleNamespace(**vars(config))):
        model = Model()
        optimizer = build_optimizer(model, given)
        assert all(group["lr"] == 2e-3 for group in optimizer.param_groups)
        inner = optimizer.adamw if name == "muon" else optimizer
        assert all(group["betas"] == (0.8, 0.9) for group in inner.param_groups)
        losses = train(model, optimizer)
        assert losses[-1] < losses[0]
