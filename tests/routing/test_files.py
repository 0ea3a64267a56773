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


def test_or_a_mapping_of_selectors_and_json_has_lines_too(tmp_path):
    entries = read(tmp_path, json.dumps({"shape:matrix": {"max_lr": 1}, "*.bias": {"lr": 0.5}}, indent="\t"), "o.json")
    assert [(entry.settings, entry.source.rsplit(":")[-1]) for entry in entries] == [
        ({"lr": 1.0}, "2"),
        ({"lr": 0.5}, "5"),
    ]


SETTINGS = {"weight_decay": st.integers(0, 3), "scale_mode": st.just("spectral"), "split": st.booleans()}
SELECTORS = st.sampled_from(["*.weight", "re:^a|b$", "shape: tall"]) | st.just(
    {"name": "*", "shape": ["tall", "expert"]}
)
DOCUMENTS = st.lists(
    st.fixed_dictionaries({"select": SELECTORS, "lr": st.floats(0, 1e3)}, optional=SETTINGS), min_size=1, max_size=4
)


@given(DOCUMENTS)
def test_json_and_yaml_are_the_same(tmp_path_factory, document):
    folder = tmp_path_factory.mktemp("same")
    texts = {
        "o.json": json.dumps(document),
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
    "negative": (entry("lr: 0.1\nweight_decay: -0.1"), "1: weight_decay: expected a number of at least 0, got -0.1"),
    "no number": (entry("lr: .nan"), "1: lr: expected a number, got nan"),
    "no value": (entry("lr:"), "1: lr: expected a number, got None"),
    "a mapping for a value": (
        entry("betas: {a: 1}"),
        "1: betas: expected a number, a text, true or false, got",
    ),
    "yes": (entry("exclude: yes"), "1: exclude: expected true or false, got 'yes'"),
    "split": (entry("split: nnoe"), "1: split: unknown split 'nnoe', did you mean 'none'?"),
    "two mistakes": (
        entry("lrr: 0.1\nlr: -2\n"),
        "1: lrr: unknown setting, did you mean 'lr'?\no.yaml:1: lr: ",
    ),
    "an entry of another kind": ("- 7\n", "1: select: expected a glob"),
    "no settings": ('- select: "*"\n', "1: expected a mapping of settings, as lr: 1e-3, got {}"),
    "kind of selector": ("- select: {nmae: x}\n  lr: 1\n", "1: select: expected text for one of name, re"),
    "regex": ('"re:[": {lr: 1}\n', "1: select: unterminated character set at position 0"),
    "single entry": ('select: "*"\nlr: 1\n', "1: expected a mapping of settings, as lr: 1e-3, got '*'"),
    "empty": ("# nothing\n", " expected a list of entries {select: ..., SETTING: ...}, or a mapping of selectors"),
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
    "tag": (entry("lr: !!python/object/apply:os.getcwd []"), "could not determine a constructor"),
    "alias": ("- &a {select: x, lr: 1}\n- *a\n", "found an alias"),
    "nested": ("[" * 5000, "recursion"),
    "too long": ("#" * 1_000_001, "more than 1,000,000 bytes"),
    "no UTF-8": (b"- select: x\n  lr: \xff\n", "utf-8"),
}


@pytest.mark.parametrize(("text", "message"), UNREAD.values(), ids=UNREAD)
def test_what_cannot_be_read_names_file_and_line(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OverrideError, match=rf"^o\.yaml: cannot be read: (.|\n)*{message}"):
        read(Path(), text)


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
