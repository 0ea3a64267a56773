"""The walk of a gradient through one step is what the docs say it is."""

import re
from pathlib import Path
from typing import get_args

import pytest
import walk

from megatron_eopt import TensorParallelMuon
from megatron_eopt.orthogonalize.coefficients import NSCoeffT, set_length

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/code.md").read_text()


@pytest.fixture(scope="module")
def walks():
    """Muon's, on one process and on one of two tensor-parallel ranks."""
    return {"one process": walk.one_step(TensorParallelMuon), "TP=2": walk.on_two_ranks(["muon"])["muon"]}


def test_the_docs_follow_the_step_through_the_files_that_it_enters(walks):
    section = PAGE.partition("## One step\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`megatron_eopt/([\w/]+\.py)`", section))
    assert named == {*walks["one process"].files, *walks["TP=2"].files}


def test_what_is_counted_are_calls_of_the_package():
    def outer():
        return [set_length(get_args(NSCoeffT)[0]), sorted([2, 1])]

    found = walk.walk(outer)
    assert found.files == ["orthogonalize/coefficients.py", "orthogonalize/choices.py"]
    assert (found.calls, found.depth, found.stays) == (5, 4, 2)
