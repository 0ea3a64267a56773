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
    one = record()
    one["TP=2, muon"]["rank 1"]["weights"]["tall"][0, 0, 0] = float("nan")
    assert bits.compare(one, one) == bits.compare(record(), record()) == []


ONE_BIT = torch.ones(24).index_fill(0, torch.tensor([12]), 1.0 + 2**-23).view(3, 4, 2)


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("weights", "tall"), ONE_BIT, "1 of 24 entries, first [1, 2, 0]: 1.0 | 1.0000001"),
        (("weights", "scalar"), torch.tensor(1.0).double(), "torch.float32 [] | torch.float64 []"),
        (("state", "state"), {}, "only in the first"),
        (("collectives",), ["step 0"], "2 | 1 values"),
        (("counters",), {}, "only in the second"),
    ],
)
def test_one_changed_bit_is_seen_and_its_case_is_named(keys, value, said):
    other = record()
    found = other["TP=2, muon"]["rank 1"]
    for key in keys[:-1]:
        found = found[key]
    found[keys[-1]] = value
    (line,) = bits.compare(record(), other)
    assert line.startswith(f"TP=2, muon/rank 1/{'/'.join(keys)}")
    assert said in line


def test_the_sign_of_a_zero_and_a_missing_case_are_seen():
    one, other = record(), record()
    one["TP=2, muon"]["rank 0"]["weights"]["scalar"].fill_(0.0)
    other["TP=2, muon"]["rank 0"]["weights"]["scalar"].fill_(-0.0)
    other["TP=4, lion"] = {}
    assert bits.compare(one, other) == [
        "TP=2, muon/rank 0/weights/scalar: 1 of 1 entries, first []: 0.0 | -0.0",
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
