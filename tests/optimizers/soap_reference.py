"""SOAP written out for one tensor, and settings that tests of it share."""

import torch

from megatron_eopt.orthogonalize.coefficients import get_coefficients

SHAPES = [(6, 4), (4, 6), (5, 5), (5,), (), (0, 3)]
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "shampoo_beta": 0.8, "weight_decay": 0.1, "precondition_frequency": 3}


def polar(x):
    """What 8 steps of Polar Express make of the singular values, times ``sqrt(max(1, rows / cols))``."""
    left, values, right = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for a, b, c in get_coefficients("polar_express", 8):
        values = a * values + b * values**3 + c * values**5
    return left @ values.diag() @ right * max(1, x.shape[0] / x.shape[1]) ** 0.5


def reference_steps(
    p,
    gradients,
    lr=3e-3,
    betas=(0.95, 0.95),
    shampoo_beta=0.95,
    eps=1e-8,
    weight_decay=0.01,
    precondition_frequency=10,
    basis_method="qr",
    basis_of="previous",
    sort_bases="before",
    use_kl_shampoo=False,
    max_dim=10000,
    nesterov=False,
    correct_bias=True,
    weight_decay_method="decoupled",
    weight_norm="none",
    orthogonalize=False,
):
    """The algorithm for one tensor in fp64, from arXiv 2409.11321 (algorithm 3) and, for KL, 2509.03378."""
    p = p.detach().double()
    m, v, moments = torch.zeros_like(p), torch.zeros_like(p), 0
    dims = [dim for dim, size in enumerate(p.shape) if p.ndim == 2 and p.numel() and size <= max_dim]
    F, Q, radius = {}, {}, p.norm()

    def rotate(x, back=False):
        left, right = (Q.get(dim, torch.eye(x.shape[dim], dtype=x.dtype)) for dim in (0, 1)) if Q else (None, None)
        return x if left is None else left @ x @ right.T if back else left.T @ x @ right

    def absorb(t, g):
        nonlocal v
        values = {dim: (Q[dim].T @ F[dim] @ Q[dim]).diag() for dim in Q}
        least = {dim: eps if basis_of == "current" else 1e-6 * x.max() for dim, x in values.items()}
        inverse = {dim: Q[dim] @ (x.clamp(min=least[dim]) ** -1).diag() @ Q[dim].T for dim, x in values.items()}
        if t == 1 and basis_of == "current":
            inverse = {dim: torch.eye(p.shape[dim], dtype=g.dtype) / eps for dim in dims}
        for dim in dims:
            h = g if dim == 0 else g.T
            middle = inverse.get(1 - dim, torch.eye(h.shape[1], dtype=h.dtype)) / h.shape[1] if use_kl_shampoo else None
            new = h @ h.T if middle is None else h @ middle @ h.T
            # an average of all gradients so far, newer ones heavier; uncorrected one of zeros, too, before them
            total = sum(shampoo_beta**i for i in range(t)) if correct_bias else 1 / (1 - shampoo_beta)
            F[dim] = ((total - 1) * F.get(dim, torch.zeros_like(new)) + new) / total
            if t == 1:
                Q[dim] = torch.linalg.eigh(F[dim])[1].flip(1)
            elif (t - 1) % precondition_frequency == 0:
                order = (Q[dim].T @ F[dim] @ Q[dim]).diag().argsort(descending=True)
                if sort_bases == "before":
                    Q[dim], v = Q[dim][:, order], v[order] if dim == 0 else v[:, order]
                eigh = basis_method == "eigh"
                Q[dim] = torch.linalg.eigh(F[dim])[1].flip(1) if eigh else torch.linalg.qr(F[dim] @ Q[dim])[0]
                if sort_bases == "after":
                    Q[dim] = Q[dim][:, (Q[dim].T @ F[dim] @ Q[dim]).diag().argsort(descending=True)]

    for t, g in enumerate(gradients, 1):
        g = g.double()
        if basis_of == "current" or t == 1:
            absorb(t, g)
        if not (dims and basis_of == "previous" and t == 1):
            moments += 1
            m = betas[0] * m + (1 - betas[0]) * g
            c = [1 - betas[0] ** moments, 1 - betas[1] ** moments, 1 - betas[0] ** (moments + 1)]
            c = c if correct_bias else [1, 1, 1]
            ahead = betas[0] * m / c[2] + (1 - betas[0]) * g / c[0] if nesterov else m / c[0]
            muon = orthogonalize and p.ndim == 2 and p.numel()
            v = betas[1] * v + (1 - betas[1]) * rotate(ahead if muon else g) ** 2
            n = rotate(ahead) / ((v / c[1]).sqrt() + eps)
            rate = {"decoupled": lr, "independent": 1, "palm": lr**2}[weight_decay_method]
            update, decayed = (
                polar(rotate(n, back=True)) if muon else rotate(n, back=True),
                p * (1 - rate * weight_decay),
            )
            if weight_norm == "hold" and p.ndim == 2 and p.numel():
                p = decayed - lr * radius * update / update.norm()
                p *= radius / p.norm()
            else:
                p = decayed - lr * update
        if basis_of == "previous" and t > 1:
            absorb(t, g)
    return p
