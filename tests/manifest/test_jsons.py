"""A manifest goes through JSON and pickle unharmed, and one that did not is refused."""

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.manifest.families import families
from megatron_eopt.manifest.jsons import FORMAT, from_json, to_json
from tests.manifest.made import any_rows, model


@given(any_rows(), st.randoms())
def test_families_come_back_from_json_and_from_pickle(found, order):
    short = families(found)
    shuffled = list(short)
    order.shuffle(shuffled)
    text = json.dumps(to_json(shuffled))
    back = from_json(json.loads(text))
    assert back == short
    assert repr(back) == repr(short)
    assert json.dumps(to_json(back)) == text
    assert from_json(pickle.loads(pickle.dumps(to_json(short)))) == short
    assert pickle.loads(pickle.dumps(short)) == short


def test_it_is_as_long_as_it_has_families():
    small, large = (to_json(families(model(layers=layers, experts=16))) for layers in (2, 200))
    assert len(json.dumps(large)) < 1.05 * len(json.dumps(small))


def test_a_newer_format_is_refused():
    newer = to_json(families(model())) | {"format": FORMAT + 1, "families": "something else"}
    with pytest.raises(ValueError, match=f"has format {FORMAT + 1}, and this release of megatron_eopt reads up to 1"):
        from_json(newer)


@pytest.mark.parametrize("said", [None, [], {}, {"format": "1", "families": []}, {"format": True, "families": []}])
def test_what_is_no_manifest_is_refused(said):
    with pytest.raises(ValueError, match="no manifest: expected a dict with its format number"):
        from_json(said)


@pytest.mark.parametrize("said", [{"format": 1}, {"format": 0, "families": []}, {"format": 1, "families": {}}])
def test_a_manifest_without_families_is_refused(said):
    with pytest.raises(ValueError, match="damaged: expected format 1 and a list of families"):
        from_json(said)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pattern", "decoder.layers.0.mlp.linear_fc2.weight"),
        ("pattern", None),
        ("members", []),
        ("members", [[[[0, 2], [2, 4]]]]),
        ("members", [[[[4, 0]]]]),
        ("members", [[[0, 4]]]),
        ("members", [[[[0, 4]], [[0, 1]]]]),
        ("members", [[[["0", "4"]]]]),
        ("shape", [64, 2.5]),
        ("owner", 3),
        ("lr", "0.1"),
        ("lr", True),
        ("lr", float("nan")),
        ("matrices", [{"name": "q", "rows": 4, "cols": 4, "scheme": "local"}]),
        ("matrices", [{"name": "q", "rows": 4.5, "cols": 4, "scheme": "local", "scale": 1.0}]),
        ("matrices", ["q"]),
        ("settings", {"a": {"b": 1}}),
        ("settings", []),
        ("sources", {"lr": 3}),
        ("overruled", "a line"),
        ("excluded", 0),
        ("state_bytes", None),
    ],
)
def test_damage_is_found_and_named(key, value):
    said = to_json(families(model()))
    index = next(n for n, each in enumerate(said["families"]) if "linear_fc2" in each["pattern"])
    said["families"][index][key] = value
    named = "'members' cannot be" if key == "pattern" and value else f"'{key}' cannot be"
    with pytest.raises(ValueError, match=rf"damaged: family {index} \(.*\): {named}"):
        from_json(said)


@pytest.mark.parametrize("key", ["pattern", "members", "reason", "matrices", "tied_to"])
def test_missing_and_unknown_keys_are_named(key):
    said = to_json(families(model()))
    missing, unknown = copy.deepcopy(said), copy.deepcopy(said)
    del missing["families"][1][key]
    unknown["families"][1]["colour"] = "red"
    with pytest.raises(ValueError, match=rf"family 1 .*'{key}' is missing; take that of another checkpoint"):
        from_json(missing)
    with pytest.raises(ValueError, match=r"family 1 .*'colour' is unknown"):
        from_json(unknown)


def test_families_that_are_there_twice_or_out_of_order_are_refused():
    said = to_json(families(model()))
    turned = said | {"families": said["families"][::-1]}
    with pytest.raises(ValueError, match="its families are not in order"):
        from_json(turned)
    twice = said | {"families": [*said["families"], said["families"][0]]}
    with pytest.raises(ValueError, match=r"damaged: decoder\.final_layernorm\.weight is listed twice"):
        from_json(twice)
