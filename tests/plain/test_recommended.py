"""A call by name builds what is recommended, and a config without a preset says how large its updates are."""

import logging

import pytest
import torch
from torch import nn

from megatron_eopt.family import LIKE_MUON, OPTIMIZERS
from megatron_eopt.plain import OptimizerConfig, build_optimizer
from megatron_eopt.settings.presets import PRESETS, RECOMMENDED, TO_BEGIN_WITH
from tests.optimizers.family import options
from tests.plain.test_build import Model

NAMES = ["adamw", *OPTIMIZERS]


def by_name(name, **fields):
    return build_optimizer(Model(), name, options=options(name), **fields)


def settings(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def rates(optimizer):
    return sorted({group["lr"] for group in optimizer.param_groups})


def test_every_optimizer_has_settings_to_begin_with():
    assert list(TO_BEGIN_WITH) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_config_with_the_recommended_preset(name):
    config = OptimizerConfig(name=name, preset=RECOMMENDED, lr=1e-3, options=options(name))
    assert settings(by_name(name, lr=1e-3)) == settings(build_optimizer(Model(), config))


@pytest.mark.parametrize("name", NAMES)
def test_rates_are_those_beside_adamws(name):
    ratio = TO_BEGIN_WITH[name].rate
    beside = name in OPTIMIZERS and OPTIMIZERS[name].owns == "matrices"
    for fields, rate in (({}, 3e-4 * ratio), ({"lr": 0.03}, 0.03)):
        of_adamw = [rate / ratio] if beside else []
        assert rates(by_name(name, **fields)) == pytest.approx(sorted({rate, *of_adamw}))
    if beside:
        assert rates(by_name(name, muon_adam_lr=0.01)) == pytest.approx(sorted({0.01 * ratio, 0.01}))
        assert rates(by_name(name, lr=0.5, muon_adam_lr=0.01)) == [0.01, 0.5]


@pytest.mark.parametrize("name", LIKE_MUON)
def test_updates_of_muon_by_name_have_the_size_of_adamws(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
    optimizer = build_optimizer(model, name, lr=1.0, weight_decay=0.0)
    before = model[0].weight.detach().clone()
    model(torch.randn(256, 64)).square().mean().backward()
    optimizer.step()
    update = model[0].weight.detach() - before
    assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("name", LIKE_MUON)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_published_preset_is_taken_by_its_name(name, preset):
    optimizer = by_name(name, lr=1e-3, preset=preset)
    group = optimizer.param_groups[0]
    for key, value in PRESETS[preset].settings.items():
        assert group["ns_steps" if key == "num_ns_steps" and name == "muon" else key] == value


def test_soap_has_the_preset_of_megatron():
    assert by_name("soap", preset="megatron").param_groups[0]["use_kl_shampoo"]
    assert not by_name("soap").param_groups[0]["use_kl_shampoo"]


@pytest.mark.parametrize(("name", "known"), [("muon", "kimi-k2"), ("soap", "match_adamw, megatron"), ("lion", "match")])
def test_an_unknown_preset_is_refused_with_those_there_are(name, known):
    with pytest.raises(ValueError, match=f"unknown preset of {name} 'kimi-k3': expected one of .*{known}"):
        by_name(name, preset="kimi-k3")


def test_fields_and_options_come_before_a_preset():
    group = by_name("muon", muon_momentum=0.8, muon_ns_steps=3).param_groups[0]
    assert (group["momentum"], group["ns_steps"], group["nesterov"]) == (0.8, 3, True)
    optimizer = build_optimizer(Model(), "muon", preset="kimi-k2", options={"extra_scale_factor": 0.5})
    assert optimizer.param_groups[0]["extra_scale_factor"] == 0.5
    assert by_name("soap", betas=(0.8, 0.9)).param_groups[0]["betas"] == (0.8, 0.9)


def test_a_name_without_a_preset_has_the_sizes_of_the_class():
    assert settings(by_name("muon", preset=None, lr=0.02)) == settings(
        build_optimizer(Model(), OptimizerConfig(name="muon", lr=0.02))
    )


def test_fields_beside_a_config_are_refused():
    with pytest.raises(TypeError, match="lr go into the config"):
        build_optimizer(Model(), OptimizerConfig(name="muon"), lr=1e-3)


@pytest.mark.parametrize(
    ("fields", "level", "said"),
    [
        ({"name": "muon", "lr": 3e-4}, logging.WARNING, "updates of RMS 0.031, 0.16 times AdamW's 0.2: keep"),
        ({"name": "muon"}, logging.INFO, "updates of RMS 0.031, 0.16 times AdamW's 0.2"),
        ({"name": "lion", "lr": 3e-4}, logging.INFO, "updates of RMS 1, 5 times AdamW's 0.2"),
        ({"name": "muon", "lr": 3e-4, "preset": RECOMMENDED}, None, ""),
        ({"name": "soap", "lr": 3e-4}, None, ""),
    ],
)
def test_a_config_without_a_preset_says_its_size(fields, level, said, caplog):
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
    with caplog.at_level(logging.INFO):
        build_optimizer(model, OptimizerConfig(**fields))
    found = [
        (record.levelno, record.getMessage()) for record in caplog.records if "times AdamW's" in record.getMessage()
    ]
    assert [each for each, _ in found] == ([] if level is None else [level])
    assert all(said in message for _, message in found)
