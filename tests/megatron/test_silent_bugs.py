"""Megatron's silent bugs of composed parallelism (MLM 7452), as far as they can be seen before the first step."""

import pytest

from tests.megatron.runs import EXACT, MUON, TP2, assert_trains_as, doing, train

pytestmark = pytest.mark.wide

RUN = ["--num-layers", 1, "--train-iters", 2, *MUON, *EXACT]


def test_attention_sinks_of_all_ranks_are_in_the_gradients_norm(tmp_path):
    """Finding 8: Megatron has those of the first rank alone in it, and clips by too little."""
    run, how = [*RUN, "--softmax-type", "learnable"], doing("even_sinks")
    alone, _ = train(tmp_path / "one", 1, *run, **how)
    assert_trains_as(train(tmp_path / "two", 2, *run, *TP2, **how)[0], alone)
