"""Time Newton-Schulz against emerging-optimizers on the same matrices, in one run: ``make bench``.

Prints, for each shape, the median time of both in turn and the ratio of the medians; above 1 ours is faster.
"""

import statistics
import time
from collections.abc import Callable

import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz as theirs

from megatron_eopt.orthogonalize import newton_schulz as ours

SHAPES = [(512, 512), (1792, 512), (3584, 512), (64, 128, 64)]
ROUNDS = 7


def seconds(function: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def medians(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Median times of two functions, called in turn after a call of each that does not count."""
    first(), second()
    times = [(seconds(first), seconds(second)) for _ in range(ROUNDS)]
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times)


def main() -> None:
    """Print the table."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads, fp32, quintic, 5 steps")
    print(f"{'shape':>16} {'ours':>10} {'theirs':>10} {'ratio':>7} {'difference':>11}")
    for shape in SHAPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        here, there = medians(lambda x=x: ours(x), lambda x=x: theirs(x, 5))  # type: ignore[misc]
        difference = ((ours(x) - theirs(x, 5)).norm() / theirs(x, 5).norm()).item()
        size = " x ".join(map(str, shape))
        print(f"{size:>16} {here * 1e3:8.1f}ms {there * 1e3:8.1f}ms {there / here:7.2f} {difference:11.1e}")


if __name__ == "__main__":
    main()
