"""The sides of matrices: a factor of the rows or of the columns, and its eigenbasis."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.kernels.choice import products_for
from megatron_eopt.step.nonfinite import Flag

KERNEL = "symmetric_products"
SIDE_KEYS = (("L", "Q_L"), ("R", "Q_R"))  # the state of the rows and of the columns, as Side has it


@dataclass(frozen=True)
class Side:
    """Stacked factors (n, length, length) of the rows or columns, and their eigenbases."""

    factor: Tensor
    basis: Tensor  # the eigenvectors are columns


def gram(x: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """``X X^T`` of a stack, by the kernel of the group."""
    kernel = settings[KERNEL] or "torch"
    return products_for(kernel, x.device, x.dtype, settings["fp32_matmul_prec"]).gram(x)


def follow(factor: Tensor, product: Tensor, weight: Tensor, where: Flag) -> None:
    """``F += weight (product - F)`` in place, where so."""
    followed = product if where is None else torch.where(where, product, factor)
    factor.lerp_(followed, weight.to(factor.dtype))
