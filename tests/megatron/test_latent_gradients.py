"""What Megatron itself makes of the gradients of latent attention at a tensor-parallel size of 2: no code of ours runs.

Its heads share the keys' positions. Each rank sums their gradient over its own heads, and nothing sums it over ranks.
Where these tests fail with a newer release, it does: then ``warn_of_shared_keys`` and the page on logical matrices have
to say up to which release that was so.
"""

import pytest

from tests.megatron.runs import CASES, MLA, UPSTREAM, WITHOUT_GQA, doing, train, whole

pytestmark = pytest.mark.wide

DOWN = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
BEFORE = {"embedding.word_embeddings.weight", "decoder.layers.0.input_layernorm.weight"}  # what the keys depend on
LATENT = 20  # the first rows of the projection; the others make the positions
RUN = ["--num-layers", 1, "--train-iters", 1, "--optimizer", "adam", "--clip-grad", 0, *MLA]


def gradients(folder, ranks, *flags, **how):
    """Of each rank and of the model, after one step of Adam, whose first moment then is a tenth of the gradient."""
    run = [*RUN, "--tensor-model-parallel-size", ranks, *flags]
    found = [rank["after"] for rank in train(folder, ranks, *run, model=WITHOUT_GQA, **how)[0]]
    if flags or how["program"] != CASES:
        found.append(whole(found))
    return [{name: 10 * state["exp_avg"] for name, state in recorded.items()} for recorded in found]


def apart(found, expected):
    """The relative error in the Frobenius norm."""
    return ((found - expected).norm() / expected.norm()).item()


def test_rows_of_the_keys_positions_miss_the_heads_of_other_ranks_and_every_other_gradient_is_that_of_one(tmp_path):
    """But for what the keys are made from, which gets the missing part of the gradient neither."""
    one, both = (gradients(tmp_path / str(ranks), ranks, program=UPSTREAM)[-1] for ranks in (1, 2))
    assert 0.5 < apart(both[DOWN][LATENT:], one[DOWN][LATENT:]) < 1
    assert one.keys() == both.keys()
    errors = {name: apart(both[name], one[name]) for name in one.keys() - {DOWN}}
    errors["latent rows"] = apart(both[DOWN][:LATENT], one[DOWN][:LATENT])
    assert max(errors[name] for name in errors.keys() - BEFORE) < 1e-5
    assert all(1e-5 < errors[name] < 1e-2 for name in BEFORE)


def test_of_duplicated_projections_each_rank_has_the_gradient_of_its_heads_but_with_sequence_parallelism(tmp_path):
    """With a stand-in for Transformer Engine's layer."""
    how = doing("duplicate_latents")
    (one,) = gradients(tmp_path / "one", 1, **how)
    first, second = (found[DOWN] for found in gradients(tmp_path / "two", 2, **how))
    assert apart(first[:LATENT], one[DOWN][:LATENT]) < 1e-5
    assert apart(first[LATENT:], second[LATENT:]) > 0.5
    assert apart((first + second)[LATENT:], one[DOWN][LATENT:]) < 1e-5
    *_, both = gradients(tmp_path / "sequence", 2, "--sequence-parallel", **how)
    assert max(apart(both[name], one[name]) for name in one) < 1e-5
