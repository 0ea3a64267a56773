"""The pages of the docs have the tables that follow from the table of optimizers."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / "scripts"))
import state_bytes  # noqa: E402
import tables  # noqa: E402


@pytest.mark.parametrize("page", ["flags.md", *tables.PAGES])
def test_a_page_is_up_to_date(page):
    made = tables.made(page)
    assert (ROOT / "docs" / page).read_text() == made, (
        f"docs/{page} is not what megatron_eopt/family.py says: run python scripts/tables.py"
    )


def test_every_optimizer_is_in_the_first_tables_of_the_page_of_optimizers():
    page = (ROOT / "docs" / "optimizers.md").read_text()
    sentences, settings, _ = page.split("\n## ", maxsplit=2)
    for name in [*tables.OPTIMIZERS, "adam"]:
        assert f"\n| `{name}` |" in sentences
        assert f"\n| `{name}` |" in settings


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}.md" for name in "index adam-to-muon choosing".split())])
def test_pages_recommend_muon_as_the_table_does(page):
    words = (ROOT / page).read_text().replace("\\\n", " ").split()
    assert tables.begin_flags("muon") in " ".join(words)


def test_a_page_without_marks_is_refused(monkeypatch, tmp_path):
    (tmp_path / "support.md").write_text("<!-- works -->\n")
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    with pytest.raises(ValueError, match="expected '<!-- works -->' and after it '<!-- end -->'"):
        tables.made("support.md")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("none", 2 + 4 + 4 + 4),  # parameter, gradient, main parameter, momentum
        ("`--use-distributed-optimizer`", 2 + 4 + (4 + 4) / 16),
        ("`--use-megatron-fsdp`, `optim`", 2 + 2 + (4 + 4 + 4) / 16),  # the gradient of a share in fp32, too
        ("`--use-megatron-fsdp`, `optim_grads`", 2 + (2 + 4 + 4 + 4) / 16),
        ("`--use-megatron-fsdp`, `optim_grads_params`", (2 + 2 + 4 + 4 + 4) / 16),
        ("`--use-torch-fsdp2`", (2 + 4 + 4 + 4) / 16),
    ],
)
def test_bytes_a_parameter_are_those_of_the_dtypes(flags, expected):
    (way,) = [each for each in state_bytes.WAYS if each.flags == flags]
    assert state_bytes.held(way, "llama3-8b", 16, momentum=4) == (expected, 0)
    share = 1 if flags == "none" else 1 / 16
    found = state_bytes.held(way, "llama3-8b", 16, momentum=2, offloaded=True)
    assert found == (expected - 4 * share, 2 * share)


def test_the_fullest_rank_is_dealt_whole_parameters():
    """Four parameters of each of 32 layers over 64 ranks: one has the largest of a layer, another the three others."""
    fc1 = 2 * 14336 * 4096
    layer = fc1 + 14336 * 4096 + 6144 * 4096 + 4096 * 4096
    assert state_bytes.dealt("llama3-8b", 1, 64) == fc1 / (32 * layer)


def test_what_the_support_table_calls_working_is_shown_by_tests():
    works = {row.feature for row in tables.support_matrix(tables.RELEASES[0]) if row.works == "yes"}
    assert tables.shown_by().keys() == works
