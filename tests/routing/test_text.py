"""The table that rank 0 prints."""

import re

from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.routing.patterns import LogicalMatrix, families
from megatron_eopt.routing.text import table
from megatron_eopt.screen import aligned
from tests.routing.manifests import BIAS, EMBEDDING, changed, model, muons, row

EXPERT = "decoder.layers.*.mlp.experts.local_experts.*.linear_fc1.weight"


def cells(shown, name):
    """Cells of the line that begins with a name, by the titles above them (of a table that wraps no cell)."""
    lines = shown.splitlines()
    (line,) = [line for line in lines if line.split("  ")[0] == name]
    return re.split(r" {2,}", line.strip())


def printed(rows, **how):
    return table(families(rows), **how)


def test_families_stand_under_what_they_share_the_largest_first():
    lines = printed(model(layers=4, experts=3)).splitlines()
    assert lines[0] == "muon: lr 0.001 to 1e-05, decay 0.1, update RMS 0.2 (default of muon)"
    at = next(number for number, line in enumerate(lines) if line.endswith(EXPERT))
    assert lines[at].split() == ["12", "256x64", EXPERT]
    assert lines[at + 1].strip() == "rows over tp 2, duplicated"
    at = next(number for number, line in enumerate(lines) if line.endswith(EMBEDDING))
    assert lines[at].split() == ["1", "512x64", EMBEDDING]
    heads = [line for line in lines[:at] if line and line[0].isalpha()]
    assert heads[-1] == "adam: lr 0.001 to 1e-05, decay 0.1 (an embedding: default of muon)"
    assert max(map(len, lines)) <= 80


def test_the_full_table_has_all_that_is_said_in_a_line():
    shown = printed(model(layers=4, experts=3), full=True)
    name = EXPERT.replace("*", "1")
    assert cells(shown, name) == [
        name, "256x64", "muon", "default of muon", "256x64", "rows over tp 2, duplicated", "0.2",
        "0.001 to 1e-05", "0.1", "4e-06",
    ]  # fmt: skip


def test_totals_of_each_optimizer_and_of_all():
    rows = [row("a.0", (10, 10), state_bytes=2_000_000), row("a.1", (10, 10), state_bytes=2_000_000)]
    rows += [muons(f"b.{n}", (8, 5), ("q", 4, 5), ("k", 4, 5), state_bytes=500_000_000) for n in range(3)]
    rows += [row("c", (), optimizer=None, state_bytes=0)]
    shown = printed(rows)
    assert cells(shown, "adam") == ["adam", "2", "200", "0", "4"]
    assert cells(shown, "muon") == ["muon", "3", "120", "6", "1,500"]
    assert cells(shown, "none") == ["none", "1", "1", "0", "0"]
    assert cells(shown, "all") == ["all", "6", "321", "6", "1,504"]
    assert "1  scalar  c\n" in shown


def test_matrices_of_one_size_are_counted():
    heads = [LogicalMatrix(f"q {head}", 16, 64, "local", 1.0) for head in range(8)]
    stack = [LogicalMatrix(f"expert {n} {part}", 32, 64, "local", 1.0) for n in range(2) for part in ("gate", "up")]
    shown = printed([row("a", (128, 64), matrices=heads), row("b", (2, 64, 64), matrices=stack)])
    assert re.search(r"  a\n +8 q 16x64\n", shown)
    assert re.search(r"  b\n +2 expert gate 32x64, 2 expert up 32x64\n", shown)


def test_sources_of_settings_are_said_only_where_there_are_any():
    assert "settings" not in printed(model())
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


def test_a_rate_says_whether_its_multiplier_is_in_it():
    sources = {"lr": "a.yaml:1", "lr_mult": "a.yaml:3"}
    shown = printed(changed(model(), EMBEDDING, lr=0.005, settings={"lr_mult": 0.5}, sources=sources))
    assert f"{EMBEDDING}: lr 0.005 after lr_mult (a.yaml:1), lr_mult 0.5 (a.yaml:3)" in shown


@given(st.lists(st.tuples(*[st.text("ab. 01", max_size=60)] * 3), max_size=5), st.booleans())
def test_any_content_stays_in_its_column(lines, wrap):
    shown = aligned(("name", "second", "third"), lines, ("third",), wrap)
    assert sorted("".join(shown).replace(" ", "").replace("-", "")) == sorted(
        "namesecondthird" + "".join(cell for line in lines for cell in line).replace(" ", "")
    )
