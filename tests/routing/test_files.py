"""What a file may hold, and what is said of one that is wrong."""

import json
import os
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.routing import OverrideError, read_overrides, resolve
from megatron_eopt.routing.entries import Layer
from megatron_eopt.routing.selectors import Selector
from tests.routing.made import model

RIGHT = """\
# Matrices of attention learn more slowly.
- select: "*.self_attention.*.weight"
  lr: 1e-3
  betas: [0.9, 0.95]
  optimizer: adam

- select: {name: output_layer.weight, shape: embedding}
  exclude: true
- {select: "re:fc[12]", num_ns_steps: 7, scale_mode: spectral, split: false}
- select: attr:is_qkv
  betas: [0.9, 0.95]
"""


def read(folder, text, name="o.yaml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
    return read_overrides(path)


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
    assert resolve(entries, model(), "muon")["output_layer.weight"].settings == {"exclude": True}


def test_or_a_mapping_of_selectors(tmp_path):
    text = """\
        "shape:matrix":
          max_lr: 1
          eps: 1E-6
        "*.bias": {lr: .5}
        """
    assert [entry.settings for entry in read(tmp_path, text)] == [{"lr": 1.0, "eps": 1e-6}, {"lr": 0.5}]


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
        "b.yaml": yaml.safe_dump(json.loads(json.dumps(document)), sort_keys=False),  # without aliases
    }
    entries = [[(entry.selector, entry.settings) for entry in read(folder, text, name)] for name, text in texts.items()]
    assert all(each == entries[0] for each in entries)
    assert [str(Selector.parse(each["select"])) for each in document] == [str(selector) for selector, _ in entries[0]]


def entry(text, selector='"*.weight"'):
    return f"- select: {selector}\n{textwrap.indent(textwrap.dedent(text), '  ')}"


WRONG = {
    "misspelt key": (entry("wieght_decay: 0.1"), "1: wieght_decay: unknown setting, did you mean 'weight_decay'?"),
    "frozen": (entry("frozen: true"), "1: frozen: unknown setting: docs/overrides.md lists them"),
    "upper case": (entry("LR: 0.1"), "1: LR: unknown setting, did you mean 'lr'?"),
    "key like none": (entry("zzz: 1"), "1: zzz: unknown setting: docs"),
    "key that is a number": (entry("3: 1"), "1: 3: unknown setting: docs"),
    "negative": (entry("lr: 0.1\nweight_decay: -0.1"), "1: weight_decay: expected a number of at least 0, got -0.1"),
    "infinite": (entry("lr: .inf"), "1: lr: expected a number, got inf"),
    "no number": (entry("lr: .nan"), "1: lr: expected a number, got nan"),
    "quoted": (entry('lr: "1e-3"'), "1: lr: expected a number, got '1e-3'"),
    "no value": (entry("lr:"), "1: lr: expected a number, got None"),
    "true for a number": (entry("lr: true"), "1: lr: expected a number, got True"),
    "a mapping for a value": (
        entry("betas: {a: 1}"),
        "1: betas: expected a number, a text, true or false, got",
    ),
    "yes": (entry("exclude: yes"), "1: exclude: expected true or false, got 'yes'"),
    "optimizer": (entry("optimizer: moun"), "1: optimizer: unknown optimizer 'moun', did you mean 'muon'?"),
    "split": (entry("split: nnoe"), "1: split: unknown split 'nnoe', did you mean 'none'?"),
    "two mistakes": (
        entry("lrr: 0.1\nlr: -2\n"),
        "1: lrr: unknown setting, did you mean 'lr'?\no.yaml:1: lr: ",
    ),
    "in two entries": (
        '- select: "*"\n  lr: -1\n- select: "shape:tal"\n  lr: 1\n',
        "1: lr: expected a number of at least 0, got -1\no.yaml:3: select: unknown shape 'tal', did you mean 'tall'?",
    ),
    "an entry of another kind": ("- 7\n", "1: select: expected a glob"),
    "no selector": ("- lr: 1\n", "1: select: expected a glob, or a mapping of name"),
    "no settings": ('- select: "*"\n', "1: expected a mapping of settings, as lr: 1e-3, got {}"),
    "empty selector": ("- lr: 1\n  select:\n", "1: select: expected a glob, or a mapping of name"),
    "list of selectors": ("- lr: 1\n  select: [a, b]\n", "1: select: expected a glob, or a mapping of name"),
    "kind of selector": ("- select: {nmae: x}\n  lr: 1\n", "1: select: expected text for one of name, re"),
    "prefix": ('"atr: x": {lr: 1}\n', "1: select: expected text for one of name, re"),
    "regex": ('"re:[": {lr: 1}\n', "1: select: unterminated character set at position 0"),
    "merge": (entry("<<: {lr: 1}"), "1: <<: unknown setting: docs"),
    "single entry": ('select: "*"\nlr: 1\n', "1: expected a mapping of settings, as lr: 1e-3, got '*'"),
    "empty": ("# nothing\n", " expected a list of entries {select: ..., SETTING: ...}, or a mapping of selectors"),
    "text only": ("muon\n", " expected a list of entries {select: ..., SETTING: ...}, or a mapping of selectors"),
    "empty list": ("[]\n", " expected a list of entries {select: ..., SETTING: ...}, or a mapping of selectors"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_answered_with_line_key_and_suggestion(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "o.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(OverrideError) as error:
        read_overrides("o.yaml")
    assert str(error.value).startswith(f"o.yaml:{message}")


UNREAD = {
    "twice": (entry("lr: 0.1\neps: 1\nlr: 0.2"), r'lr is here a second time\s+in "o.yaml", line 4'),
    "asterisk": ("- select: *.weight\n", r'found \'.\'\s+in "o.yaml", line 1'),
    "asterisk and text": ("- select: *weight\n", r"found an alias(.|\n)*line 1(.|\n)*that begins with \* is quoted"),
    "bracket": ("- {select: x\n  lr: 1\n", "line 2"),
    "tab": ("- select: x\n\tlr: 1\n", "line 2"),
    "two documents": ("- {select: x, lr: 1}\n---\n- {select: x, lr: 1}\n", "another document"),
    "tag": (entry("lr: !!python/object/apply:os.getcwd []"), "could not determine a constructor"),
    "alias": ("- &a {select: x, lr: 1}\n- *a\n", "found an alias"),
    "nested": ("[" * 5000, "recursion"),
    "too long": ("#" * 1_000_001, "more than 1,000,000 bytes"),
    "key that is a list": ("[a]: {lr: 1}\n", "found unhashable key"),
    "selector twice": ("a: {lr: 1}\nb: {lr: 1}\na: {lr: 2}\n", r'a is here a second time\s+in "o.yaml", line 3'),
    "no UTF-8": (b"- select: x\n  lr: \xff\n", "utf-8"),
    "control character": (b"- \x01\n", "special characters"),
}


@pytest.mark.parametrize(("text", "message"), UNREAD.values(), ids=UNREAD)
def test_what_cannot_be_read_names_file_and_line(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OverrideError, match=rf"^o\.yaml: cannot be read: (.|\n)*{message}"):
        read(Path(), text)


def test_wrong_json_too(tmp_path):
    text = '[\n{"select": "*",\n\t"lr": 1,\n\t"lr": 2}]'
    with pytest.raises(OverrideError, match=r'lr is here a second time\s+in ".*o\.json", line 4'):
        read(tmp_path, text, "o.json")


def test_a_device_or_a_pipe_is_not_read(tmp_path):
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    for name in ("zero.yaml", "pipe.yaml", "folder.yaml"):
        with pytest.raises(OverrideError, match=f"{name}: cannot be read: it is no regular file"):
            read_overrides(tmp_path / name)


def test_scalars_are_those_of_yaml_1_2(tmp_path):
    (entry,) = read(tmp_path, "- {select: x, num_ns_steps: 010, lr: 1e-3, scale_mode: no}\n")
    assert entry.settings == {"num_ns_steps": 10, "lr": 1e-3, "scale_mode": "no"}
    with pytest.raises(OverrideError, match=r"nowhere[.]yaml: cannot be read: .*No such file or directory"):
        read_overrides(tmp_path / "nowhere.yaml")
