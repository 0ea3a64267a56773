"""What shows that a change of code keeps the bits: one changed bit is seen and named, and no optimizer is left out."""

import sys

import bits
import pytest
import torch

from megatron_eopt.family import CLASSES


def of_rank():
    """What a rank records of a case."""
    return {
        "weights": {"tall": torch.ones(3, 4, 2), "scalar": torch.tensor(1.0)},
        "state": {"state": {0: {"step": 3}}},
        "collectives": ["step 0", "all_reduce tensor 4 torch.float32"],
    }


def record():
    """Two cases, one of them of two ranks."""
    return {"TP=2, muon": {"rank 0": of_rank(), "rank 1": of_rank()}, "TP=2, lion": {"rank 0": of_rank()}}


def test_equal_records_have_no_differences():
    assert bits.compare(record(), record()) == []


@pytest.mark.parametrize("value", [1.0 + 2**-23, float("nan")])
def test_one_changed_bit_is_seen_and_its_case_is_named(value):
    other = record()
    other["TP=2, muon"]["rank 1"]["weights"]["tall"][1, 2, 0] = value
    assert bits.compare(record(), other) == [
        f"TP=2, muon/rank 1/weights/tall: 1 of 24 entries, first [1, 2, 0]: 1.0 | {value!r}"
    ]
    assert bits.compare(other, other) == []


def test_the_sign_of_a_zero_a_collective_and_a_missing_case_are_seen():
    one, other = record(), record()
    for each, zero in ((one, 0.0), (other, -0.0)):
        each["TP=2, muon"]["rank 0"]["weights"]["scalar"].fill_(zero)
    other["TP=2, lion"]["rank 0"]["collectives"].pop()
    other["TP=4, lion"] = {}
    assert bits.compare(one, other) == [
        "TP=2, muon/rank 0/weights/scalar: 1 of 1 entries, first []: 0.0 | -0.0",
        "TP=2, lion/rank 0/collectives: 2 | 1 values",
        "TP=4, lion: NoneType | dict",
    ]


def test_the_command_says_which_cases_differ(tmp_path, monkeypatch, capsys):
    one, other = record(), record()
    other["TP=2, lion"]["rank 0"]["state"]["state"][0]["step"] = 4
    for name, each in (("a.pt", one), ("b.pt", other)):
        torch.save(each, tmp_path / name)
    for second, status in (("a.pt", 0), ("b.pt", 1)):
        monkeypatch.setattr(sys, "argv", ["bits.py", "compare", str(tmp_path / "a.pt"), str(tmp_path / second)])
        assert bits.main() == status
    assert capsys.readouterr().out.endswith("TP=2, lion/rank 0/state/state/0/step: 3 | 4\n2 cases, 1 differ\n")


def test_every_optimizer_of_the_table_has_a_case():
    assert CLASSES.keys() <= {case.cls for case in bits.CASES.values()}
