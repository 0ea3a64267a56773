"""Muon's steps on one rank, against its formulas written out, emerging-optimizers and torch."""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon as Theirs

from megatron_eopt import TensorParallelMuon
from tests.optimizers.field import (
    QUINTIC,
    SHAPES,
    TOLERANCE,
    assert_close,
    assert_close_in_bf16,
    factor,
    gradient,
    matrix,
    run,
)

SIZES = {
    "spectral": lambda rows, cols: max(rows, cols) ** 0.5,
    "unit_rms_norm": lambda rows, cols: (rows / cols) ** 0.5,
    "shape_scaling": lambda rows, cols: max(1.0, rows / cols) ** 0.5,
}


def reference(p, gradients, lr, momentum=0.95, nesterov=True, weight_decay=0.01, mode="spectral", extra=1.0, l2=False):
    """Muon (Jordan et al., 2024) with a momentum that is an average, and the sizes of arXiv 2502.16982, in fp64."""
    w, m = p.detach().double().clone(), 0.0
    for g in gradients:
        g = g.double() + (weight_decay * w if l2 else 0)
        m = momentum * m + (1 - momentum) * g
        o = factor(momentum * m + (1 - momentum) * g if nesterov else m, QUINTIC)
        w = w - lr * (0 if l2 else weight_decay) * w - lr * extra * SIZES[mode](*w.shape) * o
    return w


@pytest.mark.parametrize(
    "settings",
    [
        {"nesterov": True, "weight_decay": 0.3},
        {"nesterov": False, "weight_decay": 0.3, "mode": "unit_rms_norm"},
        {"nesterov": True, "weight_decay": 0.1, "mode": "shape_scaling", "extra": 0.2},
        {"nesterov": False, "weight_decay": 0.1, "l2": True},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_twenty_steps_follow_the_formula(dtype, shape, settings):
    p = matrix(*shape, dtype=dtype)
    expected = reference(p, [gradient(p, seed) for seed in range(20)], 0.01, 0.8, **settings)
    names = {"mode": "scale_mode", "extra": "extra_scale_factor"}
    ours = {names.get(key, key): value for key, value in settings.items() if key != "l2"}
    decoupled = not settings.get("l2", False)
    opt = TensorParallelMuon([p], 0.01, 0.8, use_decoupled_weight_decay=decoupled, fp32_matmul_prec="highest", **ours)
    run(opt, p, range(20))
    assert_close(p.detach(), expected, TOLERANCE[dtype])
    assert list(opt.state[p]) == ["momentum_buffer"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bf16_parameters_follow_it_as_far_as_they_can(shape):
    # without decay, which bf16 loses where it is less than a rounding
    p = matrix(*shape, dtype=torch.bfloat16)
    before, settings = p.detach().double(), {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.0}
    expected = reference(p, [gradient(p, seed) for seed in range(20)], **settings)
    run(TensorParallelMuon([p], **settings), p, range(20))
    assert_close_in_bf16(p.detach(), before, expected, roundings=20)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("mode", SIZES)
@pytest.mark.parametrize("shape", [(9, 8), (8, 9), (8, 8)])
def test_steps_are_those_of_emerging_optimizers(shape, mode, nesterov):
    p, q = matrix(*shape), matrix(*shape)
    same = {"nesterov": nesterov, "weight_decay": 0.1, "scale_mode": mode, "fp32_matmul_prec": "highest"}
    run(TensorParallelMuon([p], 0.02, 0.9, **same), p, range(20))
    run(Theirs([q], 0.02, 0.9, **same), q, range(20))
    assert_close(p.detach(), q.detach().double(), 1e-5)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("size", "theirs"),
    [
        ({"scale_mode": "shape_scaling"}, "original"),
        ({"scale_mode": "spectral", "extra_scale_factor": 0.2}, "match_rms_adamw"),
    ],
    ids=["original", "match_rms_adamw"],
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_steps_are_those_of_torch_as_far_as_its_bf16_iteration_goes(shape, size, theirs, nesterov):
    # five products in bf16 turn a step of theirs by 2^-6 where a matrix is not nearly singular
    p, q = matrix(*shape), matrix(*shape)
    before = p.detach().clone()
    same = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    run(TensorParallelMuon([p], coefficient_type="simple", fp32_matmul_prec="highest", **size, **same), p, range(20))
    run(torch.optim.Muon([q], adjust_lr_fn=theirs, **same), q, range(20))
    assert (p - q).norm() <= 2**-6 * (q - before).norm()
