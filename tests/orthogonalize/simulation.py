"""What rounding does to Newton-Schulz, simulated on known singular values, and the restarts that follow from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

from megatron_eopt.kernels.precision import fp32_products
from megatron_eopt.kernels.products import Products
from megatron_eopt.orthogonalize.coefficients import Coefficients, composite_range
from megatron_eopt.orthogonalize.forms import UNIT_IN_FP16, Preset, Restarts, iterate_gram, iterate_gram_fp16

SPECTRA = ("gaussian", "cond_1e3", "cond_1e7", "rank_10", "spikes", "harmonic")

# Small matrices suffer more than large ones, whose rounding errors average out, and square Gaussian ones have very
# small singular values. One shape would not do: polar_express in 5 steps with restart (2,) has a Gaussian error of
# 0.003 on 128 x 256, but of 0.04 on 64 x 64, three times that of the standard form in bf16.
SHAPES = ((64, 64), (128, 256))


# Each one more costs a sum over the ranks. In fp32 no known set that needs more than two is served by three.
MAX_RESTARTS, MAX_RESTARTS_IN_LOWER_PRECISION = 2, 3

# Rounding takes no singular value further out of the range of the exact polynomials than by this factor.
MARGIN = 1.02

# An error of 1 is noise as large as the result. With long schedules and matrices of low rank the standard form in bf16
# exceeds it, too: to be no worse than that is not enough.
LARGEST_ERROR = 1.0

# Restarts whose scores differ by less count as equal, and the earliest are taken: processors round differently, which
# should not move a choice.
_TIE = 1.1

# Relative error of a preset by dtype and spectrum: the largest of six seeds on both shapes, times 1.25; fp16 with
# mirrored products, fp32 with either. The standard form of quintic in bf16, which it stands against, has 0.008, 0.05,
# 0.13, 0.31, 0.32, 0.014 without the 1.25. All are below that, save default in fp16 on square Gaussian matrices.
PUBLISHED_ERRORS: dict[Preset, dict[torch.dtype, dict[str, float]]] = {
    "fast": {
        torch.float16: dict(zip(SPECTRA, (0.0028, 0.0041, 0.0084, 0.013, 0.017, 0.0028), strict=True)),
        torch.float32: dict(zip(SPECTRA, (9.9e-06, 1.8e-05, 0.00012, 3.2e-05, 0.00032, 2.9e-05), strict=True)),
    },
    "default": {
        torch.float16: dict(zip(SPECTRA, (0.025, 0.027, 0.038, 0.038, 0.046, 0.0041), strict=True)),
        torch.float32: dict(zip(SPECTRA, (3.3e-06, 1.7e-05, 3.1e-05, 6.7e-05, 8.9e-05, 7.6e-06), strict=True)),
    },
    "accurate": {
        torch.float16: dict(zip(SPECTRA, (0.0016, 0.0069, 0.018, 0.039, 0.044, 0.0023), strict=True)),
        torch.float32: dict(zip(SPECTRA, (1.5e-06, 5e-06, 9.4e-06, 2.2e-05, 2.2e-05, 1.9e-06), strict=True)),
    },
}


@dataclass(frozen=True)
class Rounded(Products):
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

    def apply(self, q: Tensor, x: Tensor, out: Tensor | None = None, divisor: float = 1.0) -> Tensor:
        """``Q X`` over a number, which is not symmetric."""
        return _into(out, self.round(self.round(q) @ self.round(x) / divisor))

    def round(self, x: Tensor) -> Tensor:
        """``x`` to the precision of ``dtype``, in fp32."""
        return x.to(self.dtype).float()

    def _symmetric(self, x: Tensor) -> Tensor:
        x = self.round(x)
        return x.tril() + x.tril(-1).mT if self.mirrored else x


@dataclass(frozen=True)
class RoundedTF32(Rounded):
    """Products whose operands have the 10 bits of TF32, and whose results are fp32, symmetric as a GPU makes them."""

    dtype: torch.dtype = torch.float32

    def round(self, x: Tensor) -> Tensor:
        """``x`` to 10 bits, ties to even."""
        bits = x.contiguous().view(torch.int32)
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)

    def addmm(self, c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float, out: Tensor | None = None) -> Tensor:
        return _into(out, self._symmetric(beta * c + alpha * (self.round(a) @ self.round(b))))

    def apply(self, q: Tensor, x: Tensor, out: Tensor | None = None, divisor: float = 1.0) -> Tensor:
        return _into(out, self.round(q) @ self.round(x) / divisor)

    def _symmetric(self, x: Tensor) -> Tensor:
        return (x + x.mT) / 2


ROUNDED: dict[str, Rounded] = {
    "bf16": Rounded(torch.bfloat16, mirrored=False),
    "fp16": Rounded(torch.float16),
    "tf32": RoundedTF32(),
    "fp32": Rounded(torch.float32),
}


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
        if products.dtype == torch.float32:
            X = a * X + products.apply(Z, X)
        else:
            X = products.round(a * X + Z @ X)
    return X


# Rounding is largest beside a singular value of 1, and in few rows: in many it averages out, but a gradient of one
# token may have few that are not zero.
FEW_ROWS = ((1, 1), (1, 3), (2, 2), (2, 3), (3, 3), (4, 5), (8, 8), (12, 16), (48, 64))


def furthest(schedule: Sequence[Coefficients], restarts: Sequence[int] | None, rounding: str, seeds: int = 16) -> float:
    """Largest singular value that rounding makes of matrices near low rank, over the largest value of the polynomials.

    Args:
        schedule: one ``(a, b, c)`` per step.
        restarts: of the Gram form; None for the standard form.
        rounding: key of :data:`ROUNDED`.
        seeds: number of samples of each shape and spectrum.
    """
    largest = max(result_norm(X, schedule, restarts, rounding) for X in _near_low_rank(seeds))
    return largest / largest_value(schedule)


def largest_value(schedule: Sequence[Coefficients]) -> float:
    """The largest value of the polynomials up to 1.

    One that is repeated without converging, as of ``simple``, counts once: rounding moves its orbits.
    """
    once = schedule[:1] if len(set(schedule)) == 1 else schedule
    return composite_range(once, lower=1e-6)[1]


def result_norm(X: Tensor, schedule: Sequence[Coefficients], restarts: Sequence[int] | None, rounding: str) -> float:
    """Largest singular value of the results for a stack of fp32 matrices of norm 1; infinity for what is not finite."""
    products = ROUNDED[rounding]
    with fp32_products("highest"):
        if restarts is None:
            result = _standard(products.round(X), schedule, products)
        elif rounding == "fp16":
            scaled = products.round(X * UNIT_IN_FP16)
            result = iterate_gram_fp16(scaled, schedule, restarts, products, products.apply)
        else:
            result = iterate_gram(X.clone(), schedule, restarts, products, products.apply)
    if not result.isfinite().all():
        return math.inf
    return torch.linalg.matrix_norm(result.double(), 2).max().item()


@lru_cache(maxsize=4)
def _near_low_rank(seeds: int) -> tuple[Tensor, ...]:
    """Stacks of matrices of norm 1, one for each of :data:`FEW_ROWS`: of rank 1, and of ``1, r, ..., r`` and ``1, r``.

    And all alike, or a quarter of them, but for random differences.
    """
    stacks = []
    for rows, cols in FEW_ROWS:
        generator = torch.Generator("cpu").manual_seed(rows + cols)
        first = torch.zeros(rows, dtype=torch.float64, device="cpu")
        first[0] = 1
        second = torch.zeros_like(first)
        second[1:2] = 1
        spectra = [first, torch.ones_like(first)]
        for ratio in (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 0.5, 0.7, 0.9):
            spectra.append(first + ratio * second)
            spectra.append(first + ratio * (1 - first))
        for width in (1e-4, 1e-3, 1e-2):
            alike = 1 - width * torch.rand(rows, generator=generator, dtype=torch.float64, device="cpu")
            few = alike.clone()
            few[max(1, rows // 4) :] = 0
            spectra += [alike, few]
        s = torch.stack(spectra).repeat(seeds, 1)
        left = torch.randn(len(s), rows, rows, generator=generator, dtype=torch.float64, device="cpu")
        right = torch.randn(len(s), cols, rows, generator=generator, dtype=torch.float64, device="cpu")
        X = (torch.linalg.qr(left).Q * s.unsqueeze(-2)) @ torch.linalg.qr(right).Q.mT
        stacks.append((X / X.norm(dim=(-2, -1), keepdim=True)).float())
    return tuple(stacks)


def stays_in_range(schedule: Sequence[Coefficients], restarts: Sequence[int] | None) -> bool:
    """Whether the Gram form stays in range in both roundings that GPUs have for it."""
    return furthest(schedule, restarts, "fp16") <= MARGIN and furthest(schedule, restarts, "tf32") <= MARGIN


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


def choose_restarts(schedule: Sequence[Coefficients], extra: int = 0, lower: bool = False) -> Restarts | None:
    """The fewest restarts that keep the Gram form as exact as the standard form in bf16, found by simulation.

    On each spectrum and shape above, the error in fp16 must be no larger than that of the standard form in bf16, nor
    than :data:`LARGEST_ERROR`. For ``lower`` precisions no singular value near low rank may leave the range of the
    exact polynomials either, in fp16 and in TF32. Of equally many restarts those are taken whose largest ratio of error
    to bound is smallest, and of those within 10 % of it the earliest: they cost the same.

    Fewer than 64 rows are not simulated for the error: with 32, quintic has 1.4 times the error of bf16 on ``harmonic``
    (0.009).

    Args:
        schedule: one ``(a, b, c)`` per step.
        extra: restarts beyond the necessary ones, at most one after every step.
        lower: for products in fp16 and TF32; else in fp32.

    Returns:
        Steps, counted from 1, after which to restart; None if those allowed do not suffice.
    """
    most = len(schedule) - 1
    allowed = MAX_RESTARTS_IN_LOWER_PRECISION if lower else MAX_RESTARTS
    for count in range(min(allowed, most) + 1):
        restarts = _best(tuple(schedule), count, lower)
        if restarts is not None:
            return _best(tuple(schedule), min(count + extra, most), lower) if extra else restarts
    return None


def _best(schedule: tuple[Coefficients, ...], count: int, lower: bool) -> Restarts | None:
    """The best ``count`` restarts that serve, if any do."""
    scores: dict[Restarts, float] = {}
    for restarts in combinations(range(1, len(schedule)), count):
        scores[restarts] = max(_ratio(schedule, restarts, shape) for shape in SHAPES)
    least = None
    for restarts, score in sorted(scores.items(), key=lambda entry: entry[1]):
        if score > 1:
            break
        if not lower or stays_in_range(schedule, restarts):
            least = score
            break
    if least is None:
        return None
    for restarts, score in scores.items():
        if score <= min(1, _TIE * least) and (not lower or stays_in_range(schedule, restarts)):
            return restarts
    return None


@lru_cache(maxsize=1024)
def _ratio(schedule: tuple[Coefficients, ...], restarts: Restarts, shape: tuple[int, int]) -> float:
    errors = simulated_error(schedule, restarts, shape=shape)
    return max(errors[name] / bound for name, bound in _bounds(schedule, shape).items())


@lru_cache(maxsize=256)
def _bounds(schedule: tuple[Coefficients, ...], shape: tuple[int, int]) -> dict[str, float]:
    standard = simulated_error(schedule, None, torch.bfloat16, shape=shape)
    return {name: min(standard[name], LARGEST_ERROR) for name in SPECTRA}
