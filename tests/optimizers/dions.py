"""Dion's formulas written out, and small parameters for it."""

import torch

from megatron_eopt.orthogonalize.spectral import start_basis

SHAPES = [(24, 16), (10, 40), (18, 18)]


def reference(w, gradients, lr, momentum=0.95, weight_decay=0.01, rank=4):
    """Algorithm 1 of arXiv 2504.05295 with rank-r power iteration, in fp64."""
    W, M, Q = w.detach().double().clone(), 0.0, start_basis(w.shape[1], rank).double()
    m, n = W.shape
    for G in gradients:
        B = M + G.double()
        P = torch.linalg.qr(B @ Q).Q
        R = B.T @ P
        M = B - (1 - momentum) * P @ R.T
        Q = R / R.norm(dim=0)
        W = W - lr * weight_decay * W - lr * (m / n) ** 0.5 * P @ Q.T
    return W, M, Q
