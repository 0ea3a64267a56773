"""Muon's steps written out, for the base class with users' functions and for Muon with Newton-Schulz."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_eopt import OrthogonalizedOptimizer, TensorParallelMuon
from megatron_eopt.orthogonalize import get_coefficients
from tests.plain.made import newton_schulz
from tests.plain.made import run as run

LR, BETA, DECAY = 0.1, 0.8, 0.3
SHAPES = [(6, 4), (12, 4), (3, 5)]
METHODS = ["decoupled", "l2", "independent", "palm"]


def parameters(shapes=SHAPES, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(shapes=SHAPES, steps=3, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(steps)]


def polar(x):
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def scale(rows, cols):
    return max(1.0, rows / cols) ** 0.5


def iterated(x, steps=5, kind="quintic"):
    """Newton-Schulz on one matrix, in its dtype."""
    return newton_schulz(x, get_coefficients(kind, steps))


def spectral(rows, cols):
    return max(rows, cols) ** 0.5


def decayed(p, g, method):
    """A parameter and a gradient after the weight decay."""
    if method == "l2":
        return p, g + DECAY * p
    return p - {"decoupled": LR * DECAY, "independent": DECAY, "palm": LR**2 * DECAY}[method] * p, g


def averaged(m, g, nesterov):
    """The momentum after a gradient, and the update."""
    m = BETA * m + (1 - BETA) * g
    return m, (1 - BETA) * g + BETA * m if nesterov else m


def reference(params, steps, settings_of, update):
    """Parameters after steps whose (nesterov, kind of decay) are ``settings_of(step, index)``."""
    ps, ms = [p.detach().clone() for p in params], [torch.zeros_like(p) for p in params]
    for step, of_step in enumerate(steps):
        for i, g in enumerate(of_step):
            nesterov, method = settings_of(step, i)
            ps[i], g = decayed(ps[i], g, method)
            ms[i], u = averaged(ms[i], g, nesterov)
            ps[i] = ps[i] - LR * update(u, i)
    return ps


def assert_near(params, expected, tolerance=1e-6):
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=tolerance, atol=tolerance)


def assert_equal(params, expected):
    assert all(torch.equal(p, q) for p, q in zip(params, expected, strict=True))


class Kind(NamedTuple):
    """A class, its names of two settings, the others that it is built with here, and its update."""

    cls: type
    momentum: str
    nesterov: str
    settings: dict
    update: Callable

    def made(self, params, cls=None, **changed):
        given = {self.momentum: BETA, self.nesterov: False, **self.settings, **changed}
        return (cls or self.cls)(params, **given)


# fp64 is not rounded to bf16, and without the precision of Newton-Schulz nothing but the rule is compared
_BOTH = {"lr": LR, "weight_decay": DECAY, "fp32_matmul_prec": "highest"}
BASE = Kind(
    OrthogonalizedOptimizer,
    "momentum_beta",
    "use_nesterov",
    {
        **_BOTH,
        **{"use_decoupled_weight_decay": True, "split_qkv": False, "is_qkv_fn": None, "qkv_split_shapes": None},
        **{"orthogonalize_fn": polar, "scale_factor_fn": scale},
    },
    lambda u, index: scale(*u.shape[:2]) * polar(u),
)
MUON = Kind(TensorParallelMuon, "momentum", "nesterov", _BOTH, lambda u, index: spectral(*u.shape) * iterated(u))
KINDS = {"base": BASE, "muon": MUON}
