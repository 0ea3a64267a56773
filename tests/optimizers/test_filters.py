"""Filters of convolutions are stepped as the matrices that they are read as."""

import pytest
import torch

from megatron_eopt.matrices import WHOLE, experts, flattened, transposed
from megatron_eopt.optimizers.heavy_ball_muon import HeavyBallMuon
from tests.optimizers.family import OPTIMIZERS, build

OF_MATRICES = [row.name for row in OPTIMIZERS.values() if row.owns == "matrices"]
SHAPE = (12, 5, 3, 3)


def filters(memory_format=torch.contiguous_format, split=None):
    """A parameter, and the same one as a matrix."""
    torch.manual_seed(0)
    weight = torch.randn(SHAPE)
    filters = torch.nn.Parameter(weight.clone(memory_format=memory_format))
    filters.logical_matrices = flattened() if split is None else transposed(flattened())
    matrix = torch.nn.Parameter(weight.flatten(1).clone())
    if split is not None:
        matrix.logical_matrices = split
    return filters, matrix


LIE = {
    "as a filter": {},
    "channels last": {"memory_format": torch.channels_last},
    "of a transposed convolution": {"split": transposed()},
}


@pytest.mark.parametrize("name", OF_MATRICES)
@pytest.mark.parametrize("how", LIE)
def test_a_filter_takes_the_steps_of_its_matrix(name, how):
    filters_, matrix = filters(**LIE[how])
    of_filters, of_matrix = (build(name, [p]) for p in (filters_, matrix))
    for _ in range(3):
        gradient = torch.randn(SHAPE)
        filters_.grad = torch.empty_like(filters_).copy_(gradient)
        matrix.grad = gradient.flatten(1)
        of_filters.step()
        of_matrix.step()
    assert torch.equal(filters_.flatten(1), matrix)
    state = of_filters.state_dict()
    build(name, [filters_]).load_state_dict(state)


@pytest.mark.parametrize("cls", [OPTIMIZERS["muon"].cls, HeavyBallMuon])
def test_orthogonalize_of_a_filter_has_its_shape(cls):
    filters_, matrix = filters()
    gradient = torch.randn(SHAPE)
    found = cls([filters_]).orthogonalize(filters_, gradient)
    assert torch.equal(found.flatten(1), cls([matrix]).orthogonalize(matrix, gradient.flatten(1)))
    assert found.shape == SHAPE


def test_an_undeclared_filter_is_refused_with_what_to_declare():
    filters_, _ = filters()
    for split in (None, WHOLE):
        filters_.logical_matrices = split
        with pytest.raises(ValueError, match="declare it as flattened"):
            build("soap", [filters_])
    with pytest.raises(ValueError, match="stack of 12 matrices or flattened"):
        flattened(experts(12))
