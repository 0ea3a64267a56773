"""Entries from dicts."""

import pickle

import pytest

from megatron_eopt.overrides import Layer, OverrideError, Predicate, entries_from_dict, resolve
from tests.overrides.made import KNOWN, model
from tests.overrides.test_selectors import FromMegatron, ParamKey

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def is_short(info):
    return info.shape[0] < 70


def test_selectors_are_keys():
    entries = entries_from_dict(
        {
            "linear_qkv.weight": {"lr": 1, "betas": [0.5, 0.5]},
            ParamKey(attr="is_qkv", name="*.bias"): {"max_lr": 2, "min_lr": 1, "wd_mult": 0.0},
            is_short: {"eps": 1},
            Predicate("all of them", bool): {"weight_decay": 0},
        },
        known=KNOWN,
    )
    assert [entry.source for entry in entries] == [
        "overrides['linear_qkv.weight']",
        "overrides['*.bias or attr:is_qkv']",
        "overrides['predicate is_short']",
        "overrides['predicate all of them']",
    ]
    assert {entry.layer for entry in entries} == {Layer.PYTHON}
    found = resolve(entries, model(), known=KNOWN)
    assert found[QKV].settings == {"betas": (0.5, 0.5), "lr": 1.0, "min_lr": 1.0, "weight_decay": 0.0}
    assert found[QKV].sources["min_lr"] == "overrides['*.bias or attr:is_qkv']"
    assert pickle.loads(pickle.dumps(entries)) == entries
    assert pickle.loads(pickle.dumps(found)) == found


def test_megatrons_dicts():
    no_decay = FromMegatron("short", lambda parameter, name: "bias" in name)
    overrides = {
        ParamKey(with_name_predicate=no_decay): {"wd_mult": 0.0},
        ParamKey(attr=("is_embedding_or_output_parameter",)): {"max_lr": 0.5, "min_lr": 0.25, "optimizer": "adam"},
        ParamKey(name="module.module.decoder*"): {"start_wd": 0.5, "end_wd": 0.5},
        ParamKey(name="*.bias"): {"start_wd": 0.5, "end_wd": 1},
    }
    entries = entries_from_dict(overrides, known=KNOWN)
    assert [entry.settings for entry in entries] == [
        {"wd_mult": 0.0},
        {"lr": 0.5, "min_lr": 0.25, "optimizer": "adam"},
        {"weight_decay": 0.5},
        {"start_wd": 0.5, "end_wd": 1.0},
    ]
    assert str(entries[2].selector) == "module.module.decoder*"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"x": {"lrr": 1}}, "overrides['x']: lrr: unknown setting, did you mean 'lr'?"),
        (
            {"x": {"lr": -1, "eps": 0}},
            "overrides['x']: lr: expected a number of at least 0, got -1\n"
            "overrides['x']: eps: expected a number above 0, got 0",
        ),
        ({"x": {"lr": 1, "max_lr": 1}}, "overrides['x']: lr: max_lr is the same: keep one of the two"),
        (
            {"x": {"start_wd": 0.1, "end_wd": -0.2}},
            "overrides['x']: end_wd: expected a number of at least 0, got -0.2",
        ),
        ({"x": 3}, "overrides['x']: expected a mapping of settings, got 3"),
        (
            {3: {}},
            "overrides[3]: select: expected a glob, or a mapping of name, regex, attr, shape or optimizer, got 3",
        ),
        (
            {"shape:x": {"lr": 1}, "y": {}},
            "overrides['shape:x']: select: unknown shape 'x': expected vector, matrix, tall, wide, square, stack, "
            "embedding or expert\n"
            "overrides['y']: no settings: expected one or more of optimizer, lr, min_lr, lr_mult, weight_decay, "
            "start_wd, end_wd, wd_mult, betas, eps, momentum, num_ns_steps, coefficient_type, scale_mode, "
            "extra_scale_factor, rank, split, exclude",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_selector(overrides, message):
    with pytest.raises(OverrideError) as error:
        entries_from_dict(overrides, known=KNOWN)
    assert str(error.value) == message
