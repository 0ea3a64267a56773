"""What rounding does to Newton-Schulz, simulated, and the errors of its Gram form."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from megatron_eopt.kernels.precision import fp32_products
from megatron_eopt.kernels.products import Products
from megatron_eopt.orthogonalize.coefficients import composite_range
from megatron_eopt.orthogonalize.forms import UNIT_IN_FP16, iterate_gram, iterate_gram_fp16

SPECTRA = ("gaussian", "cond_1e3", "cond_1e7", "rank_10", "spikes", "harmonic")


# Rounding takes no singular value further out of the range of the exact polynomials than by this factor.
MARGIN = 1.02


def by_spectrum(*errors):
    return dict(zip(SPECTRA, errors, strict=True))


# Relative error of a preset by dtype and spectrum: the largest of six seeds on 64 x 64 and 128 x 256, times 1.25; fp16
# with mirrored products. The standard form of quintic in bf16, which it stands against, has 0.008, 0.05, 0.13, 0.31,
# 0.32, 0.014 without the 1.25. All are below that, save default in fp16 on square Gaussian matrices.
PUBLISHED_ERRORS = {
    "fast": {
        torch.float16: by_spectrum(0.0028, 0.0041, 0.0084, 0.013, 0.017, 0.0028),
        torch.float32: by_spectrum(9.9e-06, 1.8e-05, 0.00012, 3.2e-05, 0.00032, 2.9e-05),
    },
    "default": {
        torch.float16: by_spectrum(0.025, 0.027, 0.038, 0.038, 0.046, 0.0041),
        torch.float32: by_spectrum(3.3e-06, 1.7e-05, 3.1e-05, 6.7e-05, 8.9e-05, 7.6e-06),
    },
    "accurate": {
        torch.float16: by_spectrum(0.0016, 0.0069, 0.018, 0.039, 0.044, 0.0023),
        torch.float32: by_spectrum(1.5e-06, 5e-06, 9.4e-06, 2.2e-05, 2.2e-05, 1.9e-06),
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

    def share(self, rows):
        return 1.0

    def gram(self, x, out=None):
        x = self.round(x)
        return _into(out, self._symmetric(x @ x.mT))

    def addmm(self, c, a, b, *, beta, alpha, out=None):
        return _into(out, self._symmetric(beta * self.round(c) + alpha * (self.round(a) @ self.round(b))))

    def apply(self, q, x, out=None, divisor=1.0):
        """``Q X`` over a number, which is not symmetric."""
        return _into(out, self.round(self.round(q) @ self.round(x) / divisor))

    def round(self, x):
        """``x`` to the precision of ``dtype``, in fp32."""
        return x.to(self.dtype).float()

    def _symmetric(self, x):
        x = self.round(x)
        return x.tril() + x.tril(-1).mT if self.mirrored else x


@dataclass(frozen=True)
class RoundedTF32(Rounded):
    """Products whose operands have the 10 bits of TF32, and whose results are fp32, symmetric as a GPU makes them."""

    dtype: torch.dtype = torch.float32

    def round(self, x):
        """``x`` to 10 bits, ties to even."""
        bits = x.contiguous().view(torch.int32)
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)

    def addmm(self, c, a, b, *, beta, alpha, out=None):
        return _into(out, self._symmetric(beta * c + alpha * (self.round(a) @ self.round(b))))

    def apply(self, q, x, out=None, divisor=1.0):
        return _into(out, self.round(q) @ self.round(x) / divisor)

    def _symmetric(self, x):
        return (x + x.mT) / 2


ROUNDED = {
    "bf16": Rounded(torch.bfloat16, mirrored=False),
    "fp16": Rounded(torch.float16),
    "tf32": RoundedTF32(),
    "fp32": Rounded(torch.float32),
}


def _into(out, result):
    return result if out is None else out.copy_(result)


def _standard(X, schedule, products):
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


def furthest(schedule, restarts, rounding, seeds):
    """Largest singular value that rounding makes of matrices near low rank, over the largest value of the polynomials.

    Args:
        schedule: one ``(a, b, c)`` per step.
        restarts: of the Gram form; None for the standard form.
        rounding: key of :data:`ROUNDED`.
        seeds: number of samples of each shape and spectrum.
    """
    largest = max(result_norm(X, schedule, restarts, rounding) for X in _near_low_rank(seeds))
    return largest / largest_value(schedule)


def largest_value(schedule):
    """The largest value of the polynomials up to 1.

    One that is repeated without converging, as of ``simple``, counts once: rounding moves its orbits.
    """
    once = schedule[:1] if len(set(schedule)) == 1 else schedule
    return composite_range(once, lower=1e-6)[1]


def result_norm(X, schedule, restarts, rounding):
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
def _near_low_rank(seeds):
    """Stacks of matrices of norm 1, one for each of :data:`FEW_ROWS`: of rank 1, and of ``1, r, ..., r`` and ``1, r``.

    And all alike, or a quarter of them, but for random differences.
    """
    stacks = []
    for rows, cols in FEW_ROWS:
        generator = torch.Generator().manual_seed(rows + cols)
        first = torch.zeros(rows, dtype=torch.float64)
        first[0] = 1
        second = torch.zeros_like(first)
        second[1:2] = 1
        spectra = [first, torch.ones_like(first)]
        for ratio in (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 0.5, 0.7, 0.9):
            spectra.append(first + ratio * second)
            spectra.append(first + ratio * (1 - first))
        for width in (1e-4, 1e-3, 1e-2):
            alike = 1 - width * torch.rand(rows, generator=generator, dtype=torch.float64)
            few = alike.clone()
            few[max(1, rows // 4) :] = 0
            spectra += [alike, few]
        s = torch.stack(spectra).repeat(seeds, 1)
        left = torch.randn(len(s), rows, rows, generator=generator, dtype=torch.float64)
        right = torch.randn(len(s), cols, rows, generator=generator, dtype=torch.float64)
        X = (torch.linalg.qr(left).Q * s.unsqueeze(-2)) @ torch.linalg.qr(right).Q.mT
        stacks.append((X / X.norm(dim=(-2, -1), keepdim=True)).float())
    return tuple(stacks)
