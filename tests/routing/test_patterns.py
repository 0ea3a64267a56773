"""Families are rows in short: nothing is lost, also through JSON, and ranks that agree merge in any order."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.routing import ParamPattern, families, from_json, merged, rows, to_json
from megatron_eopt.routing.patterns import MANIFEST_FORMAT, compressed, expanded, join_name, split_name
from tests.routing.manifests import any_rows, changed, model, one_of_each_name, row

INDICES = st.integers(0, 3).flatmap(lambda stars: st.sets(st.tuples(*[st.integers(0, 4)] * stars)))
EXPERT = "decoder.layers.*.mlp.experts.local_experts.*.linear_fc1.weight"


@given(any_rows(), st.randoms())
def test_rows_come_back_from_families_whatever_their_order(found, order):
    short = families(found)
    back = rows(short)
    assert sorted(map(repr, back)) == sorted(map(repr, found))
    order.shuffle(found)
    assert families(found) == short
    assert families(back) == short


def test_rows_that_say_the_same_are_one_family():
    short = families(model(layers=12, experts=3))
    patterns = {family.pattern: family for family in short}
    assert len(patterns) == len(short) == 6
    assert patterns[EXPERT].count == 36
    assert patterns[EXPERT].label == EXPERT.replace("layers.*", "layers.{0-11}").replace("experts.*", "experts.{0-2}")
    names = [each.name for each in rows(short) if "linear_fc2" in each.name]
    assert names == [f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in range(12)]  # 2 before 10


def test_what_is_said_of_one_layer_makes_a_family_of_its_own():
    short = families(changed(model(), "layers.2.mlp.linear_fc2", optimizer="adam"))
    labels = {family.label: family.like.optimizer for family in short if "linear_fc2" in family.label}
    assert labels == {
        "decoder.layers.{0-1,3}.mlp.linear_fc2.weight": "muon",
        "decoder.layers.2.mlp.linear_fc2.weight": "adam",
    }


@pytest.mark.parametrize(
    ("name", "pattern", "numbers"),
    [
        ("decoder.layers.3.mlp.linear_fc1.weight", "decoder.layers.*.mlp.linear_fc1.weight", (3,)),
        ("layers.10.experts.linear_fc2.weight7", "layers.*.experts.linear_fc2.weight*", (10, 7)),
        ("experts.linear_fc2.bias12", "experts.linear_fc2.bias*", (12,)),
        ("blocks.007.weight", "blocks.007.weight", ()),
        ("0.conv2d.1", "*.conv2d.*", (0, 1)),
        ("a.weight01", "a.weight01", ()),
    ],
)
def test_numbers_of_layers_and_experts_are_found_and_no_others(name, pattern, numbers):
    assert split_name(name) == (pattern, numbers)
    assert join_name(pattern, numbers) == name


@given(INDICES)
def test_indices_come_back_from_members(indices):
    members = compressed(indices)
    assert expanded(members) == sorted(indices)
    assert ParamPattern(row("a", ()), members).count == len(indices)


@pytest.mark.parametrize(
    ("pattern", "indices", "label"),
    [
        ("a.*.b", [(3,)], "a.3.b"),
        ("a.*.b", [(0,), (1,), (4,), (7,), (8,)], "a.{0-1,4,7-8}.b"),
        ("*.*", [(n, n) for n in range(5)], "0.0 and 1.1 and 2.2 and 2 more such blocks"),
    ],
)
def test_labels_name_ranges(pattern, indices, label):
    assert ParamPattern(row(pattern, ()), compressed(indices)).label == label


@given(one_of_each_name(), st.lists(st.sets(st.integers(0, 29)), max_size=4), st.randoms())
def test_merging_is_the_union_whatever_the_order_of_ranks(found, ranks, order):
    parts = [families(found[index] for index in own if index < len(found)) for own in ranks]
    union = families(found[index] for index in set().union(*ranks) if index < len(found))
    whole = merged(parts)
    assert whole == union
    order.shuffle(parts)
    assert merged(parts) == whole
    assert merged([merged(parts[:1]), merged(parts[1:])]) == whole


@given(any_rows(), st.randoms())
def test_families_come_back_from_json_and_from_pickle(found, order):
    short = families(found)
    shuffled = list(short)
    order.shuffle(shuffled)
    text = json.dumps(to_json(short))
    back = from_json(json.loads(text))
    assert back == short
    assert repr(back) == repr(short)
    assert json.dumps(to_json(back)) == text
    assert pickle.loads(pickle.dumps(short)) == short


def test_what_is_no_manifest_is_refused():
    newer = to_json(families(model())) | {"format": MANIFEST_FORMAT + 1, "families": "something else"}
    with pytest.raises(
        ValueError, match=f"has format {MANIFEST_FORMAT + 1}, and this release of megatron_eopt reads up to 1"
    ):
        from_json(newer)
    for said in (None, {}, {"format": "1", "families": []}, {"format": 1, "families": [3]}):
        with pytest.raises(ValueError, match="damaged"):
            from_json(said)


@pytest.mark.parametrize(
    ("key", "value"),
    [("members", [[[0, 4]]]), ("members", [[[["0", "4"]]]]), ("matrices", ["q"]), ("settings", []), ("colour", "red")],
)
def test_damage_is_found(key, value):
    said = to_json(families(model()))
    said["families"][0][key] = value
    with pytest.raises(ValueError, match="damaged"):
        from_json(said)
