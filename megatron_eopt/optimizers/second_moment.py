"""What the adaptive variants of Muon make of an orthogonal factor: one matrix, or one rank's piece of it.

``O`` is the orthogonal factor, in any floating dtype; statistics and what is computed with them are fp32. ``accepted``
is a flag on the device: where it is False, the second moment stays as it is, bit for bit.

- AdaMuon: Si, Zhang and Shen, arXiv 2507.11005.
- NorMuon: Li et al., arXiv 2510.05491.
- NAMO: arXiv 2602.17080.
"""

from math import sqrt
from typing import Literal

import torch
from torch import Tensor

Moment2Method = Literal["adamuon", "normuon", "namo"]

_LARGEST = torch.finfo(torch.float32).max


def average(moment: Tensor, value: Tensor, beta2: float, accepted: Tensor) -> None:
    """``v += (1 - beta2) (value - v)`` where ``accepted``, in place; values beyond fp32 count as its largest number."""
    value = value.clamp(max=_LARGEST).to(moment.dtype)  # an infinity would stay in v for ever
    moment.lerp_(torch.where(accepted, value, moment), 1 - beta2)


def adamuon(factor: Tensor, moment: Tensor, beta2: float, eps: float, accepted: Tensor) -> Tensor:
    """AdaMuon before its alignment: ``v <- EMA(O^2)``, ``U = O / (sqrt(v) + eps)``, entry by entry."""
    wide = factor.float()
    average(moment, wide.square(), beta2, accepted)
    return wide / moment.sqrt().add_(eps)


def normuon_steps(means: Tensor, moment: Tensor, beta2: float, eps: float, accepted: Tensor) -> Tensor:
    """NorMuon: ``v <- EMA(means)``, and by what it multiplies ``O``, ``rsqrt(max(v, eps))``.

    Args:
        means: of the squares of ``O`` along the short dimension of the global matrix, one for each index of the long.
        moment: ``v``, likewise.
        beta2: of the average.
        eps: the least that is divided by; it is compared to mean squares, not to their roots.
        accepted: see above.
    """
    average(moment, means, beta2, accepted)
    return moment.clamp(min=eps).rsqrt()


def namo_ratio(gradient: Tensor, update: Tensor, moment: Tensor, beta2: float, eps: float, accepted: Tensor) -> Tensor:
    """NAMO: ``v <- EMA(||G||^2)``, and by what it multiplies ``O``, ``||g'|| / (sqrt(v) + eps)``.

    Args:
        gradient: ``||G||^2`` of the whole gradient.
        update: ``||g'||^2`` of what is orthogonalized, the momentum after the look-ahead.
        moment: ``v``.
        beta2: of the average.
        eps: added to the norm.
        accepted: see above.
    """
    average(moment, gradient, beta2, accepted)
    return update.sqrt() / (moment.sqrt() + eps)


def alignment(factor: Tensor, update: Tensor) -> Tensor:
    """``||O|| / ||U||`` from the squares of the norms of whole matrices; 0 where ``U`` is zero."""
    return torch.where(update > 0, factor / update, 0.0).sqrt()


def predicted_first_rms(
    muon: float, scale: float, method: Moment2Method, align_rms: bool, momentum: float, nesterov: bool, beta2: float
) -> float:
    """RMS of the entries of the first update of a matrix of full rank, before the learning rate.

    The first second moment is ``1 - beta2`` times its first value. So the entries of an AdaMuon update that is not
    aligned are ``+-scale / sqrt(1 - beta2)``, whatever the shape. The first ``g'`` of NAMO is ``(1 - b) G``, with
    Nesterov's look-ahead ``(1 - b) (1 + b) G``, so it multiplies ``O`` by that over ``sqrt(1 - beta2)``. What is
    aligned has the size of Muon's update.

    Args:
        muon: the same of Muon (:func:`~megatron_eopt.orthogonalize.scale.predicted_update_rms`).
        scale: what Muon multiplies the orthogonal factor by.
        method: adamuon, normuon or namo.
        align_rms: whether AdaMuon is aligned.
        momentum: ``b``.
        nesterov: whether to look ahead.
        beta2: of the second moment.
    """
    if method == "namo":
        return muon * (1 - momentum) * (1 + momentum if nesterov else 1) / sqrt(1 - beta2)
    return scale / sqrt(1 - beta2) if method == "adamuon" and not align_rms else muon
