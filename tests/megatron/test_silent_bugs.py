"""Megatron's silent bugs of composed parallelism (MLM 7452), as far as they can be seen before the first step."""

import pytest

from tests.megatron.runs import EXACT, MUON, SHARED, TP2, assert_trains_as, doing, refused, train

pytestmark = pytest.mark.wide

RUN = ["--num-layers", 1, "--train-iters", 2, *MUON, *EXACT]


@pytest.mark.parametrize("flags", [[], [*SHARED, "--bf16"]], ids=["alone", "distributed optimizer"])
def test_a_norm_that_gets_a_part_of_its_gradient_is_refused(flags):
    """Finding 11: the norm of gated delta nets is whole on each rank, its gradient a part of a sum."""
    norm = "decoder.final_layernorm.weight"
    said = refused(*RUN, *TP2, *flags, ranks=2, **doing(f"part_gradient:{norm}"))
    assert "the gradients of 1 parameters that every tensor-parallel rank has whole differ between these" in said
    assert f"most that of {norm}, by" in said
    assert "% of its size: the ranks would train different models. Expected are equal gradients." in said


def test_attention_sinks_of_all_ranks_are_in_the_gradients_norm(tmp_path):
    """Finding 8: Megatron has those of the first rank alone in it, and clips by too little."""
    run, how = [*RUN, "--softmax-type", "learnable"], doing("even_sinks")
    alone, _ = train(tmp_path / "one", 1, *run, **how)
    assert_trains_as(train(tmp_path / "two", 2, *run, *TP2, **how)[0], alone)
