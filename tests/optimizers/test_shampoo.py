"""Shampoo and KL-Shampoo take the steps of their papers, by either way to a basis."""

import copy
import math

import pytest
import torch

from megatron_eopt import KLShampoo, Shampoo
from megatron_eopt.matrices import experts
from tests.optimizers.several import gradients_of, parameters

SHAPES = [(6, 4), (4, 6), (5, 5)]
SETTINGS = {"lr": 0.05, "momentum": 0.9, "shampoo_beta": 0.8, "weight_decay": 0.1}
BOTH = pytest.mark.parametrize("cls", [Shampoo, KLShampoo])


def basis_of(F, before, method):
    """The eigenvectors, the largest first; or one orthogonal iteration of sorted columns towards them."""
    if before is None or method == "eigh":
        return torch.linalg.eigh(F)[1].flip(1)
    order = torch.argsort((before.T @ F @ before).diagonal(), descending=True)
    return torch.linalg.qr(F @ before[:, order])[0]


def root(F, Q, order, damping):
    """``Q (diag(Q^T F Q) + damping |F|)^(-1/order) Q^T``."""
    values = (Q.T @ F @ Q).diagonal() + damping * F.abs().sum(1).max()
    return Q @ values.pow(-1 / order).diag() @ Q.T


def reference_steps(
    p, gradients, kl, lr, momentum, shampoo_beta, weight_decay, every=1, damping=1e-6, method="qr", **settings
):
    """Shampoo (arXiv 1802.09568, averaged) or KL-Shampoo (2509.03378) of one matrix in fp64."""
    p = p.detach().double()
    (m, n), M, F, Q, P = p.shape, torch.zeros_like(p), {}, {}, {}
    dims = [dim for dim in (0, 1) if p.shape[dim] <= settings.get("max_dim", 10000)]
    scale = math.sqrt(max(m, n)) / ((math.sqrt(m) + math.sqrt(n)) if kl else 1)
    scale = settings.get("scale", scale)
    radius = p.norm()
    for t, g in enumerate((g.double() for g in gradients), 1):
        if t > 1 or not kl:
            M = momentum * M + (1 - momentum) * g
        size = g.square().mean().sqrt()
        inverse = {dim: P[dim] @ P[dim] for dim in P} or {dim: torch.eye(p.shape[dim]).double() / size for dim in dims}
        for dim in dims:
            h = g if dim == 0 else g.T
            middle = inverse[1 - dim] if len(dims) == 2 else torch.eye(h.shape[1]).double()
            new = h @ middle @ h.T / h.shape[1] if kl else h @ h.T
            total = sum(shampoo_beta**i for i in range(t))
            F[dim] = new if t == 1 else ((total - 1) * F[dim] + new) / total
        if (t - 1) % every == 0:
            Q = {dim: basis_of(F[dim], Q.get(dim), method) for dim in dims}
        P = {dim: root(F[dim], Q[dim], 2 if kl or len(dims) == 1 else 4, damping) for dim in dims}
        if t > 1 or not kl:
            left, right = (P.get(dim, torch.eye(p.shape[dim]).double()) for dim in (0, 1))
            update = scale * left @ M @ right
            if settings.get("weight_norm") == "hold":
                p = p * (1 - lr * weight_decay) - lr * radius * update / update.norm()
                p *= radius / p.norm()
            else:
                p = p * (1 - lr * weight_decay) - lr * update
    return p


VARIANTS = [
    ({}, {}),
    ({"basis_method": "eigh"}, {"method": "eigh"}),
    ({"precondition_frequency": 3}, {"every": 3}),
    ({"max_dim": 5, "basis_method": "eigh"}, {"max_dim": 5, "method": "eigh"}),
    ({"scale_mode": "none", "damping": 1e-3}, {"scale": 1.0}),
    ({"weight_norm": "hold"}, {"weight_norm": "hold"}),
]


@BOTH
@pytest.mark.parametrize(("settings", "of_reference"), VARIANTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-3)], ids=["fp64", "fp32"])
def test_twenty_steps_follow_the_formula(cls, settings, of_reference, dtype, tolerance):
    # of a side that few gradients span so far fp32 leaves little of what lies below the damping
    settings = {**SETTINGS, **({"damping": 1e-3} if dtype == torch.float32 else {}), **settings}
    of_reference = {"damping": settings.get("damping", 1e-6), **of_reference}
    # where one gradient does not span a side, rounding picks the basis in which the iteration begins
    params = parameters(SHAPES if settings.get("basis_method") == "eigh" else [(5, 5), (8, 8)], dtype)
    before, optimizer = copy.deepcopy(params), cls(params, **settings)
    gradients = gradients_of(optimizer, params, range(20))
    for p, first, seen in zip(params, before, gradients, strict=True):
        expected = reference_steps(first, seen, cls is KLShampoo, **{**SETTINGS, **of_reference})
        assert (expected - first.detach().double()).norm() > 0.1
        torch.testing.assert_close(p.detach().double(), expected, rtol=tolerance, atol=tolerance)


def stepped(optimizer, parameters, gradients):
    """How far the last step moved each parameter."""
    for gradient in gradients:
        before = [p.detach().clone() for p in parameters]
        for p in parameters:
            p.grad = gradient.clone()
        optimizer.step()
    return [before - p.detach() for before, p in zip(before, parameters, strict=True)]


@BOTH
def test_a_matrix_that_begins_late_moves_as_one_that_begins_then(cls):
    generator = torch.Generator().manual_seed(0)
    of_two = torch.randn(40, 2, 6, 6, generator=generator, dtype=torch.float64) * 1e-3
    of_two[:10, 1] = 0  # an expert that no token reaches
    stack = torch.nn.Parameter(torch.zeros(2, 6, 6, dtype=torch.float64))
    stack.logical_matrices = experts(2)
    alone = torch.nn.Parameter(torch.zeros(6, 6, dtype=torch.float64))
    settings = {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "scale_mode": "none", "damping": 1e-3}
    late = cls([stack], **settings)
    stepped(late, [stack], of_two[:10])
    assert torch.equal(stack[1], torch.zeros(6, 6, dtype=torch.float64))
    own = cls([alone], **settings)
    for t in range(10, 40):
        (of_late,) = stepped(late, [stack], of_two[t : t + 1])
        (of_own,) = stepped(own, [alone], of_two[t : t + 1, 1])
        # averages of one that begins then are corrected for their start, and bases begin elsewhere
        assert of_late[1].norm() < 3 * of_own.norm() + 1e-12
    assert of_late[1].norm() > 0.5 * of_own.norm()
