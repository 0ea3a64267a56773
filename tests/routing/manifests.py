"""The manifest of a small GPT with experts, made by hand, and hypothesis' strategies for any."""

from dataclasses import replace

from hypothesis import strategies as st

from megatron_eopt.routing.patterns import LogicalMatrix, ManifestRow

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
BIAS = "decoder.layers.0.self_attention.linear_qkv.bias"
EMBEDDING = "embedding.word_embeddings.weight"


def row(name, shape, **said):
    """A row of Adam's."""
    defaults = {
        "dtype": "bfloat16",
        "optimizer": "adam",
        "reason": "default of muon",
        "layout": "whole",
        "matrices": (),
        "update_rms": None,
        "lr": 1e-3,
        "min_lr": 1e-5,
        "weight_decay": 0.0,
        "settings": {},
        "sources": {},
        "overruled": (),
        "state_bytes": 8,
        "tied_to": None,
        "excluded": False,
    }
    return ManifestRow(name=name, shape=shape, **(defaults | said))


def muons(name, shape, *matrices, scheme="duplicated", rms=0.2, **said):
    """A row of Muon's; matrices by name, rows and columns, or one that is all of the parameter."""
    listed = [LogicalMatrix(*each, scheme, 1.0) for each in matrices or [("", *shape)]]
    said = {"optimizer": "muon", "weight_decay": 0.1, "layout": "rows over tp 2", "state_bytes": 4} | said
    return row(name, shape, matrices=listed, update_rms=rms, **said)


def model(layers=4, experts=3):
    """All rows."""
    found = [row(EMBEDDING, (512, 64), weight_decay=0.1, reason="an embedding: default of muon")]
    for layer in range(layers):
        at = f"decoder.layers.{layer}"
        found += [
            muons(f"{at}.self_attention.linear_qkv.weight", (128, 64), ("q", 64, 64), ("k", 32, 64), ("v", 32, 64)),
            row(f"{at}.self_attention.linear_qkv.bias", (128,), layout="rows over tp 2"),
            muons(f"{at}.mlp.linear_fc2.weight", (64, 256), layout="columns over tp 2"),
        ]
        found += [
            muons(f"{at}.mlp.experts.local_experts.{expert}.linear_fc1.weight", (256, 64)) for expert in range(experts)
        ]
    return [*found, row("decoder.final_layernorm.weight", (64,))]


def changed(rows, change, **said):
    """The rows, with other things said of those whose names a text is in."""
    return [replace(each, **said) if change in each.name else each for each in rows]


_NUMBERS = st.integers(0, 4)
_NAMES = st.one_of(
    st.builds("layers.{}.experts.{}.linear_fc1.weight{}".format, _NUMBERS, _NUMBERS, _NUMBERS),
    st.builds("{}.7up.{}".format, _NUMBERS, st.sampled_from(["x", "007", "x_1", "bias12"])),
    st.sampled_from(["embedding.weight", "weight", "weight3", "3"]),
)
_NUMBER = st.floats(allow_nan=False)
_SIMPLE = st.none() | st.booleans() | st.integers() | _NUMBER | st.text() | st.lists(_NUMBER, max_size=3)
_NAMED = st.sampled_from(["", "q", "expert 0 gate"])
_MATRICES = st.builds(LogicalMatrix, _NAMED, _NUMBERS, _NUMBERS, st.sampled_from(["local", "blockwise"]), _NUMBER)
_SAID = st.fixed_dictionaries(
    {"optimizer": st.sampled_from(["muon", "adam", None]), "lr": st.sampled_from([1.0, 0.5])},
    optional={
        "matrices": st.lists(_MATRICES, max_size=2),
        "update_rms": _NUMBER,
        "settings": st.dictionaries(st.text(), _SIMPLE, max_size=3),
        "sources": st.dictionaries(st.text(), st.text(), max_size=2),
        "tied_to": st.text(),
    },
)
SAID = st.lists(_SAID, min_size=1, max_size=3)
"""A few things to say, so that several rows say the same."""


@st.composite
def any_rows(draw):
    """Rows with names that may be the same, all different."""
    said = draw(SAID)
    names = draw(st.lists(st.tuples(_NAMES, st.integers(0, len(said) - 1)), max_size=30))
    found = []
    for name, index in names:
        made = row(name, (4, 4), **said[index])
        if made not in found:
            found.append(made)
    return found


@st.composite
def one_of_each_name(draw):
    """Rows with different names."""
    return list({each.name: each for each in draw(any_rows())}.values())
