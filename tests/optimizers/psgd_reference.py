"""PSGD-Kron written out for one matrix, with random numbers that somebody else draws."""

import torch


def largest_singular_value(x, probes, scale):
    scale = max(scale, 1e-8)
    x = x / scale
    row = x[x.norm(dim=1).argmax()]
    rows = torch.stack([row + torch.sign(row @ probe) * probe for probe in probes])
    for _ in range(2):
        rows = rows @ x
        rows = rows / (rows.norm(dim=1, keepdim=True) + 1e-8)
        rows = rows @ x
    return scale * rows.norm(dim=1).max()


def turned(q, probes):
    turn = q.T - q
    turn = turn / max(largest_singular_value(turn, probes, turn.abs().max()), 1e-8)
    slope, curvature = torch.trace(turn @ q), torch.trace(turn @ turn @ q)
    angle = min(max(-slope / curvature, 0.0), 0.125) if curvature < 0 else 0.125
    return (torch.eye(len(q), dtype=q.dtype) + angle * turn + angle**2 / 2 * turn @ turn) @ q


def as_matrix(q):
    return q if q.ndim == 2 else q.diag()


def whitened(qs, x):
    left, right = map(as_matrix, qs)
    return left.T @ left @ x @ right.T @ right


def steps_of(p, gradients, draw, settings):
    """The weight and ``(momentum, [Q_L, Q_R], bounds)``; ``draw(step)`` has normal numbers."""
    s, (rows, cols) = settings, p.shape
    m, bounds = torch.zeros_like(p), [0.0, 0.0]
    start = [torch.full((n,), s["precond_init_scale"], dtype=p.dtype) for n in (rows, cols)]
    qs = [q.diag() if len(q) <= s["max_dim"] else q for q in start]
    for t, g in enumerate(gradients):
        m = s["momentum"] * m + (1 - s["momentum"]) * g
        if t % s["precondition_frequency"] == 0:
            noise, *probes = draw(t + 1)
            seen = whitened(qs, m + (s["damping_noise_scale"] + 1e-7 * m.abs()) * noise)
            rate = max(s["precond_lr"] / (1 + t / s["precond_decay_steps"]) ** 0.5, s["min_precond_lr"])
            new = []
            for side, q in enumerate(qs):
                covariance = seen @ seen.T if side == 0 else seen.T @ seen
                target = rows * cols / len(q)
                if q.ndim == 1:
                    covariance = covariance.diagonal()
                    norm = covariance.max()
                else:
                    norm = largest_singular_value(covariance, probes[2 * side], covariance.diagonal().max())
                now = norm + target
                bounds[side] = max(s["beta_lip"] * bounds[side] + (1 - s["beta_lip"]) * now, now)
                share = rate / bounds[side]
                if q.ndim == 1:
                    new.append(q - share * (covariance * q - target * q))
                else:
                    new.append(turned(q - share * (covariance @ q - target * q), probes[2 * side + 1]))
            mean = (new[0].abs().max() * new[1].abs().max()) ** 0.5
            qs = [q * mean / q.abs().max() for q in new]
        update = whitened(qs, m)
        if s["max_update_rms"]:
            update = update * min(1.0, s["max_update_rms"] / update.square().mean().sqrt())
        p = (1 - s["lr"] * s["weight_decay"]) * p - s["lr"] * update
    return p, (m, qs, bounds)
