"""Models by their sizes: the matrices that scripts plan and time."""

from collections import Counter

import pytest
from model_matrices import MODELS, Model, matrices_of

SMALL = Model(num_layers=3, hidden_size=64, ffn_hidden_size=96, num_attention_heads=8, num_query_groups=2, swiglu=True)


def all_matrices(model, tensor=1):
    return [matrix for parameter in matrices_of(model, tensor) for matrix in parameter]


def test_a_dense_model():
    matrices = all_matrices(SMALL, tensor=2)
    assert Counter((m.name.split(".", 3)[-1], m.shape, m.ranks, m.group) for m in matrices) == {
        ("self_attention.linear_qkv.weight[q]", (64, 64), 2, "tp"): 3,
        ("self_attention.linear_qkv.weight[k]", (16, 64), 2, "tp"): 3,
        ("self_attention.linear_qkv.weight[v]", (16, 64), 2, "tp"): 3,
        ("self_attention.linear_proj.weight", (64, 64), 2, "tp"): 3,
        ("mlp.linear_fc1.weight", (192, 64), 2, "tp"): 3,
        ("mlp.linear_fc2.weight", (64, 96), 2, "tp"): 3,
    }
    assert len({matrix.name for matrix in matrices}) == len(matrices)


def test_more_ranks_than_query_groups_cut_inside_a_group():
    """A group is 32 rows of q, 8 of k and 8 of v; a rank has 24 of these 48."""
    rows = {
        matrix.name[-3:]: [rectangle.shape[0] for rectangle in matrix.rectangles]
        for matrix in all_matrices(SMALL, tensor=4)
        if "layers.0.self_attention.linear_qkv" in matrix.name
    }
    assert rows == {"[q]": [24, 8, 24, 8], "[k]": [0, 8, 0, 8], "[v]": [0, 8, 0, 8]}


@pytest.mark.parametrize(("model", "billions"), [("llama3-8b", 8.03), ("llama3-70b", 70.55)])
def test_models_have_as_many_parameters_as_is_published(model, billions):
    """With embedding and output layer; norms are less than the last digit."""
    sizes = MODELS[model]
    entries = sum(rows * cols for matrix in all_matrices(sizes) for rows, cols in [matrix.shape])
    assert (entries + 2 * 128256 * sizes.hidden_size) / 1e9 == pytest.approx(billions, rel=5e-4)
