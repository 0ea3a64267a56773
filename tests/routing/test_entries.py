"""What each selector takes, which of two is more specific, and entries from dicts."""

import itertools
import pickle

import pytest

from megatron_eopt.routing import OverrideError, ParameterInfo, Predicate, entries_from_dict, resolve
from megatron_eopt.routing.entries import Layer
from megatron_eopt.routing.selectors import Selector
from tests.routing.made import FromMegatron, ParamKey, model, named

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def taken(written, parameters=None):
    selector = Selector.parse(written)
    return [info.name for info in parameters or model(1) if selector.matches(info)]


@pytest.mark.parametrize(
    ("written", "ends"),
    [
        (QKV, ["linear_qkv.weight"]),
        (f"module.module.{QKV}", ["linear_qkv.weight"]),
        ("linear_qkv.weight", ["linear_qkv.weight"]),
        ("qkv.weight", []),  # not after a dot
        ("*qkv.weight", ["linear_qkv.weight"]),
        ("layers.0.mlp.linear_fc?.weight", ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]),
        ("mlp.*_fc[2-9].weight", ["mlp.linear_fc2.weight"]),
        ("re:linear_(qkv|proj)", ["linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight"]),
        ("attr: is_qkv", ["linear_qkv.weight"]),
        ("shape: stack", ["experts.stacked"]),
        ("shape: embedding", ["word_embeddings.weight", "output_layer.weight"]),
        ("shape: wide", ["mlp.linear_fc2.weight"]),
        ("shape: square", ["linear_proj.weight"]),
        ("shape: tall", ["linear_qkv.weight", "mlp.linear_fc1.weight", "experts.0.linear_fc1.weight"]),
        ("shape: expert", ["experts.0.linear_fc1.weight", "experts.stacked"]),
        ({"name": "*fc1*", "shape": "expert"}, ["experts.0.linear_fc1.weight"]),
        ({"regex": "fc", "name": "*.mlp.linear*", "shape": "wide"}, ["mlp.linear_fc2.weight"]),
    ],
)
def test_a_selector_takes(written, ends):
    names = taken(written)
    assert len(names) == len(ends)
    assert all(name.endswith(end) for name, end in zip(names, ends, strict=True))


def many_rows(info):
    return info.shape[0] > 500


# From the least specific up, each for the parameter QKV; those of one line are equal.
ORDER = [
    ["*", {"name": ["*", "*"]}],
    ["optimizer:muon", {"optimizer": "muon", "name": "*"}],
    ["shape:matrix", "shape:tall"],
    [{"shape": "tall", "optimizer": "muon"}],
    [{"shape": ["matrix", "tall"]}],
    ["attr:is_qkv", "attr:other"],
    [{"attr": "is_qkv", "shape": "matrix"}],
    [{"attr": ["is_qkv", "other"]}],
    [many_rows],
    ["re:qkv", "re:^decoder.*linear_qkv.weight$"],
    [{"regex": "qkv", "attr": "is_qkv"}],
    ["*weight", "weight", "*.weight"],
    ["*qkv.weight"],
    ["linear_qkv.weight", "*.linear_qkv.weight", "*linear_qkv.weight"],
    [{"name": "linear_qkv.weight", "shape": "matrix"}],
    [{"name": "linear_qkv.weight", "regex": "qkv"}],
    ["layers.?.self_attention.linear_qkv.weight", "layers.[0-3].self_attention.linear_qkv.weight"],
    [QKV, f"module.{QKV}"],
    [{"name": QKV, "shape": "matrix"}],
]


def test_specificity_has_one_order():
    info = ParameterInfo(QKV, (600, 64), {"is_qkv": True, "other": True}, "muon")
    lines = [[Selector.parse(written) for written in line] for line in ORDER]
    assert all(selector.matches(info) for line in lines for selector in line)
    ranks = [{selector.specificity(info) for selector in line} for line in lines]
    assert all(len(rank) == 1 for rank in ranks)
    assert all(min(lower) < min(higher) for lower, higher in itertools.pairwise(ranks))


def test_a_param_key_takes_what_any_field_does():
    key = ParamKey(name=("*.bias", "output*"), attr="is_qkv")
    assert taken(key) == [QKV, QKV.replace("weight", "bias"), "output_layer.weight"]
    selector = Selector.parse(key)
    assert selector.specificity(named(QKV)) == Selector.parse("attr:is_qkv").specificity(named(QKV))


def test_predicates_of_a_param_key_get_the_parameter():
    key = ParamKey(
        predicate=FromMegatron("short", lambda parameter: parameter == "short"),
        with_name_predicate=FromMegatron("named", lambda parameter, name: name == "b"),
    )
    infos = [ParameterInfo(name, (1,), parameter=what) for name, what in [("a", "short"), ("b", "x"), ("c", "x")]]
    assert taken(key, infos) == ["a", "b"]
    with pytest.raises(OverrideError, match="expected a glob"):
        Selector.parse(ParamKey())


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("", "an empty text selects nothing"),
        ("atr:is_qkv", "expected text for one of name, re, regex, attr, shape, optimizer, got 'is_qkv' for atr"),
        ({"nmae": "x"}, "got 'x' for nmae"),
        ({}, "got {}"),
    ],
)
def test_what_cannot_be_a_selector(written, message):
    with pytest.raises(OverrideError) as error:
        Selector.parse(written)
    assert message in str(error.value)


def is_short(info):
    return info.shape[0] < 70


def test_selectors_are_keys():
    """Megatron's ``ParamKey`` among them, whose ``max_lr`` is ``lr``."""
    short = FromMegatron("short", lambda parameter, name: "bias" in name)
    entries = entries_from_dict(
        {
            "linear_qkv.weight": {"lr": 1, "betas": [0.5, 0.5]},
            ParamKey(attr="is_qkv", name="*.bias"): {"max_lr": 2, "min_lr": 1, "wd_mult": 0.0},
            ParamKey(with_name_predicate=short): {"start_wd": 0.5, "end_wd": 1},
            is_short: {"eps": 1},
            Predicate("all of them", bool): {"exclude": False},
        },
    )
    assert [(entry.layer, entry.source) for entry in entries] == [
        (Layer.PYTHON, "overrides['linear_qkv.weight']"),
        (Layer.PYTHON, "overrides['*.bias or attr:is_qkv']"),
        (Layer.PYTHON, "overrides['predicate short']"),
        (Layer.PYTHON, "overrides['predicate is_short']"),
        (Layer.PYTHON, "overrides['predicate all of them']"),
    ]
    assert [entry.settings for entry in entries[1:3]] == [
        {"lr": 2.0, "min_lr": 1.0, "wd_mult": 0.0},
        {"start_wd": 0.5, "end_wd": 1.0},
    ]
    found = resolve(entries, model())
    assert found[QKV].settings == {"betas": (0.5, 0.5), "exclude": False, "lr": 1.0, "min_lr": 1.0, "wd_mult": 0.0}
    assert found[QKV].sources["min_lr"] == "overrides['*.bias or attr:is_qkv']"
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ({"x": {"lrr": 1}}, ["overrides['x']: lrr: unknown setting, did you mean 'lr'?"]),
        (
            {"x": {"lr": -1, "optimizer": "mun"}},
            ["overrides['x']: lr: expected a number of at least 0, got -1", "overrides['x']: optimizer: unknown optim"],
        ),
        ({"x": {"lr": 1, "max_lr": 1}}, ["overrides['x']: max_lr is lr: keep one of the two"]),
        ({"x": 3}, ["overrides['x']: expected a mapping of settings, as lr: 1e-3, got 3"]),
        (
            {"shape:x": {"lr": 1}, "y": {}},
            ["overrides['shape:x']: select: unknown shape 'x'", "overrides['y']: expected a mapping of settings"],
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_selector(overrides, lines):
    with pytest.raises(OverrideError) as error:
        entries_from_dict(overrides)
    for line, beginning in zip(str(error.value).splitlines(), lines, strict=True):
        assert line.startswith(beginning)
