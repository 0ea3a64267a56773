"""What starts and steps cost at thousands of ranks, by ``make scale``: counts, which do not depend on the machine."""

import math
import pickle

import pytest
import scale

HASH = 32  # bytes


def test_what_ranks_say_grows_with_what_differs_not_with_ranks():
    """Beside each different value, which a sum over all ranks sends twice: a hash and a size of every rank."""
    for ranks, kinds in ((64, 16), (4096, 16), (4096, 1024)):
        assert scale.compared(ranks) == (1, HASH * (ranks - 1))
        calls, sent, _ = scale.said(ranks, kinds)
        values = kinds * len(pickle.dumps("x" * 8192))
        assert (calls, sent) == (3, (HASH + 8) * (ranks - 1) + math.ceil(2 * (ranks - 1) * values / ranks))


def test_parts_of_the_table_run_on_few_ranks():
    assert scale.exponent({10: 1.0, 100: 100.0}) == pytest.approx(2)
    assert sum(scale.plans(8)) > 0
    assert scale.step((96, 8), 8, rounds=1) > 0
    assert scale.line("what", lambda ranks: ranks / 100) == ["what", "0.64", "2.56", "10.2", "41", "1.00"]
