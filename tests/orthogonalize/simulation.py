"""What rounding does to Newton-Schulz, simulated on known singular values, and the restarts that follow from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.forms import Preset, Restarts, iterate_gram
from megatron_eopt.orthogonalize.precision import fp32_products
from megatron_eopt.orthogonalize.products import Dense

SPECTRA = ("gaussian", "cond_1e3", "cond_1e7", "rank_10", "spikes", "harmonic")

# Small matrices suffer more than large ones, whose rounding errors average out, and square Gaussian ones have very
# small singular values. One shape would not do: polar_express in 5 steps with restart (2,) has a Gaussian error of
# 0.003 on 128 x 256, but of 0.04 on 64 x 64, three times that of the standard form in bf16.
SHAPES = ((64, 64), (128, 256))


# Each one more costs a sum over the ranks. No known set that needs more than two is served by three.
MAX_RESTARTS = 2

# An error of 1 is noise as large as the result. With long schedules and matrices of low rank the standard form in bf16
# exceeds it, too: to be no worse than that is not enough.
LARGEST_ERROR = 1.0

# Restarts whose scores differ by less count as equal, and the earliest are taken: processors round differently, which
# should not move a choice.
_TIE = 1.1

# Relative error of a preset by dtype and spectrum: the largest of six seeds on both shapes, times 1.25; fp16 with
# mirrored products, fp32 with either. The standard form of quintic in bf16, which it stands against, has 0.008, 0.05,
# 0.13, 0.31, 0.32, 0.014 without the 1.25. Default and accurate are below that everywhere, fast save on harmonic.
PUBLISHED_ERRORS: dict[Preset, dict[torch.dtype, dict[str, float]]] = {
    "fast": {
        torch.float16: dict(zip(SPECTRA, (0.0094, 0.025, 0.11, 0.036, 0.25, 0.03), strict=True)),
        torch.float32: dict(zip(SPECTRA, (9.9e-06, 1.8e-05, 0.00012, 3.2e-05, 0.00032, 2.9e-05), strict=True)),
    },
    "default": {
        torch.float16: dict(zip(SPECTRA, (0.0034, 0.011, 0.025, 0.044, 0.05, 0.0063), strict=True)),
        torch.float32: dict(zip(SPECTRA, (3.3e-06, 1.7e-05, 3.1e-05, 6.7e-05, 8.9e-05, 7.6e-06), strict=True)),
    },
    "accurate": {
        torch.float16: dict(zip(SPECTRA, (0.0016, 0.0069, 0.018, 0.039, 0.044, 0.0023), strict=True)),
        torch.float32: dict(zip(SPECTRA, (1.5e-06, 5e-06, 9.4e-06, 2.2e-05, 2.2e-05, 1.9e-06), strict=True)),
    },
}


@dataclass(frozen=True)
class Rounded(Dense):
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
        return 1.0

    def gram(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        x = self.round(x)
        return _into(out, self._symmetric(x @ x.mT))

    def addmm(self, c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float, out: Tensor | None = None) -> Tensor:
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
        restarts: of the Gram form, see iterate_gram; None for the standard
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


def choose_restarts(schedule: Sequence[Coefficients], extra: int = 0) -> Restarts | None:
    """The fewest restarts that keep the Gram form in fp16 as exact as the standard form in bf16, found by simulation.

    On each spectrum and shape above, the error must be no larger than that of
    the standard form in bf16, nor than :data:`LARGEST_ERROR`. Of equally many restarts those are taken whose largest
    ratio of error to bound is smallest, and of those within 10 % of it the earliest: they cost the same.

    Fewer than 64 rows are not simulated: with 32, quintic has 1.4 times the error of bf16 on ``harmonic`` (0.009).

    Args:
        schedule: one ``(a, b, c)`` per step.
        extra: restarts beyond the necessary ones, at most one after every step.

    Returns:
        Steps, counted from 1, after which to restart; None if :data:`MAX_RESTARTS` do not suffice.
    """
    most = len(schedule) - 1
    for count in range(min(MAX_RESTARTS, most) + 1):
        restarts, score = _best(tuple(schedule), count)
        if score <= 1:
            return _best(tuple(schedule), min(count + extra, most))[0] if extra else restarts
    return None


def _best(schedule: tuple[Coefficients, ...], count: int) -> tuple[Restarts, float]:
    """The best ``count`` restarts, and their largest ratio of error to bound."""
    scores = {
        restarts: max(_ratio(schedule, restarts, shape) for shape in SHAPES)
        for restarts in combinations(range(1, len(schedule)), count)
    }
    least = min(scores.values())
    return next((restarts, score) for restarts, score in scores.items() if score <= _TIE * least)


def _ratio(schedule: tuple[Coefficients, ...], restarts: Restarts, shape: tuple[int, int]) -> float:
    errors = simulated_error(schedule, restarts, shape=shape)
    return max(errors[name] / bound for name, bound in _bounds(schedule, shape).items())


@lru_cache(maxsize=256)
def _bounds(schedule: tuple[Coefficients, ...], shape: tuple[int, int]) -> dict[str, float]:
    standard = simulated_error(schedule, None, torch.bfloat16, shape=shape)
    return {name: min(standard[name], LARGEST_ERROR) for name in SPECTRA}
