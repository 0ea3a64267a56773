"""The table that rank 0 prints."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.routing.patterns import LogicalMatrix, families
from megatron_eopt.routing.text import aligned, table
from tests.routing.manifests import BIAS, EMBEDDING, QKV, changed, model, muons, row

EXPERT = "decoder.layers.*.mlp.experts.local_experts.*.linear_fc1.weight"


def cells(text, name):
    """Cells of the line that begins with a name, by the titles above them (of a table that wraps no cell)."""
    lines = text.splitlines()
    (line,) = [line for line in lines if line.split("  ")[0] == name]
    return re.split(r" {2,}", line.strip())


def printed(rows, **how):
    return table(families(rows), **how)


def wide(rows):
    return printed(rows, width=1000)


def test_a_family_is_a_line_with_all_that_is_said():
    text = wide(model(layers=4, experts=3))
    assert cells(text, EXPERT) == [
        EXPERT, "12", "256x64", "muon", "default of muon", "256x64", "rows over tp 2, duplicated", "0.2",
        "0.001 to 1e-05", "0.1", "4.8e-05",
    ]  # fmt: skip
    qkv = "decoder.layers.*.self_attention.linear_qkv.weight"
    assert "q 64x64, k 32x64, v 32x64" in cells(text, qkv)
    assert cells(text, EMBEDDING) == [
        EMBEDDING, "1", "512x64", "adam", "an embedding: default of muon", "-", "whole", "-", "0.001 to 1e-05", "0.1",
        "8e-06",
    ]  # fmt: skip
    assert "Adam's is near 0.2" in text


def test_a_learning_rate_that_stays_is_one_number():
    assert "0.5" in cells(wide(changed(model(), EMBEDDING, lr=0.5, min_lr=0.5)), EMBEDDING)


def test_layers_with_another_optimizer_are_told_apart():
    text = wide(changed(model(), "layers.2.mlp.linear_fc2", optimizer=None, excluded=True, reason="excluded by f:3"))
    assert cells(text, "decoder.layers.{0-1,3}.mlp.linear_fc2.weight")[1] == "3"
    others = cells(text, "decoder.layers.2.mlp.linear_fc2.weight")
    assert others[3:5] == ["none", "excluded by f:3"]
    assert others[-3:-1] == ["-", "-"]


def test_the_full_table_has_a_line_for_each_parameter_in_the_order_of_layers():
    text = printed(model(layers=12, experts=2), full=True)
    names = [line.split()[0] for line in text.splitlines() if re.match(r"\S+\.(weight|bias) ", line)]
    assert sorted(names) == sorted(each.name for each in model(layers=12, experts=2))
    assert names.index("decoder.layers.2.mlp.linear_fc2.weight") < names.index(
        "decoder.layers.10.mlp.linear_fc2.weight"
    )
    assert "*" not in text


def test_totals_of_each_optimizer_and_of_all():
    rows = [row("a.0", (10, 10), state_bytes=2_000_000), row("a.1", (10, 10), state_bytes=2_000_000)]
    rows += [muons(f"b.{n}", (8, 5), ("q", 4, 5), ("k", 4, 5), state_bytes=500_000_000) for n in range(3)]
    rows += [row("c", (), optimizer=None, state_bytes=0)]
    text = wide(rows)
    assert cells(text, "adam") == ["adam", "2", "200", "0", "4"]
    assert cells(text, "muon") == ["muon", "3", "120", "6", "1,500"]
    assert cells(text, "none") == ["none", "1", "1", "0", "0"]
    assert cells(text, "all") == ["all", "6", "321", "6", "1,504"]
    assert "scalar" in cells(text, "c")


def test_one_optimizer_needs_no_sum():
    assert not [line for line in wide([row("a", (2, 2))]).splitlines() if line.startswith("all ")]


def test_matrices_of_one_size_are_counted():
    heads = [LogicalMatrix(f"q {head}", 16, 64, "local", 1.0) for head in range(8)]
    stack = [LogicalMatrix(f"expert {n} {part}", 32, 64, "local", 1.0) for n in range(2) for part in ("gate", "up")]
    text = wide([row("a", (128, 64), matrices=heads), row("b", (2, 64, 64), matrices=stack)])
    assert cells(text, "a")[5] == "8 q 16x64"
    assert cells(text, "b")[5] == "2 expert gate 32x64, 2 expert up 32x64"


def test_sources_of_settings_are_said_only_where_there_are_any():
    plain = printed(model())
    assert "settings" not in plain
    assert "overruled" not in plain
    rows = changed(
        model(),
        "linear_qkv.bias",
        lr=0.02,
        settings={"betas": (0.9, 0.95), "eps": 1e-7},
        sources={"lr": "overrides.yaml:2", "betas": "overrides.yaml:9", "optimizer": "defaults of muon"},
        overruled=("lr = 0.01 (overrides.yaml:1)",),
    )
    lines = printed(rows).splitlines()
    name = BIAS.replace("layers.0", "layers.{0-3}")
    at = lines.index("settings that were set, and where:")
    assert lines[at + 1] == f"  {name}: betas (0.9, 0.95) (overrides.yaml:9), eps 1e-07, lr 0.02 (overrides.yaml:2)"
    assert lines[lines.index("overruled:") + 1] == f"  {name}: lr = 0.01 (overrides.yaml:1)"
    assert "defaults of muon" not in "\n".join(lines)


@pytest.mark.parametrize("width", [120, 170])
def test_no_line_is_longer_than_the_width_and_nothing_is_lost(width):
    rows = changed(model(), QKV, reason="/home/someone/a/long/path/to/the/overrides/of/this/run/overrides.yaml:9")
    rows = changed(rows, BIAS, overruled=tuple(f"lr = {n} (overrides.yaml:{n})" for n in range(30)))
    text = printed(rows, width=width)
    assert max(map(len, text.splitlines())) <= width
    wide_words = sorted(re.sub(r"[\s-]", "", wide(rows)))
    assert sorted(re.sub(r"[\s-]", "", text)) == wide_words


def test_names_stay_whole_as_long_as_other_cells_can_be_wrapped():
    lines = printed(changed(model(), "linear_fc2", reason="a " * 100)).splitlines()
    assert [line for line in lines if line.startswith("decoder.layers.*.mlp.linear_fc2.weight ")]


@given(st.lists(st.tuples(*[st.text("ab. 01", max_size=60)] * 3), max_size=5), st.integers(82, 120))
def test_any_content_fits_and_stays_in_its_column(lines, width):
    text = aligned(("name", "second", "third"), lines, width, ("third",))
    assert all(len(line) <= width for line in text)
    assert sorted("".join(text[2:]).replace(" ", "").replace("-", "")) == sorted(
        "".join(cell for line in lines for cell in line).replace(" ", "")
    )
