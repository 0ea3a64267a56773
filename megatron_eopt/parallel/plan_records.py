"""The records of a plan, in pure Python."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from megatron_eopt.parallel.rectangles import Rectangle, Shape, copies, held, shapes

TpMode = Literal["blockwise", "duplicated", "distributed", "owner", "gram", "auto"]  # what the user asks for

Scheme = Literal["local", "blockwise", "duplicated", "distributed", "owner", "gram_split", "gram_replicated", "share"]
"""How a bucket is orthogonalized:

- ``local``: whole matrices as one stack, on the rank that holds them, be it each rank or one alone.
- ``blockwise``: each shard as a matrix of its own, without exchange: an approximation.
- ``duplicated``: one all-gather of all shards; every rank computes everything and keeps its shards.
- ``distributed``: the standard form; every step sums the stacked Gram matrices, of the dimension that is not cut, in
  one all-reduce, after one for the norms.
- ``owner``: one all-to-all brings each matrix to one rank, which orthogonalizes it, another one takes the shards back.
  Of several copies of a matrix the shards of one come, and those of all go.
- ``gram_replicated``: the Gram form on shards cut along the long side: one all-reduce of the stacked Gram matrices at
  the start and after every restart; every rank computes all factors Q.
- ``gram_split``: the same, but each sum goes to one rank, which computes Q and hands it out: a reduce-scatter and an
  all-gather for full rounds of matrices, a reduce and a broadcast for each of the rest. As many bytes, more
  collectives, and the cubes of a rank's own matrices only.
- ``share``: every rank holds whole matrices (data parallelism), orthogonalizes its share, and one all-gather hands the
  results out.
"""


@dataclass(frozen=True)
class Matrix:
    """One logical matrix, as its group's ranks see it."""

    name: str  # of the parameter, and of the matrix if it has several (``...linear_qkv.weight[q]``)
    shape: Shape  # of the global matrix
    rectangles: tuple[Rectangle, ...]  # of each rank of the group, in order; one for a matrix of one rank
    group: str = "tp"  # label of the process group: ``tp``, ``expt_tp``, ``dp`` and so on
    itemsize: int = 4  # bytes of an entry where it is exchanged
    iteration: str = ""  # name of the iteration that orthogonalizes it

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return len(self.rectangles)

    @property
    def sharded(self) -> bool:
        """Whether a rank holds a part only."""
        return self.shapes != {self.shape}

    @cached_property
    def shapes(self) -> frozenset[Shape]:
        """Shapes of what ranks hold."""
        return shapes(self.rectangles)

    @cached_property
    def uneven(self) -> bool:
        """Whether one rank holds more entries than another."""
        return len({rows * cols for rows, cols in self.shapes}) > 1

    @cached_property
    def held(self) -> tuple[tuple[int, int], ...]:
        """Ranks that hold entries, ascending, each with their number."""
        return held(self.rectangles)

    @property
    def holder(self) -> int | None:
        """The one of several ranks that has all of it; None if others have a part."""
        return self.held[0][0] if self.ranks > 1 and len(self.held) == 1 else None

    @cached_property
    def copies(self) -> int:
        """How often the ranks hold it between them."""
        return copies(self.shape, self.rectangles)

    def rank_in(self, groups: Mapping[str, Any]) -> int:
        """This rank's index among its ranks; process groups are by label."""
        rank: int = groups[self.group].rank() if self.ranks > 1 else 0
        return rank

    def shard_in(self, groups: Mapping[str, Any]) -> Rectangle:
        """What this rank has of it."""
        return self.rectangles[self.rank_in(groups)]

    def copy_of(self, rank: int) -> slice:
        """The ranks that hold one copy, with this one."""
        size = self.ranks // self.copies
        return slice(rank // size * size, rank // size * size + size)


@dataclass(frozen=True)
class Bucket:
    """Matrices alike, but uneven shards under ``owner``, and their scheme."""

    matrices: tuple[int, ...]  # indices into the matrices of the plan, ascending
    scheme: Scheme
    # of each matrix, for ``owner``, ``gram_split`` and ``share``, and for ``local`` where one rank alone has each
    compute_ranks: tuple[int, ...] = ()
    chunk: int = 0  # whose buckets are worked on together


@dataclass(frozen=True)
class Plan:
    """Matrices by parameter, and buckets in the order of execution."""

    matrices: tuple[Matrix, ...]
    buckets: tuple[Bucket, ...]

    def one_of(self, bucket: Bucket) -> Matrix:
        """One of a bucket's matrices."""
        return self.matrices[bucket.matrices[0]]


def in_rounds(compute_ranks: Sequence[int], ranks: int) -> tuple[list[int], list[int]]:
    """Matrices of full rounds, rank by rank, and the rest."""
    of_each: list[list[int]] = [[] for _ in range(ranks)]
    for index, rank in enumerate(compute_ranks):
        of_each[rank].append(index)
    rounds = min(map(len, of_each))
    full = [index for indices in of_each for index in indices[:rounds]]
    return full, sorted(index for indices in of_each for index in indices[rounds:])


def grouped[K, T](values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Values by their keys, each in the order in which it came."""
    found: dict[K, list[T]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return found
