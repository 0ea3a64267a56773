"""The registry and the builders of plain torch, written against KempnerForge's: groups, configs and names."""

import logging
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import megatron_eopt
from megatron_eopt import Muon
from megatron_eopt.plain import (
    build_optimizer,
    get_optimizer,
    get_optimizer_builder,
    list_optimizers,
    register_optimizer,
)


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


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 12)
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 13, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.down(self.up(x).relu())))


def train(model, optimizer, steps=6):
    tokens, losses = torch.arange(13), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(megatron_eopt.registry, "_BUILDERS", dict(megatron_eopt.registry._BUILDERS))


def test_names_are_listed_and_looked_up():
    assert {"adamw", "muon", "lion", "schedule_free_adamw", "soap", "spectron"} <= set(list_optimizers())
    assert "adaptive_muon" not in list_optimizers()  # which Megatron alone builds
    for name in list_optimizers():
        assert get_optimizer(name) is get_optimizer_builder(name)


@pytest.mark.parametrize("error", [KeyError, ValueError])
def test_an_unknown_name_is_a_missing_key_and_a_bad_value(error):
    with pytest.raises(error) as caught:
        get_optimizer("moun")
    assert str(caught.value).startswith("unknown optimizer 'moun' (did you mean 'muon'")
    with pytest.raises(error, match="unknown optimizer 'adamax'"):
        build_optimizer(Model(), OptimizerConfig(name="adamax"))


def test_a_name_is_registered_once(registry):
    @register_optimizer("mine")
    def build(param_groups, config):
        return torch.optim.SGD(param_groups, lr=config.lr)

    assert get_optimizer("mine") is build
    assert "mine" in list_optimizers()
    with pytest.raises(ValueError, match="an optimizer named 'mine' is registered already"):
        register_optimizer("mine")(build)


def test_a_builder_may_give_parts_of_groups_to_several(registry):
    seen = []

    @register_optimizer("two_of_mine")
    def build(param_groups, config):
        seen.append((len(param_groups), config))
        muon, adam = [], []
        for group in param_groups:
            matrices = [p for p in group["params"] if p.ndim == 2]
            vectors = [p for p in group["params"] if p.ndim != 2]
            if matrices:
                muon.append({**group, "params": matrices})
            if vectors:
                adam.append({**group, "params": vectors})
        return Muon(muon, adam, lr=config.lr, momentum=config.muon_momentum)

    model, config = Model(), SimpleNamespace(name="two_of_mine", lr=0.02, muon_momentum=0.9, weight_decay=0.3)
    optimizer = build_optimizer(model, config)
    assert seen == [(2, config)]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3]
    assert [group["weight_decay"] for group in optimizer.adamw.param_groups] == [0.0]
    losses = train(model, optimizer)
    assert losses[-1] < losses[0]


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
@pytest.mark.parametrize("as_namespace", [False, True])
def test_the_originals_config_builds_every_one_of_its_names(name, as_namespace):
    config = OptimizerConfig(name=name, lr=2e-3, betas=(0.8, 0.9))
    model = Model()
    optimizer = build_optimizer(model, SimpleNamespace(**vars(config)) if as_namespace else config)
    assert all(group["lr"] == 2e-3 for group in optimizer.param_groups)
    inner = optimizer.adamw if name == "muon" else optimizer
    assert all(group["betas"] == (0.8, 0.9) for group in inner.param_groups)
    losses = train(model, optimizer)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", list_optimizers())
def test_fields_that_a_config_lacks_are_at_our_defaults(name):
    config = SimpleNamespace(name=name, lr=1e-3, **({"options": {"rank": 4}} if name == "spectron" else {}))
    model = Model()
    optimizer = build_optimizer(model, config)
    train(model, optimizer, steps=2)
    every = [*optimizer.param_groups, *getattr(getattr(optimizer, "adamw", None), "param_groups", [])]
    assert {group["weight_decay"] for group in every} >= {0.0, 0.1}


def test_a_setting_of_another_config_is_checked_as_ours_are():
    with pytest.raises(ValueError, match="muon_ns_steps must be a whole number of at least 1, got 0"):
        build_optimizer(Model(), OptimizerConfig(name="muon", muon_ns_steps=0))


def test_builders_are_called_by_themselves():
    model = Model()
    groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    optimizer = get_optimizer("muon")(groups, OptimizerConfig(lr=0.01, muon_adam_lr=1e-3, muon_ns_steps=7))
    assert [group["ns_steps"] for group in optimizer.param_groups] == [7]
    assert [group["lr"] for group in optimizer.adamw.param_groups] == [1e-3]
    assert sum(p.numel() for group in groups for p in group["params"]) == sum(p.numel() for p in model.parameters())


def test_decay_is_for_matrices_and_counts_are_logged(caplog):
    with caplog.at_level(logging.INFO):
        optimizer = build_optimizer(Model(), OptimizerConfig(name="muon", weight_decay=0.2))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2]
    assert [group["weight_decay"] for group in optimizer.adamw.param_groups] == [0.2, 0.0]
    assert caplog.messages[0].startswith(
        "muon: weight decay 0.2 of 4 parameters with 792 entries, none of 4 parameters"
    )
    assert caplog.messages[1].startswith("muon: 2 matrices with 480 entries; AdamW beside it: 6 parameters with 368")


def test_the_originals_rule_of_muon_is_an_option():
    config = SimpleNamespace(name="muon", muon_embeddings=True)
    optimizer = build_optimizer(Model(), config)
    assert [tuple(p.shape) for p in optimizer.param_groups[0]["params"]] == [(13, 12), (20, 12), (12, 20), (13, 12)]


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_is_fused_where_there_is_a_kernel(fused):
    (group, _) = build_optimizer(Model(), OptimizerConfig(fused=fused)).param_groups
    assert bool(group["fused"]) is fused
    assert not build_optimizer(Model().to("meta"), OptimizerConfig(fused=fused)).param_groups[0]["fused"]
