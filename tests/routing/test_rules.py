"""Which of several entries wins for a parameter, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.routing import OverrideError, ParameterInfo, resolve
from megatron_eopt.routing.entries import Layer, make_entries
from megatron_eopt.routing.precedence import Overruled, match_counts
from tests.routing.made import model

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
BIAS = "decoder.layers.0.self_attention.linear_qkv.bias"


def entry(selector, source, layer=Layer.FILE, **settings):
    (made,) = make_entries([(selector, settings, source)], layer)
    return made


def resolved(*entries, name=QKV, optimizer="muon"):
    return resolve(entries, model(), optimizer)[name]


def refused(*entries, optimizer="muon", parameters=None):
    with pytest.raises(OverrideError) as error:
        resolve(entries, parameters or model(), optimizer)
    return str(error.value).splitlines()


def test_the_more_specific_entry_wins_key_by_key():
    found = resolved(
        entry("*", "a", lr=1.0, weight_decay=0.1),
        entry("linear_qkv.*", "b", lr=2.0),
        entry(QKV, "c", momentum=0.5),
    )
    assert found.settings == {"lr": 2.0, "momentum": 0.5, "weight_decay": 0.1}
    assert found.sources == {"lr": "b", "momentum": "c", "weight_decay": "a"}
    assert found.overruled == (Overruled("lr", 1.0, "a"),)


def test_the_later_layer_wins_between_equally_specific_entries():
    flags = entry("shape:matrix", "--muon-lr", Layer.FLAGS, lr=1.0)
    assert resolved(flags, entry("shape:tall", "f:1", lr=2.0)).sources == {"lr": "--muon-lr"}
    assert resolved(flags, entry("linear_qkv.weight", "f:1", lr=2.0)).sources == {"lr": "f:1"}
    layers = [entry("*", layer.name, layer, lr=float(layer)) for layer in Layer]
    for highest in Layer:
        assert resolved(*reversed(layers[: highest + 1])).sources == {"lr": highest.name}


def test_defaults_are_no_more_specific_than_a_shape():
    defaults = entry(BIAS, "defaults", Layer.DEFAULTS, optimizer="adam")
    for selector, optimizer in (("*", "adam"), ("shape:vector", "lion"), (BIAS, "lion")):
        found = resolved(defaults, entry(selector, "f:1", optimizer="lion"), name=BIAS)
        assert found.settings == {"optimizer": optimizer}


def test_the_last_of_equally_specific_entries_of_a_layer_wins():
    first, second = entry("*qkv*", "f:1", lr=1.0), entry("*lin*", "f:9", lr=2.0)
    assert resolved(first, second).sources == {"lr": "f:9"}
    found = resolved(second, first)
    assert found.sources == {"lr": "f:1"}
    assert found.overruled == (Overruled("lr", 2.0, "f:9"),)


def test_a_value_and_its_multiplier_in_one_entry_are_refused():
    (line,) = refused(entry("attr:is_qkv", "a", weight_decay=1.0, wd_mult=0.0))
    assert line.startswith("a: weight_decay replaces wd_mult: keep one of the two")


@pytest.mark.parametrize(
    ("wide", "narrow", "settings", "of_run", "rates"),
    [
        ({"lr": 0.5, "min_lr": 0.1}, {"lr_mult": 2.0}, {"lr": 0.5, "lr_mult": 2.0, "min_lr": 0.1}, (9, 0.9), (1, 0.1)),
        ({"lr_mult": 2.0, "wd_mult": 0.0}, {"lr": 0.5}, {"lr": 0.5, "wd_mult": 0.0}, (9.0, 0.25), (0.5, 0.25)),
        ({}, {"lr_mult": 0.5}, {"lr_mult": 0.5}, (1.0, None), (0.5, None)),
        ({"weight_decay": 0.5}, {"wd_mult": 0.5}, {"wd_mult": 0.5, "weight_decay": 0.5}, (1.0, 0.0), (1.0, 0.0)),
    ],
)
def test_multipliers_multiply_and_values_replace_what_is_below(wide, narrow, settings, of_run, rates):
    found = resolved(*([entry("*", "a", **wide)] if wide else []), entry(QKV, "b", **narrow))
    assert found.settings == settings
    assert found.learning_rates(*of_run) == rates


def test_a_smallest_rate_above_the_largest_is_refused():
    with pytest.raises(OverrideError, match=r"min_lr 0.9 is above lr 0.5 \(lr by b\): set both"):
        resolved(entry(QKV, "b", lr=0.5)).learning_rates(9.0, 0.9)


@pytest.mark.parametrize(
    ("wide", "narrow", "settings"),
    [
        ({"weight_decay": 0.5}, {"start_wd": 0.1}, {"start_wd": 0.1, "weight_decay": 0.5}),
        ({"weight_decay": 0.5}, {"start_wd": 0.1, "end_wd": 0.2}, {"end_wd": 0.2, "start_wd": 0.1}),
        ({"start_wd": 0.0, "end_wd": 0.1}, {"weight_decay": 0.5}, {"weight_decay": 0.5}),
        ({"start_wd": 0.0, "end_wd": 0.1}, {"wd_mult": 2.0}, {"end_wd": 0.1, "start_wd": 0.0, "wd_mult": 2.0}),
    ],
)
def test_a_weight_decay_is_both_ends_of_its_schedule(wide, narrow, settings):
    assert resolved(entry("*", "a", **wide), entry(QKV, "b", **narrow)).settings == settings


def test_an_exclusion_drops_what_is_below_it():
    wide, out = entry("*", "a", lr=1.0), entry("linear_qkv.weight", "b", exclude=True)
    assert resolved(wide, out).settings == {"exclude": True}
    assert resolved(wide, out, entry(QKV, "c", exclude=False)).settings == {"exclude": False, "lr": 1.0}
    first, second = refused(wide, out, entry(QKV, "c", eps=1e-8, optimizer="adam"))
    assert first.startswith(f"c: eps: b excludes the parameter, for {QKV}")
    assert second.startswith(f"c: optimizer: b excludes the parameter, for {QKV}")


def test_an_optimizer_drops_what_it_has_not_and_is_below_it():
    steps = entry("shape:matrix", "a", num_ns_steps=5, weight_decay=0.5)
    assert resolved(steps).settings == {"num_ns_steps": 5, "weight_decay": 0.5}
    found = resolved(steps, entry(QKV, "b", optimizer="adam"))
    assert found.settings == {"optimizer": "adam", "weight_decay": 0.5}
    assert found.overruled == (Overruled("num_ns_steps", 5, "a"),)
    (line,) = refused(entry("attr:is_qkv", "b", optimizer="adam"), entry("*qkv.weight", "a", num_ns_steps=5))
    assert line.startswith("a: num_ns_steps: adam has no such setting of a parameter")
    assert line.endswith(f"for {QKV} and 1 more")
    assert refused(entry(BIAS, "a", betas=[0.9, 0.95])) == [
        f"a: betas: muon has no such setting of a parameter, did you mean 'momentum'? betas are AdamW's, for {BIAS}"
    ]


def test_settings_by_optimizer_follow_the_optimizer():
    entries = [
        entry("shape:vector", "defaults", Layer.DEFAULTS, optimizer="adam"),
        entry("shape:embedding", "defaults", Layer.DEFAULTS, optimizer="adam"),
        entry("optimizer:muon", "--muon-lr", Layer.FLAGS, lr=0.5),
        entry("optimizer:adam", "f:1", eps=1e-6),
        entry("linear_proj.weight", "f:2", optimizer="adam"),
    ]
    found = resolve(entries, model(1), "muon")
    assert found[QKV].settings == {"lr": 0.5}
    assert found[BIAS].settings == {"eps": 1e-6, "optimizer": "adam"}
    assert found[QKV.replace("qkv", "proj")].settings == {"eps": 1e-6, "optimizer": "adam"}
    with pytest.raises(OverrideError, match="f:1: optimizer: cannot be set for the parameters of an optimizer, by"):
        entry("optimizer:muon", "f:1", optimizer="adam")
    assert refused(entry("optimizer:lion", "f:1", lr=1.0)) == ["f:1: select: 'optimizer:lion' matches no parameter"]


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        ("*.linear_qvk.weight", "'*.linear_qvk.weight' matches no parameter, did you mean 'linear_qkv.weight'?"),
        ("decoder.layers.7.mlp.linear_fc2.weight", ", did you mean 'decoder.layers.*.mlp.linear_fc2.weight'?"),
        ("attr:is_qvk", ", did you mean 'is_qkv'?"),
        ("nothing.like.it", "'nothing.like.it' matches no parameter"),
        ({"name": "output*", "shape": "matrix"}, "no parameter is matched by all of 'output* and shape:matrix'"),
    ],
)
def test_a_selector_that_matches_nothing_names_what_is_near(selector, said):
    (line,) = refused(entry(selector, "f:1", lr=1.0))
    assert line.startswith("f:1: select: ")
    assert said in line


def test_defaults_of_an_excluded_parameter_are_no_mistake():
    defaults = entry(f"*{BIAS}", "default of Megatron", Layer.DEFAULTS, wd_mult=0.0)
    assert resolved(defaults, entry("*", "f:1", exclude=True), name=BIAS).settings == {"exclude": True}


def test_what_may_match_nothing():
    assert resolve([entry("x", "d", Layer.DEFAULTS, lr=1.0)], model())[QKV].settings == {}
    elsewhere = [entry("x", "f:1", lr=1.0), entry("output_layer.weight", "f:2", lr=1.0)]
    assert match_counts(elsewhere, model(), None) == [0, 1]
    assert resolve(elsewhere, model(), matches=[4, 1])[QKV].settings == {}


def test_names_have_to_differ():
    assert refused(parameters=[ParameterInfo("x", (1,))] * 2) == [
        "two parameters are named 'x': settings are by name, so names must differ"
    ]


SELECTORS = st.sampled_from(["*", "shape:tall", "attr:is_qkv", "re:qkv", "*.weight", "*qkv*", QKV, "optimizer:muon"])
SETTINGS = st.fixed_dictionaries(
    {}, optional={"lr": st.sampled_from([0.1, 0.2]), "wd_mult": st.just(0.0), "extra_scale_factor": st.just(0.2)}
).filter(bool)
ENTRIES = st.lists(st.tuples(SELECTORS, SETTINGS, st.sampled_from(list(Layer))), max_size=6)


@given(ENTRIES)
def test_each_setting_is_that_of_an_entry_that_nothing_outranks(written):
    entries = [entry(s, f"f:{i}", layer, **settings) for i, (s, settings, layer) in enumerate(written)]
    try:
        found = resolve(entries, model(1), "muon")
    except OverrideError:
        return
    for info in model(1):
        info = ParameterInfo(info.name, info.shape, info.attributes, "muon")
        here = [each for each in entries if each.selector.matches(info)]
        assert set(found[info.name].settings) == {key for each in here for key in each.settings}
        for key, value in found[info.name].settings.items():
            claims = [each for each in here if key in each.settings]
            best = sorted(claims, key=lambda each: each.order(info))[-1]
            assert (best.settings[key], best.source) == (value, found[info.name].sources[key])
