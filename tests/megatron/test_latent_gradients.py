"""What Megatron itself makes of the gradients of latent attention at a tensor-parallel size of 2: no code of ours runs.

Its heads share the keys' positions. Each rank sums their gradient over its own heads, and nothing sums it over ranks.
Where these tests fail with a newer release, it does: then ``warn_of_shared_keys`` and the page on logical matrices have
to say up to which release that was so.
"""

import pytest

from tests.megatron.runs import CASES, MLA, UPSTREAM, WITHOUT_GQA, train, whole

pytestmark = pytest.mark.wide

DOWN = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
BEFORE = {"embedding.word_embeddings.weight", "decoder.layers.0.input_layernorm.weight"}  # what the keys depend on
LATENT = 20  # the first rows of the projection; the others make the positions
ADAM = ["--num-layers", 1, "--train-iters", 1, "--optimizer", "adam", "--clip-grad", 0]


def trained(folder, ranks, *flags, program=UPSTREAM, **how):
    """What each rank has after one step of Adam."""
    run = [*ADAM, *MLA, "--tensor-model-parallel-size", ranks, *flags]
    return [rank["after"] for rank in train(folder, ranks, *run, model=WITHOUT_GQA, program=program, **how)[0]]


def of_moments(recorded):
    """Name -> its first gradient, of which Adam's first moment is a tenth after one step."""
    return {name: 10 * state["exp_avg"] for name, state in recorded.items()}


def gradients(folder, ranks):
    return of_moments(whole(trained(folder, ranks)))


def apart(found, expected):
    """The relative error in the Frobenius norm."""
    return ((found - expected).norm() / expected.norm()).item()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent")
    return gradients(folder / "one", 1), gradients(folder / "two", 2)


def test_the_rows_of_the_keys_positions_miss_the_heads_of_other_ranks(two):
    one, both = (found[DOWN] for found in two)
    assert 0.5 < apart(both[LATENT:], one[LATENT:]) < 1


def test_every_other_gradient_is_that_of_one_rank(two):
    """But for what the keys are made from, which gets the missing part of the gradient neither."""
    one, both = two
    assert one.keys() == both.keys()
    errors = {name: apart(both[name], one[name]) for name in one.keys() - {DOWN}}
    errors["latent rows"] = apart(both[DOWN][:LATENT], one[DOWN][:LATENT])
    assert max(errors[name] for name in errors.keys() - BEFORE) < 1e-5
    assert all(1e-5 < errors[name] < 1e-2 for name in BEFORE)


DUPLICATED = {"program": CASES, "environment": {"DO": "duplicate_latents"}}  # a stand-in for Transformer Engine's layer


def test_of_duplicated_projections_each_rank_has_the_gradient_of_its_heads(tmp_path):
    (one,) = map(of_moments, trained(tmp_path / "one", 1, **DUPLICATED))
    first, second = (found[DOWN] for found in map(of_moments, trained(tmp_path / "two", 2, **DUPLICATED)))
    assert apart(first[:LATENT], one[DOWN][:LATENT]) < 1e-5
    assert apart(first[LATENT:], second[LATENT:]) > 0.5
    assert apart((first + second)[LATENT:], one[DOWN][LATENT:]) < 1e-5


def test_with_sequence_parallelism_duplicated_projections_have_the_gradients_of_one_rank(tmp_path):
    (one,) = map(of_moments, trained(tmp_path / "one", 1, **DUPLICATED))
    both = of_moments(whole(trained(tmp_path / "two", 2, "--sequence-parallel", **DUPLICATED)))
    assert max(apart(both[name], one[name]) for name in one) < 1e-5
