"""What build_optimizer takes for a config, what it refuses, and which field it says was meant."""

from argparse import Namespace
from collections import UserDict, namedtuple
from dataclasses import dataclass, make_dataclass
from types import SimpleNamespace

import pytest
from megatron.core.optimizer import OptimizerConfig as MegatronsConfig
from torch import nn

import megatron_eopt
from megatron_eopt import Muon, WithAdamW, registry
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.plain import OptimizerConfig, build_optimizer, get_optimizer, register_optimizer
from megatron_eopt.step.adamw import AdamW

FIELDS = {"name": "muon", "lr": 0.5, "muon_adam_lr": 0.25, "weight_decay": 0.125, "muon_ns_steps": 3}


Slotted = make_dataclass("Slotted", [(key, type(value), value) for key, value in FIELDS.items()], slots=True)
OnTheClass = type("OnTheClass", (), FIELDS)


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def built(config):
    """The settings of what a config builds."""
    optimizer = build_optimizer(model(), config)
    matrices, biases = optimizer.param_groups
    assert isinstance(optimizer, Muon)
    return matrices["lr"], biases["lr"], matrices["weight_decay"], matrices["ns_steps"]


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(**FIELDS),
        FIELDS,
        UserDict(FIELDS),
        SimpleNamespace(**FIELDS),
        Namespace(**FIELDS),
        namedtuple("Config", FIELDS)(**FIELDS),
        Slotted(),
        OnTheClass(),
    ],
    ids=lambda config: type(config).__name__,
)
def test_a_config_is_a_mapping_or_an_object_with_our_fields(config):
    assert built(config) == (0.5, 0.25, 0.125, 3)


RATES_OF_CLASSES = {name: row.settings["lr"].default for name, row in OPTIMIZERS.items()}
RATES_OF_CLASSES |= {"adamw": 1e-3, "muon": 0.02}  # of torch's AdamW, and of Muon with AdamW inside
WITHOUT_OPTIONS = [name for name in RATES_OF_CLASSES if name != "spectron"]  # which needs a rank


@pytest.mark.parametrize("name", WITHOUT_OPTIONS)
@pytest.mark.parametrize("of_name", [lambda name: OptimizerConfig(name=name), lambda name: {"name": name}])
def test_without_a_rate_it_is_that_of_the_class(name, of_name):
    optimizer = build_optimizer(model(), of_name(name))
    rate, beside = RATES_OF_CLASSES[name], isinstance(optimizer, WithAdamW)
    of_class = optimizer.matrices if beside else optimizer
    assert {group["lr"] for group in of_class.param_groups} == {rate}
    if beside:
        assert {group["lr"] for group in optimizer.adamw.param_groups} == {3e-4}


def test_a_rate_of_adamw_alone_leaves_the_class_its_own():
    assert built({"name": "muon", "muon_adam_lr": 0.5}) == (0.02, 0.5, 0.1, 5)
    assert built({"name": "muon", "lr": 0.5}) == (0.5, 0.5, 0.1, 5)


def test_a_name_is_one_that_is_registered():
    assert type(build_optimizer(model(), OptimizerConfig())) is AdamW  # the default of its field
    with pytest.raises(ValueError, match=r"unknown optimizer 'moun' \(did you mean 'muon'"):
        build_optimizer(model(), "moun")
    for name in (None, ["muon"], 3):
        with pytest.raises(ValueError, match="unknown optimizer"):
            build_optimizer(model(), {"name": name})


@dataclass
class Nameless:
    lr: float = 0.5


@pytest.mark.parametrize(
    "config",
    [
        *(None, object(), 3, ["muon"], {}, {"lr": 0.5}, Nameless(), OptimizerConfig, OnTheClass),
        *(SimpleNamespace(optimizer="muon"), {"optimizer": "muon", "lr": 0.5}),
        MegatronsConfig(optimizer="muon", lr=0.5),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_names_no_optimizer_is_refused(config):
    what = type(config).__name__
    with pytest.raises(TypeError, match=rf"by its field 'name' what to build, got {what} without it: give Opt"):
        build_optimizer(model(), config)


def test_a_builder_called_by_itself_has_its_name():
    groups = [{"params": [model()[0].weight]}]
    assert get_optimizer("muon")(groups, {"lr": 0.5}).param_groups[0]["lr"] == 0.5
    assert get_optimizer("muon")(groups, Nameless()).param_groups[0]["lr"] == 0.5
    for config in (None, object(), {}, OptimizerConfig, {"learning_rate": 0.5}):
        with pytest.raises(TypeError, match=r"by its field 'name'|unexpected keyword argument 'learning_rate'"):
            get_optimizer("muon")(groups, config)


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_an_unknown_field_is_refused_before_anything_is_marked(kind):
    one = model()
    with pytest.raises(TypeError, match="unexpected keyword argument 'weightdecay'"):
        build_optimizer(one, kind(name="muon", lr=0.5, weightdecay=0.1))
    assert not any(vars(parameter) for parameter in one.parameters())


def test_builders_of_ones_own_get_their_config_as_it_is(monkeypatch):
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))
    seen = []

    @register_optimizer("mine")
    def build(groups, config):
        seen.append((config, [group["weight_decay"] for group in groups]))
        return get_optimizer("muon")(groups, config)  # which may have fields of mine

    config = SimpleNamespace(**{**FIELDS, "name": "mine"}, clip=1.0)
    mapping = {**vars(config)}
    assert built(config) == built(mapping) == (0.5, 0.25, 0.125, 3)
    assert built("mine") == (0.02, 3e-4, 0.1, 5)
    assert [found for found, _ in seen] == [config, mapping, OptimizerConfig(name="mine")]
    assert [decays for _, decays in seen] == [[0.125, 0.0], [0.125, 0.0], [0.1, 0.0]]


def test_our_config_is_none_for_megatron():
    message = r"Megatron-Core's OptimizerConfig, which has a field optimizer, got megatron_eopt\.plain\.options\.Optim"
    with pytest.raises(TypeError, match=message):
        megatron_eopt.get_megatron_optimizer(OptimizerConfig(name="muon"), [model()])
