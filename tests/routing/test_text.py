"""The table that rank 0 prints."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.routing import text
from megatron_eopt.routing.patterns import families
from megatron_eopt.routing.text import aligned, table
from tests.routing.manifests import BIAS, EMBEDDING, changed, model, muons, row

EXPERT = "decoder.layers.*.mlp.experts.local_experts.*.linear_fc1.weight"


def cells(shown, name):
    """Cells of the line that begins with a name, by the titles above them (of a table that wraps no cell)."""
    lines = shown.splitlines()
    (line,) = [line for line in lines if line.split("  ")[0] == name]
    return re.split(r" {2,}", line.strip())


def printed(rows, **how):
    return table(families(rows), **how)


def wide(rows):
    """A table that wraps nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_WIDEST", 1000)
        return printed(rows)


def test_a_family_is_a_line_with_all_that_is_said():
    shown = wide(model(layers=4, experts=3))
    assert cells(shown, EXPERT) == [
        EXPERT, "12", "256x64", "muon", "default of muon", "256x64", "rows over tp 2, duplicated", "0.2",
        "0.001 to 1e-05", "0.1", "4.8e-05",
    ]  # fmt: skip
    qkv = "decoder.layers.*.self_attention.linear_qkv.weight"
    assert "q 64x64, k 32x64, v 32x64" in cells(shown, qkv)
    assert cells(shown, EMBEDDING) == [
        EMBEDDING, "1", "512x64", "adam", "an embedding: default of muon", "-", "whole", "-", "0.001 to 1e-05", "0.1",
        "8e-06",
    ]  # fmt: skip
    assert "Adam's is near 0.2" in shown


def test_layers_with_another_optimizer_are_told_apart():
    shown = wide(changed(model(), "layers.2.mlp.linear_fc2", optimizer=None, excluded=True, reason="excluded by f:3"))
    assert cells(shown, "decoder.layers.{0-1,3}.mlp.linear_fc2.weight")[1] == "3"
    others = cells(shown, "decoder.layers.2.mlp.linear_fc2.weight")
    assert others[3:5] == ["none", "excluded by f:3"]
    assert others[-3:-1] == ["-", "-"]


def test_the_full_table_has_a_line_for_each_parameter_in_the_order_of_layers():
    rows = model(layers=12, experts=2)
    shown = printed(rows, full=True)
    names = [line.split()[0] for line in shown.splitlines() if re.match(r"\S+\.(weight|bias) ", line)]
    assert sorted(names) == sorted(each.name for each in rows)
    two, ten = (names.index(f"decoder.layers.{layer}.mlp.linear_fc2.weight") for layer in (2, 10))
    assert two < ten
    assert "*" not in shown


def test_totals_of_each_optimizer_and_of_all():
    rows = [row(f"a.{n}", (10, 10), state_bytes=2_000_000, lr=0.5, min_lr=0.5) for n in range(2)]
    rows += [muons(f"b.{n}", (8, 5), ("q 0", 4, 5), ("q 1", 4, 5), state_bytes=500_000_000) for n in range(3)]
    rows += [row("c", (), optimizer=None, state_bytes=0)]
    shown = wide(rows)
    assert cells(shown, "adam") == ["adam", "2", "200", "0", "4"]
    assert cells(shown, "muon") == ["muon", "3", "120", "6", "1,500"]
    assert cells(shown, "none") == ["none", "1", "1", "0", "0"]
    assert cells(shown, "all") == ["all", "6", "321", "6", "1,504"]
    assert "0.5" in cells(shown, "a.*")  # a learning rate that stays
    assert "2 q 4x5" in cells(shown, "b.*")
    assert "scalar" in cells(shown, "c")


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


@given(st.lists(st.tuples(*[st.text("ab. 01", max_size=60)] * 3), max_size=5), st.booleans())
def test_any_content_stays_in_its_column(lines, wrap):
    shown = aligned(("name", "second", "third"), lines, ("third",), wrap)
    assert sorted("".join(shown).replace(" ", "").replace("-", "")) == sorted(
        "namesecondthird" + "".join(cell for line in lines for cell in line).replace(" ", "")
    )
