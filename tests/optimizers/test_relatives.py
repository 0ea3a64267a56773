"""What Muon's relatives promise beyond their formulas: sizes, bounds, rates of zero, and what users may override."""

import pytest
import torch

from megatron_eopt import (
    MarsMuon,
    MuonHyperball,
    PolarGrad,
    Scion,
    TensorParallelAdaptiveMuon,
    TensorParallelMuon,
)
from tests.optimizers.family import VARIANTS, build, matrices
from tests.optimizers.field import assert_close, gradient, matrix, run
from tests.optimizers.test_muon_steps import muon, reference

EXACT = {"coefficient_type": "polar_express", "num_ns_steps": 8, "fp32_matmul_prec": "highest"}


@pytest.mark.parametrize(
    ("cls", "settings", "size"),
    [
        (TensorParallelMuon, {}, 1.0),
        (TensorParallelAdaptiveMuon, {"moment2_method": "normuon"}, 1.0),
        (TensorParallelAdaptiveMuon, {"moment2_method": "namo"}, 0.1 * 1.9 / 0.2),
        (TensorParallelAdaptiveMuon, {"moment2_method": "namo", "nesterov": False}, 0.1 / 0.2),
        (TensorParallelAdaptiveMuon, {"moment2_method": "adamuon"}, 1.0),
        (TensorParallelAdaptiveMuon, {"moment2_method": "adamuon", "align_rms": False}, 5 * 60**0.5),
        (Scion, {"constrained": False, "radius": 7.0}, 7.0 * (60 / 24) ** 0.5 / 60**0.5),
        (PolarGrad, {}, None),
        (MuonHyperball, {}, None),
    ],
    ids=str,
)
def test_the_first_update_has_the_predicted_size(cls, settings, size):
    p = matrix(60, 24)
    of_moments = {"beta2": 0.96} if "moment2_method" in settings else {}
    opt = cls([p], lr=1.0, momentum=0.9, weight_decay=0.0, **EXACT, **settings, **of_moments)
    before = p.detach().clone()
    run(opt, p, [1])
    predicted = opt.predicted_rms(60, 24, opt.param_groups[0])
    if size is None:
        size = before.norm() / (60 * 24) ** 0.5 if cls is MuonHyperball else None
        assert predicted is None or predicted == pytest.approx(float(size), rel=0.1)
        return
    assert predicted == pytest.approx(size)
    assert (p.detach() - before).square().mean().sqrt().item() == pytest.approx(size, rel=2e-3)


@pytest.mark.parametrize(
    "name", ["muon", *(name for name, (row, _) in VARIANTS.items() if "muon" in row), "dion", "scion"]
)
def test_a_zero_gradient_is_a_zero_update_and_the_next_is_a_step(name):
    (p,) = matrices(1)
    settings = {"constrained": False} if name == "scion" else {"weight_decay": 0.0}
    optimizer = build(name, [p], **settings)
    before = p.detach().clone()
    for _ in range(2):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p, before)
    run(optimizer, p, [1])
    assert not torch.equal(p, before)
    assert p.isfinite().all()


def test_second_moments_take_no_orthogonalize_of_ones_own():
    class Own(TensorParallelAdaptiveMuon):
        def orthogonalize(self, p, grad, **group_settings):
            return grad

    with pytest.raises(TypeError, match=r"Own has an orthogonalize of its own.*all matrices together"):
        Own([matrix()])
    namo, plain = (
        cls([matrix()], fp32_matmul_prec="highest") for cls in (TensorParallelAdaptiveMuon, TensorParallelMuon)
    )
    updates = [opt.orthogonalize(opt.param_groups[0]["params"][0], gradient(matrix(), 1)) for opt in (namo, plain)]
    torch.testing.assert_close(6**0.5 * updates[0], updates[1])  # without a scale it is the factor


# MARS.


def test_a_gradient_of_zeros_is_a_previous_gradient():
    p, q = matrix(), matrix(seed=1)
    opt = MarsMuon([p, q], 0.05, fp32_matmul_prec="highest")
    zero, own = torch.zeros_like(p), [gradient(p, step) * 0.02 for step in range(2)]
    settings = {"lr": 0.05, "nesterov": False, "gamma": 0.025}
    (expected, _), (of_q, _) = reference(p, [zero, *own], muon, **settings), reference(q, own, muon, **settings)
    for for_p, for_q in zip([zero, *own], [None, *own], strict=True):
        p.grad, q.grad = for_p, for_q
        opt.step()
    assert_close(p.detach(), expected, 1e-5)
    assert_close(q.detach(), of_q, 1e-5)
