"""The settings of the iteration, together: what an optimizer, a plan and a scheme pass on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.coefficients import Coefficients, get_coefficients
from megatron_eopt.orthogonalize.form import gram_dtype
from megatron_eopt.orthogonalize.newton_schulz import MAX_BYTES, newton_schulz
from megatron_eopt.orthogonalize.precision import MatmulPrecision, product_dtype, validate_matmul_precision
from megatron_eopt.orthogonalize.restarts import Restarts, restarts_for
from megatron_eopt.orthogonalize.symmetric import Products, default_products


@dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
    """Settings of the iteration, checked when they are made.

    Attributes:
        steps: number of steps.
        coefficient_type: name of a coefficient set, or a list of ``(a, b, c)``.
        fp32_matmul_prec: precision of the products.
        max_bytes: stacks are worked on in parts whose work takes at most so much memory.
        products: computes the symmetric products; None for what suits the device.

    Raises:
        ValueError: for a set, a number of steps or a precision that does not exist.
    """

    steps: int = 5
    coefficient_type: str | Sequence[Coefficients] = "quintic"
    fp32_matmul_prec: MatmulPrecision = "medium"
    max_bytes: int = MAX_BYTES
    products: Products | None = None

    def __post_init__(self) -> None:
        validate_matmul_precision(self.fp32_matmul_prec)
        _ = self.schedule

    @cached_property
    def schedule(self) -> tuple[Coefficients, ...]:
        """One ``(a, b, c)`` per step."""
        return get_coefficients(self.coefficient_type, self.steps)

    @property
    def name(self) -> str:
        """The iteration in words, which are equal for equal steps and coefficients alone."""
        known = self.coefficient_type if isinstance(self.coefficient_type, str) else str(self.schedule)
        return f"{self.steps} Newton-Schulz steps of {known}"

    @cached_property
    def restarts(self) -> Restarts | None:
        """Restarts of the Gram form; None for a schedule that no table has, which the Gram form does not serve."""
        return restarts_for(self.coefficient_type, self.steps, simulate=False)

    def gram_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of the Gram form of a piece: as in one process, but fp32 where that would take the standard one."""
        return gram_dtype(product_dtype(x.dtype, self.fp32_matmul_prec), x.device) or torch.float32

    def products_for(self, device: torch.device, dtype: torch.dtype) -> Products:
        """What computes symmetric products in ``dtype``: those that are set, else what suits the device."""
        return self.products or default_products(device, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """The orthogonal factor of a matrix, or of each in a stack.

        What is not finite stays visible: a matrix that got zero instead would stand still in silence.
        """
        return newton_schulz(
            x,
            self.steps,
            self.coefficient_type,
            fp32_matmul_prec=self.fp32_matmul_prec,
            max_bytes=self.max_bytes,
            propagate_nan=True,
            products=self.products,
        )
