"""What rounding does to Newton-Schulz, in its standard and in its Gram form, simulated on known singular values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.forms import iterate_gram
from megatron_eopt.orthogonalize.precision import fp32_products

SPECTRA = ("gaussian", "cond_1e3", "cond_1e7", "rank_10", "spikes", "harmonic")

# Small matrices suffer more than large ones, whose rounding errors average out, and square Gaussian ones have very
# small singular values. One shape would not do: polar_express in 5 steps with restart (2,) has a Gaussian error of
# 0.003 on 128 x 256, but of 0.04 on 64 x 64, three times that of the standard form in bf16.
SHAPES = ((64, 64), (128, 256))


@dataclass(frozen=True)
class Rounded:
    """Products whose operands and results have ``dtype``, while sums are taken in fp32, as in tensor cores.

    They are simulated in fp32, because CPUs are slow in fp16.

    Attributes:
        dtype: fp16, bf16 or fp32.
        mirrored: whether the upper triangle of a symmetric product is a copy of the lower one. In Gram form fp16
            without it has up to 3 times the error.
    """

    dtype: torch.dtype
    mirrored: bool = True

    def share(self, rows: int) -> float:
        """See :class:`~megatron_eopt.orthogonalize.products.Products`."""
        return 1.0

    def gram(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See :class:`~megatron_eopt.orthogonalize.products.Products`."""
        x = self.round(x)
        return _into(out, self._symmetric(x @ x.mT))

    def addmm(self, c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float, out: Tensor | None = None) -> Tensor:
        """See :class:`~megatron_eopt.orthogonalize.products.Products`."""
        return _into(out, self._symmetric(beta * self.round(c) + alpha * (self.round(a) @ self.round(b))))

    def apply(self, q: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``Q X``, which is not symmetric."""
        return _into(out, self.round(self.round(q) @ self.round(x)))

    def round(self, x: Tensor) -> Tensor:
        """``x`` to the precision of ``dtype``, in fp32."""
        return x.to(self.dtype).float()

    def _symmetric(self, x: Tensor) -> Tensor:
        x = self.round(x)
        return x.tril() + x.tril(-1).mT if self.mirrored else x


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def simulated_error(
    schedule: Sequence[Coefficients],
    restarts: Sequence[int] | None,
    rounding: torch.dtype = torch.float16,
    *,
    shape: tuple[int, int] = (128, 256),
    seed: int = 0,
    mirrored: bool = True,
) -> dict[str, float]:
    """Relative error in Frobenius norm of the polynomial of a matrix, per spectrum, against ``U p(S) V^T`` in fp64.

    The spectra, of matrices with random singular vectors (the normalization to Frobenius norm 1 comes after):

    - ``gaussian``: independent normal entries.
    - ``cond_1e3``, ``cond_1e7``: singular values at equal ratios from 1 to 1e-3 and to 1e-7.
    - ``rank_10``: ten times 1, else 0. Rounding lifts the zeros, and no form can tell them from small values.
    - ``spikes``: four times 1, else 1e-3.
    - ``harmonic``: 1 / i.

    Args:
        schedule: one ``(a, b, c)`` per step.
        restarts: of the Gram form, see :func:`~megatron_eopt.orthogonalize.forms.iterate_gram`; None for the standard
            form.
        rounding: dtype that the matrix and every product are rounded to.
        shape: rows and columns of the matrices, ``rows <= cols``.
        seed: of the singular vectors and of the Gaussian matrix.
        mirrored: see :class:`Rounded`.

    Returns:
        Name of the spectrum to error; infinity where the result is not finite.
    """
    u, s, vt = _samples(*shape, seed)
    products = Rounded(rounding, mirrored)
    X = products.round(((u * s.unsqueeze(-2)) @ vt).float())
    with fp32_products("highest"):
        if restarts is None:
            X = _standard(X, schedule, products)
        else:
            X = iterate_gram(X, schedule, restarts, products, products.apply)
    for a, b, c in schedule:
        s = s * (a + s * s * (b + s * s * c))
    exact = (u * s.unsqueeze(-2)) @ vt
    errors = (X.double() - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
    return {
        name: error if math.isfinite(error) else math.inf for name, error in zip(SPECTRA, errors.tolist(), strict=True)
    }


def _standard(X: Tensor, schedule: Sequence[Coefficients], products: Rounded) -> Tensor:
    for a, b, c in schedule:
        A = products.gram(X)
        Z = products.addmm(A, A, A, beta=b, alpha=c)
        X = products.round(a * X + Z @ X)
    return X


@lru_cache(maxsize=8)
def _samples(rows: int, cols: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """``U`` (6 x rows x rows), ``S`` (6 x rows) of norm 1 and ``V^T`` (6 x rows x cols) in fp64, one per spectrum.

    Everything names its device: torch's default may be another one where this is called.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    gaussian = torch.randn(rows, cols, generator=generator, dtype=torch.float64, device="cpu")
    left = torch.randn(len(SPECTRA), rows, rows, generator=generator, dtype=torch.float64, device="cpu")
    right = torch.randn(len(SPECTRA), cols, rows, generator=generator, dtype=torch.float64, device="cpu")
    i = torch.arange(1, rows + 1, dtype=torch.float64, device="cpu")
    fall = (i - 1) / (rows - 1)
    s = torch.stack(
        (
            torch.linalg.svdvals(gaussian),
            10 ** (-3 * fall),
            10 ** (-7 * fall),
            (i <= 10).double(),
            1e-3 + (1 - 1e-3) * (i <= 4).double(),
            1 / i,
        )
    )
    # random singular vectors are those of a Gaussian matrix, too
    return torch.linalg.qr(left).Q, s / s.norm(dim=-1, keepdim=True), torch.linalg.qr(right).Q.mT
