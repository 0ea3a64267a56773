"""What an iteration is computed with: symmetric products, of which half need not be computed, and quotients."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Fp32Precision = Literal["tf32", "ieee"]


@dataclass(frozen=True)
class Products:
    """Symmetric products of matrices or stacks, by torch; hashable.

    Results rounded by tensor cores are made symmetric: otherwise the Gram form in fp16 has up to three times the error.
    On a GPU by :func:`mean_of_triangles`; on a CPU, in fp16, the lower triangle is copied.

    ``out``, none of the inputs, is written to and returned: on a CPU fresh memory costs a good part of a product.
    """

    def share(self, rows: int) -> float:
        """The computed part of a (rows x rows) product."""
        return 1.0

    def gram(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``X X^T`` of (rows x cols) matrices."""
        if x.is_cuda and x.dtype in (torch.float16, torch.float32):
            unused = x.new_empty(*x.shape[:-1], x.size(-2))
            return mean_of_triangles(
                unused,
                x,
                x.mT,
                beta=0.0,
                alpha=1.0,
                half=unused,
                out=out,
            )
        product = torch.bmm if x.ndim == 3 else torch.mm
        out = product(x, x.mT, out=out)
        return _mirrored(out) if out.dtype == torch.float16 else out

    def addmm(
        self,
        c: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        beta: float,
        alpha: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """``beta C + alpha A B`` of symmetric matrices."""
        if c.is_cuda and c.dtype in (torch.float16, torch.float32):
            return mean_of_triangles(
                c,
                a,
                b,
                beta=beta,
                alpha=alpha,
                half=torch.empty_like(c),
                out=out,
            )
        fused = torch.baddbmm if c.ndim == 3 else torch.addmm
        out = fused(c, a, b, beta=beta, alpha=alpha, out=out)
        return _mirrored(out) if out.dtype == torch.float16 else out

    def normalized(
        self,
        x: Tensor,
        dtype: torch.dtype,
        *,
        unit: float = 1.0,
        propagate_nan: bool = True,
        into: Tensor | None = None,
    ) -> Tensor:
        """Matrices over their norms, times ``unit``, in ``dtype``.

        Contiguous, and ``into``, which may be the memory of ``x``, or new; a zero matrix stays zero. Without
        ``propagate_nan`` a matrix that is not finite becomes zero.
        """
        x, power = scaled(x, dtype, propagate_nan, into)
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=power.dtype)
        return over_norms(x, norm, dtype, unit, into)


def scaled(
    x: Tensor,
    dtype: torch.dtype,
    propagate_nan: bool = True,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Divide matrices by powers of two near their 1-norms, or largest entries, for products in ``dtype``.

    The division is exact. Squares of entries below 1e-19 vanish in fp32, above 1e19 they overflow: afterwards none that
    matters does. Without ``propagate_nan`` a matrix that is not finite becomes zero.

    Returns a contiguous tensor in fp32 (fp64 for an fp64 ``x``, and bf16 for a bf16 one whose products have 16 bits),
    in the memory of ``into`` if that has as many bytes, and the divisors, (1 x 1) or (n x 1 x 1) in fp32 or fp64: not
    finite where an entry is not.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if x.device.type == "cpu" and x.ndim == 2 and x.numel():  # which takes eight times as long for a 1-norm
        least, most = torch.aminmax(x)
        largest = torch.maximum(most, -least).to(wide).view(1, 1)
    else:
        largest = torch.linalg.vector_norm(x, 1, dim=(-2, -1), keepdim=True, dtype=wide)
    # of its bits those of the exponent, but for zero those of the smallest power
    integer, exponent, smallest = _POWERS[wide]
    power = largest.view(integer).bitwise_and_(exponent).clamp_(min=smallest).view(wide)
    # what is in bf16, and shall have 16 bits again, needs no more in between
    kept = torch.bfloat16 if x.dtype == torch.bfloat16 and dtype.itemsize == 2 else wide
    if into is not None and into.dtype.itemsize == kept.itemsize:
        result = into.view(kept)
    else:
        result = torch.empty(x.shape, dtype=kept, device=x.device)
    _divided(x, power, result)
    if not propagate_nan:
        bad = ~power.isfinite()
        # a CPU has the answer at once, and a pass over the matrix takes longer than the question
        if x.device.type != "cpu" or bad.any():
            result.masked_fill_(bad, 0)
    return result, power


# By dtype an integer of its size, the bits of its exponent, and those of its smallest normal number.
_POWERS = {
    torch.float64: (torch.int64, 0x7FF0000000000000, 0x0010000000000000),
    torch.float32: (torch.int32, 0x7F800000, 0x00800000),
}


def over_norms(
    x: Tensor,
    norm: Tensor,
    dtype: torch.dtype,
    unit: float = 1.0,
    into: Tensor | None = None,
) -> Tensor:
    """Scaled matrices over their norms, times ``unit``, in ``dtype``.

    A zero matrix stays zero. The result is contiguous, and ``into``, or takes the memory of ``x`` where it has as many
    bytes.
    """
    # the norm is 0 or, as magnitudes add up to 1 or more, at least one over the root of their number
    divisor = norm.clamp(min=2.0**-30)
    if unit != 1:
        divisor = divisor / unit
    if into is None:
        # each entry takes the place of its own, perhaps as another 16 bits
        reused = x.dtype.itemsize == dtype.itemsize
        into = x.view(dtype) if reused else torch.empty(x.shape, dtype=dtype, device=x.device)
    return _divided(x, divisor, into)


def _divided(x: Tensor, divisor: Tensor, out: Tensor) -> Tensor:
    """Matrices, each over its own number; ``divisor`` is (1 x 1) or (n x 1 x 1)."""
    if x.device.type == "cpu" and x.ndim == 2 and _rounds_as(x.dtype, out.dtype):
        divisor = divisor.view(())  # by a (1 x 1) a CPU takes twenty times as long in bf16
    return torch.div(x, divisor, out=out)


def _rounds_as(dtype: torch.dtype, out: torch.dtype) -> bool:
    """Whether a quotient may be rounded to its own dtype first.

    What goes from bf16 to fp32 is divided by a power of two, which is exact.
    """
    return dtype == out or dtype.itemsize > 2 or (dtype, out) == (torch.bfloat16, torch.float32)


def mean_of_triangles(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: float,
    alpha: float,
    half: Tensor,
    out: Tensor | None,
) -> Tensor:
    """``beta C + alpha A B`` plus its transpose, halved, in two launches.

    Half of it, which cannot overflow, is written to ``half``. Where ``beta`` is 0, ``c`` may be ``half`` and is not
    read.
    """
    fused = torch.baddbmm if c.ndim == 3 else torch.addmm
    fused(c, a, b, beta=beta / 2, alpha=alpha / 2, out=half)
    return torch.add(half, half.mT, out=out)


def _mirrored(x: Tensor) -> Tensor:
    below = x.tril(-1)
    return x.tril_().add_(below.mT)


@dataclass(frozen=True)
class Blocked(Products):
    """Products in strips of rows from the diagonal on, mirrored.

    ``n`` strips compute ``(n + 1) / 2n``, five eighths with four; thinner ones save little and are slower.
    """

    strips: int = 4
    smallest: int = 512  # products of fewer rows are computed whole: about where strips begin to pay on two cores

    def share(self, rows: int) -> float:
        """See :class:`Products`."""
        return (self.strips + 1) / (2 * self.strips) if rows >= self.smallest else 1.0

    def gram(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See :class:`Products`."""
        if x.size(-2) < self.smallest:
            return super().gram(x, out)
        if out is None:
            out = x.new_empty(*x.shape[:-1], x.size(-2))
        return self._fill(out, out, x, x.mT, beta=0.0, alpha=1.0)

    def addmm(
        self,
        c: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        beta: float,
        alpha: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :class:`Products`."""
        if c.size(-1) < self.smallest:
            return super().addmm(c, a, b, beta=beta, alpha=alpha, out=out)
        if out is None:
            out = torch.empty_like(c)
        return self._fill(out, c, a, b, beta=beta, alpha=alpha)

    def _fill(
        self,
        out: Tensor,
        c: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        beta: float,
        alpha: float,
    ) -> Tensor:
        """``out <- beta C + alpha A B``, symmetric."""
        if out.ndim == 3:
            for matrices in zip(out, c, a, b, strict=True):
                self._fill(*matrices, beta=beta, alpha=alpha)
            return out
        rows = out.size(0)
        size = max(1, -(-rows // self.strips))
        for start in range(0, rows, size):
            end = start + size
            strip = out[start:end, start:]
            torch.addmm(c[start:end, start:], a[start:end], b[:, start:], beta=beta, alpha=alpha, out=strip)
            if end < rows:
                out[end:, start:end].copy_(strip[:, size:].mT)
        return out


def square_work(x: Tensor, count: int) -> list[Tensor]:
    """Uninitialized (rows x rows) or (n x rows x rows)."""
    rows = x.size(-2)
    cache_line = 64  # bytes; with rows at a power of two columns share few sets of a CPU's cache
    apart = rows
    if x.device.type == "cpu" and x.ndim == 2:
        apart += cache_line // x.element_size()
    return [x.new_empty(*x.shape[:-1], apart)[..., :rows] for _ in range(count)]
