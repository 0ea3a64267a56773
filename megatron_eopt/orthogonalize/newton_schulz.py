"""Newton-Schulz iteration: settings, and what is decided from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_eopt.kernels.choice import products_for
from megatron_eopt.kernels.precision import (
    MatmulPrecision,
    gram_dtype,
    product_dtype,
)
from megatron_eopt.kernels.products import Products
from megatron_eopt.orthogonalize import forms
from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.orthogonalize.coefficients import Coefficients, CoefficientType, get_coefficients, set_length
from megatron_eopt.orthogonalize.forms import Iteration, Preset, Restarts

Form = Literal["auto", "standard", "gram"]

MAX_BYTES = 2**30  # most memory for the work on a chunk of a stack, unless a single matrix needs more
REUSED_BYTES = 2**22  # whose memory a CPU takes again: for what is larger it may ask the system each time


@dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
    """Settings of the iteration: arguments of :func:`newton_schulz`.

    Raises ``ValueError`` for a set, number of steps or precision that does not exist.
    """

    steps: int = 5
    coefficient_type: CoefficientType = "quintic"
    fp32_matmul_prec: MatmulPrecision = "medium"
    max_bytes: int = MAX_BYTES
    products: Products | str | None = None  # or the name of a kernel

    def __post_init__(self) -> None:
        check_choice("fp32_matmul_prec", self.fp32_matmul_prec, get_args(MatmulPrecision))
        if not isinstance(self.coefficient_type, str):
            whole = get_coefficients(self.coefficient_type, set_length(self.coefficient_type))
            object.__setattr__(self, "coefficient_type", whole)  # a tuple, which is hashable
        _ = self.schedule

    @cached_property
    def schedule(self) -> tuple[Coefficients, ...]:
        """One ``(a, b, c)`` per step."""
        return get_coefficients(self.coefficient_type, self.steps)

    @property
    def name(self) -> str:
        """The iteration in words, equal for equal steps and coefficients."""
        known = self.coefficient_type if isinstance(self.coefficient_type, str) else str(self.schedule)
        return f"{self.steps} Newton-Schulz steps of {known}"

    @cached_property
    def restarts(self) -> Restarts | None:
        """Restarts of the Gram form, if a table has them."""
        return forms.restarts_for(self.coefficient_type, self.steps, self.fp32_matmul_prec)

    def sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which matrices and factors are exchanged.

        They are rounded to it wherever they are orthogonalized, so exchanging changes no bit.
        """
        product = product_dtype(dtype, self.fp32_matmul_prec)
        return product if product.itemsize <= dtype.itemsize else dtype

    def compile(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        form: Form = "auto",
    ) -> Iteration:
        """Decide the iteration for matrices, or stacks, of one shape.

        The form ``auto`` is the cheaper safe one; ``gram``, for matrices that several ranks hold, iterates in fp32
        where ``auto`` would take the standard form, and raises ``ValueError`` without restarts. Entries that are not
        finite stay visible in the result: with zero instead, a matrix would silently stop training.
        """
        if form == "gram" and self.restarts is None:
            raise ValueError(
                f"no table has restarts of {self.coefficient_type!r} in {self.steps} steps, without which the Gram "
                "form is not safe: take the standard form"
            )
        return _compiled(self, self.restarts, form, shape[-2], shape[-1], dtype, torch.device(device), True)

    def __call__(self, x: Tensor) -> Tensor:
        """The orthogonal factors of one or several matrices."""
        return self.compile(x.shape, x.dtype, x.device)(x)


def newton_schulz(
    x: Tensor,
    steps: int = 5,
    coefficient_type: CoefficientType = "quintic",
    *,
    fp32_matmul_prec: MatmulPrecision = "highest",
    form: Form = "auto",
    preset: Preset = "default",
    restarts: Sequence[int] | None = None,
    max_bytes: int = MAX_BYTES,
    propagate_nan: bool = False,
    products: Products | str | None = None,
) -> Tensor:
    """Approximate orthogonal factor ``U p(S) V^T`` of ``x``.

    With ``x = U S V^T``, ``p(S)`` is near 1. Each step is ``X <- a X + (b A + c A^2) X``, ``A = X X^T``, from
    ``X = x / ||x||_F`` with the short side first (Jordan et al., 2024; https://kellerjordan.github.io/posts/muon/). The
    Gram form computes the same on the short side (:func:`~megatron_eopt.orthogonalize.forms.iterate_gram`). The norm of
    the input does not matter: there is no epsilon, which would stop layers whose gradients were clipped hard. A matrix
    that is zero, or has entries that are not finite, gives zero, without effect on the others of a stack.

    Args:
        x: (rows x cols) or (n x rows x cols), of any floating dtype; may be empty.
        steps: number of steps; :func:`~megatron_eopt.orthogonalize.coefficients.get_coefficients` tells what a set
            serves.
        coefficient_type: name of a coefficient set, or a list of ``(a, b, c)``.
        fp32_matmul_prec: precision of the products: ``medium`` (or ``low``) bf16 with fp32 accumulation, in the Gram
            form (on a GPU only) fp16; ``high`` TF32 where the device has it; ``highest`` fp32. fp64 stays fp64.
        form: ``standard``, ``gram``, or ``auto``: the cheaper of the two. The Gram form needs restarts, from a table or
            from ``restarts``.
        preset: ``fast`` takes the set cubic5 in place of ``steps`` and ``coefficient_type``; ``accurate`` restarts the
            Gram form once more than ``default``.
        restarts: steps, counted from 1, after which the Gram form computes its Gram matrix anew, in place of those of
            the table and the preset; ascending, below the number of steps.
        max_bytes: most memory for the chunk of a stack that is worked on at once; one matrix may take more.
        propagate_nan: return NaN instead of zero for a matrix with entries that are not finite.
        products: computes the symmetric products; hashable, or the name of a kernel. By default that of
            :func:`~megatron_eopt.kernels.choice.rule`.

    Returns:
        A new tensor of the shape and dtype of ``x``. Nothing waits for the device.

    Raises:
        ValueError: if ``x`` is neither 2-D nor 3-D, for an unknown schedule, precision or form, and for a Gram form
            that is not safe for the schedule or the precision.
    """
    x = x.detach()  # memory is reused, which a graph of gradients would need
    if x.ndim not in (2, 3):
        raise ValueError(f"expected a matrix or a stack of matrices (2-D or 3-D), got shape {tuple(x.shape)}")
    check_choice("form", form, get_args(Form))
    fast_type, fast_steps, extra = forms.PRESETS[preset]
    if preset == "fast":
        coefficient_type = fast_type
        steps = fast_steps
    settings = NewtonSchulz(
        steps=steps,
        coefficient_type=coefficient_type,
        fp32_matmul_prec=fp32_matmul_prec,
        max_bytes=max_bytes,
        products=products,
    )
    if restarts is None:
        restarts = forms.restarts_for(coefficient_type, steps, fp32_matmul_prec, extra)
    elif all(isinstance(step, int) and before < step < steps for before, step in pairwise([0, *restarts])):
        restarts = tuple(restarts)
    else:
        raise ValueError(f"restarts are ascending integers between 1 and {steps - 1}, got {list(restarts)}")
    dtype = product_dtype(x.dtype, fp32_matmul_prec)
    if form == "gram" and (restarts is None or gram_dtype(dtype, x.device) is None):
        raise ValueError(
            f"the Gram form is not safe with {coefficient_type!r} in {steps} steps and {dtype} products on "
            f"{x.device.type!r}: take the standard form, precision 'high' or 'highest', or give its restarts"
        )
    return _compiled(settings, restarts, form, x.size(-2), x.size(-1), x.dtype, x.device, propagate_nan)(x)


@lru_cache(maxsize=1024)
def _compiled(
    settings: NewtonSchulz,
    restarts: Restarts | None,
    form: Form,
    height: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    propagate_nan: bool,
) -> Iteration:
    """``restarts`` are None where the Gram form is unsafe."""
    schedule = settings.schedule
    precision = settings.fp32_matmul_prec
    rows, cols = sorted((height, width))
    used = product_dtype(dtype, precision)
    of_gram = gram_dtype(used, device)
    if form == "auto" and restarts is not None and of_gram is not None:
        share = products_for(settings.products, device, of_gram, precision).share(rows)
        standard = forms.standard_flops(rows, cols, schedule, share)
        form = "gram" if forms.gram_flops(rows, cols, schedule, restarts, share) < standard else "standard"
    if form == "gram":
        used = of_gram or torch.float32
    else:
        restarts = None
    on_cpu = device.type == "cpu"
    most = min(settings.max_bytes, REUSED_BYTES) if on_cpu else settings.max_bytes
    of_one = forms.iteration_bytes(rows, cols, restarts, used.itemsize)
    return Iteration(
        schedule=schedule,
        restarts=restarts,
        dtype=used,
        products=products_for(settings.products, device, used, precision),
        precision=precision if used in (torch.float16, torch.float32) else None,
        transposed=height > width,
        chunk=max(1, most // max(1, of_one)),
        # from this short side on, a CPU multiplies matrices faster (by 5 to 15 %) one by one than stacked
        one_by_one=on_cpu and used in (torch.float32, torch.bfloat16) and rows >= 256,
        propagate_nan=propagate_nan,
    )
