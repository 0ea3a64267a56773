"""What shows that a change of code keeps the bits: one changed bit is seen, and no optimizer is left out."""

import sys

import bits
import pytest
import torch

from megatron_eopt.family import CLASSES

PLACE = "TP=2, muon/rank 1"


def record(key="", value=None):
    """Two cases, one of them of two ranks; with another value of one key."""
    ranks = []
    for _ in range(3):
        weights = {"tall": torch.ones(3, 4, 2), "scalar": torch.zeros(())}
        ranks.append({"weights": weights, "state": {"step": 3}, "collectives": ["step 0", "all_reduce"]})
    found = {"TP=2, muon": {"rank 0": ranks[0], "rank 1": ranks[1]}, "TP=2, lion": {"rank 0": ranks[2]}}
    if key:
        *path, last = f"{PLACE}/{key}".split("/")
        inner = found
        for each in path:
            inner = inner[each]
        inner[last] = value
    return found


ONE_BIT = torch.ones(24).index_fill(0, torch.tensor([12]), 1.0 + 2**-23).view(3, 4, 2)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("weights/tall", ONE_BIT, "1 of 24 entries, first [1, 2, 0]: 1.0 | 1.0000001"),
        ("weights/scalar", torch.tensor(-0.0), "1 of 1 entries, first []: 0.0 | -0.0"),
        ("weights/scalar", torch.zeros(()).double(), "torch.float32 [] | torch.float64 []"),
        ("state/step", 4, "3 | 4"),
        ("state", {}, "only in the first"),
        ("collectives", ["step 0"], "2 | 1 values"),
    ],
)
def test_one_changed_bit_is_seen_and_its_place_is_named(key, value, said):
    assert bits.compare(record(), record()) == []
    (line,) = bits.compare(record(), record(key, value))
    assert line.startswith(f"{PLACE}/{key}")
    assert said in line


def test_the_command_fails_where_a_case_is_missing(tmp_path, monkeypatch, capsys):
    torch.save(record(), tmp_path / "a.pt")
    torch.save(record() | {"TP=4, lion": {}}, tmp_path / "b.pt")
    for second, status in (("a.pt", 0), ("b.pt", 1)):
        monkeypatch.setattr(sys, "argv", ["bits.py", "compare", str(tmp_path / "a.pt"), str(tmp_path / second)])
        assert bits.main() == status
    assert capsys.readouterr().out.endswith("TP=4, lion: NoneType | dict\n3 cases, 1 differ\n")


def test_every_optimizer_of_the_table_has_a_case():
    assert CLASSES.keys() <= {case.cls for case in bits.CASES.values()}
