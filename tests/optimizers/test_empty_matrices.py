"""A matrix without entries takes no step and hinders none, under every optimizer of matrices and scale mode."""

import pytest
import torch

from tests.optimizers.family import ELEMENTWISE, OPTIMIZERS, WITH_STATE, build, having
from tests.optimizers.field import drawn, matrix

SHAPES = [(4, 0), (0, 4), (0, 0)]
MODES = ["spectral", "unit_rms_norm", "shape_scaling"]
METHODS = ["adamuon", "normuon", "namo"]
CASES = [
    *(("muon", {"scale_mode": mode}) for mode in MODES),
    *(("adaptive_muon", {"scale_mode": mode, "moment2_method": method}) for mode in MODES for method in METHODS),
    *(("muon", {"tp_mode": mode, "scale_mode": "unit_rms_norm"}) for mode in ("auto", "blockwise", "gram")),
    *((name, {}) for name in OPTIMIZERS if name not in (*ELEMENTWISE, *having("rank"))),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_matrix_without_entries_takes_no_step_and_hinders_none(name, settings):
    for shape in SHAPES:
        assert_hinders_none(name, settings, shape)


def assert_hinders_none(name, settings, shape):
    empty = torch.nn.Parameter(torch.zeros(shape))
    beside, alone = matrix(), matrix()
    both, one = build(name, [empty, beside], **settings), build(name, [alone], **settings)
    for seed in range(1, 4):
        empty.grad = torch.zeros(shape)
        beside.grad = drawn((6, 4), seed)
        alone.grad = beside.grad.clone()
        both.step()
        one.step()
    assert torch.equal(beside, alone)
    kept = [value for state in both.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert bool(kept) == (name in WITH_STATE)
    assert all(value.isfinite().all() for value in kept)


def test_spectron_refuses_one_since_it_has_no_rank():
    for shape in SHAPES:
        with pytest.raises(ValueError, match=r"rank must lie in \[1, 0\]"):
            build("spectron", [torch.nn.Parameter(torch.zeros(shape))])
