"""What a file may hold, and what is said of one that is wrong."""

import json
import textwrap

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.routing import Layer, OverrideError, Selector, read_overrides, resolve
from megatron_eopt.routing.settings import SETTINGS
from tests.routing.made import KNOWN, having, model

RIGHT = """\
# Matrices of attention learn more slowly.
- select: "*.self_attention.*.weight"
  lr: 1e-3
  betas: &betas [0.9, 0.95]
  optimizer: adam

- select: {name: output_layer.weight, shape: embedding}
  exclude: true
- {select: "re:fc[12]", num_ns_steps: 7, scale_mode: spectral, split: false}
- select: attr:is_qkv
  betas: *betas
"""


def read(folder, text, name="o.yaml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
    return read_overrides(path, KNOWN)


def test_a_file_is_a_list_of_entries(tmp_path):
    entries = read(tmp_path, RIGHT)
    assert [str(entry.selector) for entry in entries] == [
        "*.self_attention.*.weight",
        "output_layer.weight and shape:embedding",
        "re:fc[12]",
        "attr:is_qkv",
    ]
    assert [entry.source for entry in entries] == [f"{tmp_path}/o.yaml:{line}" for line in (2, 7, 9, 10)]
    assert {entry.layer for entry in entries} == {Layer.FILE}
    assert [entry.settings for entry in entries] == [
        {"lr": 0.001, "betas": (0.9, 0.95), "optimizer": "adam"},
        {"exclude": True},
        {"num_ns_steps": 7, "scale_mode": "spectral", "split": "none"},
        {"betas": (0.9, 0.95)},
    ]
    assert resolve(entries, model(), "muon", known=KNOWN)["output_layer.weight"].settings == {"exclude": True}


def test_or_a_mapping_of_selectors_with_merges(tmp_path):
    text = """\
        "shape:matrix": &slow
          lr: 1
          eps: 1E-6
        "*.bias":
          <<: *slow
          lr: .5
        """
    assert [entry.settings for entry in read(tmp_path, text)] == [{"lr": 1.0, "eps": 1e-6}, {"lr": 0.5, "eps": 1e-6}]


def test_json_is_read_with_its_lines_too(tmp_path):
    entries = [
        {"select": "*", "lr": 1e-3, "betas": [0.9, 0.95], "split": True},
        {"select": {"attr": ["is_qkv"]}, "exclude": False},
    ]
    read_entries = read(tmp_path, json.dumps(entries, indent="\t"), "o.json")
    assert [entry.settings for entry in read_entries] == [
        {"lr": 0.001, "betas": (0.9, 0.95), "split": "default"},
        {"exclude": False},
    ]
    assert [entry.source.rsplit(":")[-1] for entry in read_entries] == ["2", "11"]


VALUES = {
    "lr": st.floats(0, 1e3),
    "weight_decay": st.integers(0, 3),
    "betas": st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2).map(list),
    "num_ns_steps": st.integers(1, 9),
    "scale_mode": st.just("spectral"),
    "optimizer": st.just("muon"),
    "split": st.booleans(),
}
FREE = st.dictionaries(st.sampled_from(["lr", "weight_decay", "num_ns_steps", "scale_mode", "split"]), st.none())
DOCUMENTS = st.lists(
    st.builds(
        lambda select, settings: {"select": select} | settings,
        st.sampled_from(["*.weight", "re:^a|b$", "shape: tall"]) | st.just({"name": "*", "shape": ["tall", "expert"]}),
        FREE.filter(bool).flatmap(lambda keys: st.fixed_dictionaries({key: VALUES[key] for key in keys})),
    ),
    min_size=1,
    max_size=4,
)


@given(DOCUMENTS)
def test_json_and_yaml_are_the_same(tmp_path_factory, document):
    folder = tmp_path_factory.mktemp("same")
    texts = {
        "o.json": json.dumps(document),
        "i.json": json.dumps(document, indent=2),
        "o.yaml": json.dumps(document),
        "b.yaml": yaml.safe_dump(document, sort_keys=False),
    }
    entries = [[(entry.selector, entry.settings) for entry in read(folder, text, name)] for name, text in texts.items()]
    assert all(each == entries[0] for each in entries)
    assert [str(Selector.parse(each["select"])) for each in document] == [str(selector) for selector, _ in entries[0]]


def entry(text, selector='"*.weight"'):
    return f"- select: {selector}\n{textwrap.indent(textwrap.dedent(text), '  ')}"


FORMAT = "a list of entries {select: ..., SETTING: ...}, or a mapping of selectors to settings"
KEYS = ", ".join(SETTINGS)
ANOTHER = "or another of the optimizer of the parameter"
WRONG = {
    "misspelt key": (entry("wieght_decay: 0.1"), "2: wieght_decay: unknown setting, did you mean 'weight_decay'?"),
    "upper case": (entry("LR: 0.1"), "2: LR: unknown setting, did you mean 'lr'?"),
    "key like none": (
        entry("zzz: 1"),
        f"2: zzz: unknown setting: expected {KEYS.replace(', exclude', ' or exclude')}, {ANOTHER}",
    ),
    "key that is a number": (
        entry("3: 1"),
        f"2: 3: unknown setting: expected {KEYS.replace(', exclude', ' or exclude')}, {ANOTHER}",
    ),
    "of the optimizer that the entry sets": (
        entry("beta4: 0.5\noptimizer: adaptive_muon"),
        "2: beta4: unknown setting, did you mean 'beta2'?",
    ),
    "of the optimizer that it selects by": (
        "- select: optimizer:spectron\n  mometum: 0.5\n",
        "2: mometum: unknown setting, did you mean 'momentum_beta'?",
    ),
    "of another than the one it selects by": (
        "- select: optimizer:spectron\n  lr: 1\n  momentum: 0.5\n",
        f"3: momentum: spectron has no momentum: it is a setting of {having('momentum')}; did you mean its "
        f"'momentum_beta'?",
    ),
    "of all parameters": (
        "- {select: optimizer:muon, tp_mode: owner}\n",
        "1: tp_mode: muon has one tp_mode for all its parameters, which is set for the run alone",
    ),
    "negative": (entry("lr: 0.1\nweight_decay: -0.1"), "3: weight_decay: expected a number of at least 0, got -0.1"),
    "too large": (entry("momentum: 1.0"), "2: momentum: expected a number in [0, 1), got 1.0"),
    "zero": (entry("eps: 0"), "2: eps: expected a number above 0, got 0"),
    "infinite": (entry("lr: .inf"), "2: lr: expected a number of at least 0, got inf"),
    "no number": (entry("lr: .nan"), "2: lr: expected a number of at least 0, got nan"),
    "fraction": (entry("num_ns_steps: 5.5"), "2: num_ns_steps: expected a whole number in [1, 100], got 5.5"),
    "quoted": (
        entry('lr: "1e-3"'),
        "2: lr: expected a number of at least 0, got the text '1e-3': write it without quotes",
    ),
    "text": (entry("lr: fast"), "2: lr: expected a number of at least 0, got 'fast'"),
    "no value": (entry("lr:"), "2: lr: expected a number of at least 0, got nothing"),
    "true for a number": (entry("lr: true"), "2: lr: expected a number of at least 0, got true"),
    "one beta": (entry("betas: 0.9"), "2: betas: expected two numbers in [0, 1), as [0.9, 0.95], got 0.9"),
    "three betas": (
        entry("betas:\n- 0.9\n- 0.9\n- 0.9"),
        "2: betas: expected two numbers in [0, 1), as [0.9, 0.95], got [0.9, 0.9, 0.9]",
    ),
    "yes": (entry("exclude: yes"), "2: exclude: expected true or false, got 'yes'"),
    "optimizer": (entry("optimizer: moun"), "2: optimizer: unknown optimizer 'moun', did you mean 'muon'?"),
    "coefficients": (
        entry("coefficient_type: quintc"),
        "2: coefficient_type: unknown coefficient type 'quintc', did you mean 'quintic'?",
    ),
    "scale": (
        entry("scale_mode: 0.2"),
        "2: scale_mode: unknown scale mode 0.2: expected spectral, unit_rms_norm or shape_scaling",
    ),
    "split": (entry("split: nnoe"), "2: split: unknown split 'nnoe', did you mean 'none'?"),
    "value and multiplier": (
        entry("lr_mult: 2\nlr: 0.1"),
        "3: lr: cannot stand beside lr_mult: keep one of the two",
    ),
    "decay and multiplier": (
        entry("weight_decay: 0\n\nwd_mult: 1"),
        "4: wd_mult: cannot stand beside weight_decay: keep one of the two",
    ),
    "decay and an end of it": (
        entry("start_wd: 0\nweight_decay: 0"),
        "3: weight_decay: cannot stand beside start_wd: keep one of the two",
    ),
    "excluded with settings": (
        entry("exclude: true\nlr: 0.1\neps: 1e-8"),
        "2: exclude: an excluded parameter has no settings: remove lr and eps",
    ),
    "rates upside down": (entry("lr: 0.1\nmin_lr: 0.2"), "3: min_lr: 0.2 is above lr, which is 0.1"),
    "too few steps": (
        entry("coefficient_type: cubic5\nnum_ns_steps: 4"),
        "3: num_ns_steps: cubic5 is served in exactly 5 Newton-Schulz steps, got 4",
    ),
    "not of this optimizer": (
        entry("optimizer: lion\nmomentum: 0.9"),
        f"3: momentum: lion has no momentum: it is a setting of {having('momentum')}",
    ),
    "twice": (entry("lr: 0.1\neps: 1\nlr: 0.2"), "4: lr: is here a second time, the first is on line 2"),
    "two mistakes": (
        entry("lrr: 0.1\nmomentum: 2\n"),
        "2: lrr: unknown setting, did you mean 'lr'?\no.yaml:3: momentum: expected a number in [0, 1), got 2",
    ),
    "in two entries": (
        '- select: "*"\n  lr: -1\n- 7\n- select: "shape:tal"\n  lr: 1\n',
        "2: lr: expected a number of at least 0, got -1\n"
        "o.yaml:3: expected an entry {select: ..., SETTING: ...}, got 7\n"
        "o.yaml:4: select: unknown shape 'tal', did you mean 'tall'?",
    ),
    "no selector": ("- lr: 1\n", "1: select: is missing, which says for which parameters the entry is"),
    "misspelt selector": (
        "\n- slect: x\n  lr: 1\n",
        "2: select: is missing, which says for which parameters the entry is (it has 'slect')",
    ),
    "no settings": ('- select: "*"\n', f"1: no settings: expected one or more of {KEYS}"),
    "empty selector": (
        "- lr: 1\n  select:\n",
        "2: select: expected a glob, or a mapping of name, regex, attr, shape or optimizer, got nothing",
    ),
    "list of selectors": (
        "- lr: 1\n  select: [a, b]\n",
        "2: select: expected a glob, or a mapping of name, regex, attr, shape or optimizer, got ['a', 'b']",
    ),
    "kind of selector": (
        "- select: {nmae: x}\n  lr: 1\n",
        "1: select: unknown kind of selector 'nmae', did you mean 'name'?",
    ),
    "prefix": ('"atr: x": {lr: 1}\n', "1: select: unknown kind of selector 'atr' in 'atr: x', did you mean 'attr'?"),
    "regex": (
        '"re:[": {lr: 1}\n',
        "1: select: '[' is no regular expression: unterminated character set at position 0",
    ),
    "predicate": (
        "- {select: {predicate: is_it}, lr: 1}\n",
        "1: select: a predicate is a Python function: it cannot be written as text",
    ),
    "asterisk": (
        "- select: *.weight\n",
        "1: this is no YAML: expected alphabetic or numeric character, but found '.': "
        "quote a selector that begins with *, as in '*.weight'",
    ),
    "asterisk and text": (
        "- select: *weight\n",
        "1: this is no YAML: found undefined alias 'weight': quote a selector that begins with *, as in '*.weight'",
    ),
    "bracket": ("- {select: x\n  lr: 1\n", "2: this is no YAML: expected ',' or '}', but got ':'"),
    "tab": (
        "- select: x\n\tlr: 1\n",
        "2: this is no YAML: found character '\\t' that cannot start any token: indent by blanks",
    ),
    "two documents": (
        "- {select: x, lr: 1}\n---\n- {select: x, lr: 1}\n",
        "2: this is no YAML: but found another document",
    ),
    "tag": (
        entry("lr: !!python/object/apply:os.getcwd []"),
        "2: lr: !!python/object/apply:os.getcwd is a tag: write plain values",
    ),
    "own tag": (entry("lr: !fast 3"), "2: lr: !fast is a tag: write plain values"),
    "tag of the whole": ("!x\n- {select: x, lr: 1}\n", "1: !x is a tag: write plain values"),
    "loop": (
        entry("betas: &b [0.9, *b]"),
        "2: with aliases followed, there are more than 65,536 values: use fewer",
    ),
    "loop of merges": (
        "- &e\n  select: x\n  <<: *e\n",
        "3: with aliases followed, there are more than 65,536 values: use fewer",
    ),
    "merge of a number": (entry("<<: 3"), "2: <<: merges mappings only"),
    "key that is a list": ("[a]: {lr: 1}\n", "1: a key is text, not a list or a mapping"),
    "single entry": ('select: "*"\nlr: 1\n', "1: select: a single entry is a list, too: put '- ' before it"),
    "setting as selector": ("lr: 1\n", "1: lr: expected a mapping of settings, got 1"),
    "selector twice": ("a: {lr: 1}\nb: {lr: 1}\na: {lr: 2}\n", "3: a: is here a second time, the first is on line 1"),
    "empty": ("# nothing\n", f"1: expected {FORMAT}, got nothing"),
    "text only": ("muon\n", f"1: expected {FORMAT}, got 'muon'"),
    "empty list": ("[]\n", f"1: there are no entries: expected {FORMAT}"),
    "no UTF-8": (b"- select: x\n  lr: \xff\n", "2: this is no UTF-8 text"),
    "control character": (
        b"- \x01\n",
        "1: this is no YAML: unacceptable character #x0001: special characters are not allowed",
    ),
}
WRONG_JSON = {
    "comma": ('[\n {"select": "*",\n  "lr": 1,}\n]', "3: this is no JSON: "),
    "yaml": ("- select: x\n", "1: this is no JSON: Expecting value, at column 1"),
    "twice": ('[{"select": "*",\n\t"lr": 1,\n\t"lr": 2}]', "3: lr: is here a second time, the first is on line 2"),
    "no number": ('[{"select": "*", "lr": NaN}]', "1: lr: expected a number of at least 0, got 'NaN'"),
    "key": ('[\n{"select": "*", "l_r": 1}]', "2: l_r: unknown setting, did you mean 'lr'?"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_answered_with_line_key_and_suggestion(tmp_path, monkeypatch, text, message):
    assert len(WRONG) > 30
    monkeypatch.chdir(tmp_path)
    (tmp_path / "o.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(OverrideError) as error:
        read_overrides("o.yaml", KNOWN)
    assert str(error.value) == f"o.yaml:{message}"


@pytest.mark.parametrize(("text", "message"), WRONG_JSON.values(), ids=WRONG_JSON)
def test_wrong_json_too(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "o.json").write_text(text)
    with pytest.raises(OverrideError) as error:
        read_overrides("o.json", KNOWN)
    assert str(error.value).startswith(f"o.json:{message}")


def test_every_bad_line_is_reported_at_once(tmp_path, monkeypatch):
    """What is read and what is resolved, in one error: no run for each kind of mistake."""
    lines = {
        "o.yaml:2: lrr: unknown setting, did you mean 'lr'?": entry("lrr: 1", "linear_fc1.weight"),
        "o.yaml:4: optimizer: unknown optimizer 'mun', did you mean 'muon'?": entry("optimizer: mun", "shape:matrix"),
        "o.yaml:5: select: unknown shape 'matrx', did you mean 'matrix'?": entry("lr: 1", "shape:matrx"),
        "o.yaml:7: optimizer: cannot be set for the parameters of an optimizer, by 'optimizer:muon'": entry(
            "optimizer: adam", "optimizer:muon"
        ),
        "o.yaml:9: select: '*.self_atention.*' matches no parameter, did you mean '*.self_attention.*'?": entry(
            "lr: 1", '"*.self_atention.*"'
        ),
        "o.yaml:11: select: 'attr:is_qvk' matches no parameter, did you mean 'is_qkv'?": entry("lr: 1", "attr:is_qvk"),
        "lr: set to 1.0 by o.yaml:13 and 2.0 by o.yaml:15, which are equally specific: remove one, or narrow its "
        "selector, for decoder.layers.0.self_attention.linear_qkv.weight and 1 more": entry(
            "lr: 1", "linear_qkv.weight"
        )
        + "\n"
        + entry("lr: 2", "linear_qkv.weight"),
    }
    # no mistake in a file whose line 4 is right: betas are for an optimizer that is not muon
    follows = entry("betas: [0.9, 0.95]", "linear_fc2.weight")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "o.yaml").write_text("\n".join([*lines.values(), follows]))
    with pytest.raises(OverrideError) as error:
        resolve(read_overrides("o.yaml", KNOWN, keep_mistakes=True), model(), "muon", known=KNOWN)
    assert str(error.value).splitlines() == list(lines)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(OverrideError, match=r"nowhere[.]yaml: cannot be read: No such file or directory"):
        read_overrides(tmp_path / "nowhere.yaml")
