"""The pages have the tables that follow from the table of optimizers, and recommend what it recommends."""

from pathlib import Path

import pytest
import state_bytes
import tables

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("page", ["flags.md", *tables.PAGES])
def test_a_page_is_up_to_date(page):
    found = (ROOT / "docs" / page).read_text()
    assert found == tables.made(page), "run python scripts/tables.py"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/quick-start.md", "docs/optimizers.md"])
def test_pages_recommend_muon_as_the_table_does(page):
    words = (ROOT / page).read_text().replace("\\\n", " ").split()
    assert tables.begin_flags("muon") in " ".join(words)


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


def test_what_the_support_table_calls_working_is_shown_by_tests():
    works = {row.feature for row in tables.support_matrix(tables.RELEASES[0]) if row.works == "yes"}
    assert tables.shown_by().keys() == works
