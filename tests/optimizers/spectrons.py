"""Small parameters for Spectron, their gradients, and its formulas written out."""

import torch

from megatron_eopt.optimizers.spectron import Spectron
from megatron_eopt.orthogonalize.spectral import start_vector
from tests.optimizers import several
from tests.optimizers.field import factor

SHAPES = [(24, 16), (10, 40), (18, 18)]


def parameters(shapes=SHAPES, dtype=torch.float32):
    return several.parameters(shapes, dtype)


def spectron(params, **settings):
    return Spectron(params, **{"rank": 4, "fp32_matmul_prec": "highest", **settings})


def largest(W, u, steps):
    for _ in range(steps):
        v = W.T @ u
        v = v / v.norm()
        u = W @ v
        u = u / u.norm()
    return u @ W @ v, u


def factor_steps(factors, gradients, lr, beta=0.9, wd=0.01, power=1, us=None):
    """Spectron from the formulas, in fp64; ``gradients`` has for each step what maps A, B to theirs."""
    A, B = (X.double() for X in factors)
    mA, mB = torch.zeros_like(A), torch.zeros_like(B)
    uA, uB = us or (start_vector(len(X)).double() for X in (A, B))
    for of_step in gradients:
        gA, gB = of_step(A, B)
        A, B = A - lr * wd * A, B - lr * wd * B
        mA, mB = beta * mA + (1 - beta) * gA, beta * mB + (1 - beta) * gB
        (sA, uA), (sB, uB) = largest(A, uA, power), largest(B, uB, power)
        rate = lr / (sA + sB + 1)
        A, B = A - rate * factor(mA), B - rate * factor(mB)
    return A, B


def reference_steps(W, gradients, lr, rank=4, **settings):
    U, S, Vh = torch.linalg.svd(W.detach().double())
    factors = U[:, :rank] * S[:rank].sqrt(), Vh[:rank].T * S[:rank].sqrt()
    of_steps = [lambda A, B, G=G: (G.double() @ B, G.double().T @ A) for G in gradients]
    A, B = factor_steps(factors, of_steps, lr, us=(U[:, 0], Vh[0]), **settings)
    return A @ B.T
