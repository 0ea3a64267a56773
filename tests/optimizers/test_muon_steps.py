"""Steps of Muon and its relatives on one rank, against their formulas written out, emerging-optimizers and torch."""

import pytest
import torch
from emerging_optimizers import orthogonalized_optimizers as theirs
from emerging_optimizers.orthogonalized_optimizers.adaptive_muon import AdaptiveMuon

from megatron_eopt import (
    MarsMuon,
    MuonHyperball,
    PolarGrad,
    Scion,
    TensorParallelAdaptiveMuon,
    TensorParallelMuon,
)
from tests.optimizers.field import SHAPES, TOLERANCE, assert_close, assert_close_in_bf16, factor, gradient, matrix, run

SIZES = {
    "spectral": lambda rows, cols: max(rows, cols) ** 0.5,
    "unit_rms_norm": lambda rows, cols: (rows / cols) ** 0.5,
    "shape_scaling": lambda rows, cols: max(1.0, rows / cols) ** 0.5,
}
STEPS = 20


# What an optimizer makes of a weight w, of the momentum u after the look-ahead, of its factor o and of what it keeps.


def muon(w, u, o, kept, lr, weight_decay=0.01, scale_mode="spectral", extra_scale_factor=1.0, l2=False):
    """Jordan et al., 2024, with the sizes of arXiv 2502.16982."""
    return w - lr * (0 if l2 else weight_decay) * w - lr * extra_scale_factor * SIZES[scale_mode](*w.shape) * o


def adaptive(w, u, o, kept, lr, moment2_method, weight_decay=0.01, beta2=0.95, eps=1e-8, align_rms=True, l2=False):
    """AdaMuon, NorMuon and NAMO: arXiv 2507.11005, 2510.05491 and 2602.17080."""
    values = {
        "adamuon": o**2,
        "normuon": (o**2).mean(1 if w.size(0) >= w.size(1) else 0, keepdim=True),
        "namo": (kept["g"] ** 2).sum(),
    }
    v = kept["moment2_buffer"] = beta2 * kept.get("moment2_buffer", 0.0) + (1 - beta2) * values[moment2_method]
    update = o / (v.sqrt() + eps) if moment2_method != "normuon" else o / v.clamp(min=eps).sqrt()
    if moment2_method == "namo":
        update = update * u.norm()
    elif align_rms:
        update = update * o.norm() / update.norm()
    return w - lr * (0 if l2 else weight_decay) * w - lr * max(w.shape) ** 0.5 * update


def scion(w, u, o, kept, lr, radius=50.0, constrained=True):
    """Algorithms 1 and 2 of arXiv 2502.07529, with the spectral lmo of hidden matrices."""
    return (1 - lr * constrained) * w - lr * radius * (w.size(0) / w.size(1)) ** 0.5 * o


def polar_grad(w, u, o, kept, lr, weight_decay=0.01):
    """arXiv 2505.21799, with the momentum first."""
    return w - lr * weight_decay * w - lr * (u * o).sum() * o


def hyperball(w, u, o, kept, lr):
    """``W <- R normalize(W - lr R normalize(O))``."""
    radius = kept.setdefault("radius", w.norm())
    w = w - lr * radius * o / o.norm()
    return radius * w / w.norm()


def mars(g, kept, gamma=0.025, momentum=0.95):
    """The clipped gradient of arXiv 2411.10438, in its approximate form."""
    c = g + gamma * momentum / (1 - momentum) * (g - kept.get("previous_gradient", g))
    kept["previous_gradient"] = g
    return c / c.norm().clamp(min=1)


def reference(p, gradients, formula, momentum=0.95, nesterov=True, gamma=None, **settings):
    """Weights after steps in fp64, and what is kept."""
    w, m, kept = p.detach().double().clone(), 0.0, {}
    for g in gradients:
        g = g.double() if gamma is None else mars(g.double(), kept, gamma, momentum)
        g = kept["g"] = g + (settings["weight_decay"] * w if settings.get("l2") else 0)
        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g if nesterov else m
        w = formula(w, u, factor(u), kept, **settings)
    return w, {**kept, "momentum_buffer": m}


ADAMUON = {"moment2_method": "adamuon"}
NORMUON = {"moment2_method": "normuon"}
NAMO = {"moment2_method": "namo"}
# An eps as large as entries of the factors keeps small ones small, and a small one stands where the formula has it.
LARGE_EPS = {"eps": 0.1, "momentum": 0.8, "weight_decay": 0.3, "beta2": 0.9}
MARS = {"nesterov": False, "gamma": 0.025}
# Class, formula, settings, and what multiplies the gradients of steps in turn; of MARS only norms above 1 are clipped.
ROWS = [
    (TensorParallelMuon, muon, {"weight_decay": 0.3}),
    (TensorParallelMuon, muon, {"nesterov": False, "weight_decay": 0.3, "scale_mode": "unit_rms_norm"}),
    (TensorParallelMuon, muon, {"momentum": 0.8, "scale_mode": "shape_scaling", "extra_scale_factor": 0.2}),
    (TensorParallelMuon, muon, {"nesterov": False, "weight_decay": 0.1, "l2": True}),
    *((TensorParallelAdaptiveMuon, adaptive, {**method, **LARGE_EPS}) for method in (ADAMUON, NORMUON, NAMO)),
    (TensorParallelAdaptiveMuon, adaptive, {**ADAMUON, **LARGE_EPS, "align_rms": False, "nesterov": False}),
    *((TensorParallelAdaptiveMuon, adaptive, {**method, "eps": 1e-3}) for method in (ADAMUON, NORMUON, NAMO)),
    *((TensorParallelAdaptiveMuon, adaptive, {**x, "weight_decay": 0.5, "l2": True}) for x in (ADAMUON, NORMUON)),
    (Scion, scion, {"nesterov": False, "momentum": 0.8, "radius": 3.0}),
    (Scion, scion, {"nesterov": False, "momentum": 0.8, "radius": 3.0, "constrained": False}),
    (PolarGrad, polar_grad, {"nesterov": True, "momentum": 0.8, "weight_decay": 0.3}),
    (PolarGrad, polar_grad, {"nesterov": False}),
    (MuonHyperball, hyperball, {"momentum": 0.8}),
    (MuonHyperball, hyperball, {"nesterov": False}),
    (MarsMuon, muon, MARS),
    (MarsMuon, muon, {"nesterov": True, "gamma": 0.2}, (0.05, 0.1, 0.15, 0.2)),
    (MarsMuon, muon, {**MARS, "momentum": 0.8, "weight_decay": 0.3}, (0.01,)),
    (MarsMuon, muon, {**MARS, "momentum": 0.8, "weight_decay": 0.1, "l2": True}, (0.05, 0.1, 0.15, 0.2)),
]


def followed(row, p, lr, **more):
    """Steps of a row's optimizer, with the weight and state that its formula has."""
    cls, formula, settings, sizes = (*row, (1.0,))[:4]
    gradients = [gradient(p, step) * sizes[step % len(sizes)] for step in range(STEPS)]
    settings = {"lr": lr, **settings, **more}
    expected = reference(p, gradients, formula, **settings)
    ours = {key: value for key, value in settings.items() if key != "l2"}
    if cls is Scion:
        del ours["nesterov"]
    if settings.get("l2"):
        ours["use_decoupled_weight_decay"] = False
    opt = cls([p], **{"fp32_matmul_prec": "highest", **ours})
    for g in gradients:
        p.grad = g.clone()
        opt.step()
        assert torch.equal(p.grad, g)
    return opt, *expected


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0].__name__}-{row[2]}")
def test_twenty_steps_follow_the_formula(row, shape):
    for dtype, tolerance in TOLERANCE.items():
        if row[1] is adaptive:  # whose statistics are fp32 whatever the parameter
            tolerance = max(tolerance, 1e-6)
            if dtype == torch.float32 and "beta2" not in row[2]:
                continue  # where rounding is divided by itself
        p = matrix(*shape, dtype=dtype)
        opt, expected, kept = followed(row, p, 0.01)
        assert_close(p.detach(), expected, tolerance)
        for key, value in opt.state[p].items():
            if isinstance(kept.get(key), torch.Tensor) and key != "previous_gradient":
                torch.testing.assert_close(value.double(), kept[key].reshape(value.shape), rtol=1e-4, atol=1e-6)
        assert opt.state[p]["momentum_buffer"].dtype == dtype


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "row",
    [
        (TensorParallelMuon, muon, {"momentum": 0.8, "weight_decay": 0.0}),
        *(
            (TensorParallelAdaptiveMuon, adaptive, {**x, **LARGE_EPS, "weight_decay": 0.0})
            for x in (ADAMUON, NORMUON, NAMO)
        ),
        (Scion, scion, {"nesterov": False, "momentum": 0.9, "radius": 3.0}),
        (PolarGrad, polar_grad, {"nesterov": False, "momentum": 0.8, "weight_decay": 0.0}),
        (MuonHyperball, hyperball, {}),
        (MarsMuon, muon, {**MARS, "momentum": 0.8, "weight_decay": 0.0}, (0.05, 0.1, 0.15, 0.2)),
    ],
    ids=lambda row: f"{row[0].__name__}-{row[2].get('moment2_method', '')}",
)
def test_bf16_parameters_follow_it_as_far_as_they_can(row, shape):
    """Without decay, which bf16 loses where it is less than a rounding; constrained steps of Scion round twice."""
    p = matrix(*shape, dtype=torch.bfloat16)
    before = p.detach().double()
    lr = {Scion: 0.1, TensorParallelAdaptiveMuon: 0.05, MuonHyperball: 0.05}.get(row[0], 0.02)
    opt, expected, _ = followed(row, p, lr)
    assert_close_in_bf16(p.detach(), before, expected, roundings=STEPS * (1 + (row[0] is Scion)))
    assert opt.state[p]["momentum_buffer"].dtype == torch.bfloat16


# The methods of emerging-optimizers 0.3.0 follow the same rules; its adamuon is not aligned. It keeps statistics in the
# dtype of the parameter. The shapes are nearly square, so that both take the standard form of Newton-Schulz: adamuon
# makes the rounding of small entries as large as that of others.
OF_THEIRS = [
    (TensorParallelMuon, theirs.Muon, {"scale_mode": "spectral", "nesterov": True, "weight_decay": 0.1}, {}, {}),
    (TensorParallelMuon, theirs.Muon, {"scale_mode": "unit_rms_norm", "nesterov": False, "weight_decay": 0.1}, {}, {}),
    (TensorParallelMuon, theirs.Muon, {"scale_mode": "shape_scaling", "nesterov": True, "weight_decay": 0.1}, {}, {}),
    *(
        (
            TensorParallelAdaptiveMuon,
            AdaptiveMuon,
            {**x, "nesterov": x is NAMO, "beta2": 0.95, "eps": eps},
            {"align_rms": False} if x is ADAMUON else {},
            {},
        )
        for x in (ADAMUON, NORMUON, NAMO)
        for eps in (1e-8, 1e-2)
    ),
    (Scion, theirs.Scion, {}, {"radius": 3.0}, {"spectral_radius": 3.0}),
    *((PolarGrad, theirs.PolarGrad, {"nesterov": x, "weight_decay": 0.1}, {}, {}) for x in (True, False)),
    *((MuonHyperball, theirs.MuonHyperball, {"nesterov": x}, {}, {"weight_decay": 0.0}) for x in (True, False)),
]


@pytest.mark.parametrize(("cls", "other", "same", "own", "others"), OF_THEIRS, ids=str)
def test_steps_are_those_of_emerging_optimizers(cls, other, same, own, others):
    same = {"momentum": 0.9, "lr": 0.02, "fp32_matmul_prec": "highest", **same}
    for shape in ((9, 8), (8, 9), (8, 8)):
        p, q = matrix(*shape), matrix(*shape)
        if cls is TensorParallelAdaptiveMuon:
            others = {"weight_decay": 0.01}
        ours = cls([p], **same, **own)
        run(ours, p, range(STEPS))
        of_theirs = other([q], **same, **others)
        run(of_theirs, q, range(STEPS))
        assert_close(p.detach(), q.detach().double(), 1e-5)
        for key, x in ours.state[p].items():
            if key in of_theirs.state[q] and key != "radius":
                torch.testing.assert_close(x, of_theirs.state[q][key].view(x.shape), rtol=1e-4, atol=1e-6)
