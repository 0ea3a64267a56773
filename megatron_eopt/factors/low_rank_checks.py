"""What weights and factors of low rank cannot be."""

from collections.abc import Iterable, Sequence
from itertools import batched

from megatron_eopt.factors.low_rank import is_wide
from megatron_eopt.matrices import Split
from megatron_eopt.parallel.layout import Layout


def check_cut(name: str, called: str, layout: Layout) -> None:
    """Refuse a matrix that is cut along both sides."""
    if len(layout.cut_dims) > 1:
        raise ValueError(
            f"{name} takes matrices that are cut along their rows or along their columns, but {called}, a matrix "
            f"{layout.shape}, is cut along both: shard one dimension of it alone, or give it to TensorParallelMuon"
        )


def check_rank(name: str, called: str, rank: int, matrices: Iterable[tuple[str, Layout]]) -> None:
    """Refuse a weight too small for factors of a rank."""
    for part, matrix in matrices:
        most = min(matrix.shape)
        if rank > most:
            of_part = f"{called} ({part})" if part else called
            raise ValueError(
                f"{name}: rank must lie in [1, {most}] for {of_part}, a matrix {matrix.shape}, got {rank}: set rank "
                "(options={'rank': ...} of build_optimizer, or in a group of its own), or take another optimizer"
            )


def check_factor(name: str, called: str, layout: Layout, split: Split) -> None:
    """Refuse what cannot be a factor of a pair."""
    if not split.is_whole:
        raise ValueError(f"{name}: {called} is a factor of a pair, and cannot be split into logical matrices")
    if int(not is_wide(layout)) in layout.cut_dims:
        raise ValueError(
            f"{name}: {called}, a factor {layout.shape}, is cut along its rank: cut it along its long side (under "
            "FSDP2 a shard_placement_fn says so), or keep it whole"
        )


def check_pairs(name: str, called: Sequence[str], layouts: Sequence[Layout]) -> None:
    """Refuse factors that are no pairs."""
    if len(called) % 2:
        raise ValueError(f"{name}: a group of pairs has an even number of factors, got {len(called)}")
    for (of_a, a), (of_b, b) in batched(zip(called, layouts, strict=True), 2):
        if min(a.shape) not in b.shape or min(b.shape) not in a.shape:
            raise ValueError(
                f"{name}: {of_a} and {of_b} are no factors of one weight: {a.shape} and {b.shape} have no rank in "
                "common"
            )
