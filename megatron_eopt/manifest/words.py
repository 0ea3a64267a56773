"""Short forms that the table, the checks and the comparison have in common."""

import re
from collections import Counter
from collections.abc import Iterable

from megatron_eopt.manifest.row import LogicalMatrix

_PLACE = re.compile(r"\s*\b[0-9]+\b")


def owner_in_words(owner: str | None) -> str:
    """An owner, or that there is none."""
    return "nobody" if owner is None else owner


def matrices_in_words(matrices: Iterable[LogicalMatrix]) -> str:
    """Names and sizes: ``q 64x64, k 32x64``, and ``8 q 16x64`` for heads or experts of one size."""
    sizes = Counter(f"{_PLACE.sub('', matrix.name).strip()} {matrix.rows}x{matrix.cols}".strip() for matrix in matrices)
    return ", ".join(size if number == 1 else f"{number:,} {size}" for size, number in sizes.items())


def figure(value: float) -> str:
    """Three digits or more, and no exponent where the figure is large."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
