"""The pages of the docs have the tables that follow from the table of optimizers."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / "scripts"))
import tables  # noqa: E402


@pytest.mark.parametrize("page", ["flags.md", *tables.PAGES])
def test_a_page_is_up_to_date(page):
    made = tables.made(page)
    assert (ROOT / "docs" / page).read_text() == made, (
        f"docs/{page} is not what megatron_eopt/family.py says: run python scripts/tables.py"
    )


def test_a_page_without_marks_is_refused(monkeypatch, tmp_path):
    (tmp_path / "support.md").write_text("<!-- support -->\n")
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    with pytest.raises(ValueError, match=r"docs/support\.md: expected '<!-- support -->', and '<!-- end -->'"):
        tables.made("support.md")
