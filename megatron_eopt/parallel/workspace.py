"""How much memory a step takes beside parameters, gradients and state, and the chunks that keep it bounded.

Pure Python, from shapes and schemes alone: the same on every rank.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_eopt.parallel.records import Bucket, Matrix, Plan, Scheme, cut_dimension

IN_FLIGHT = 3
"""Buckets at work at once: one whose shards arrive, one that is computed, one whose results leave."""


OFFLOADED_CHUNKS = 8
"""Chunks, at least, of a step whose state comes from host memory: so little of it is on the device at a time, and the
first of them, which arrives while nothing is computed, is small."""

OF_ENTRY = 24
"""Bytes that hooks take for an entry of a shard at a time, at most: copies of gradient, momentum, direction and update
where masks are put on, or of factor, second moment and update."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Bytes of the temporaries of a step, and what they are for.

    Attributes:
        bytes: of all, beside what an iteration of one matrix takes where that is more than :attr:`iteration`.
        kept: what an optimizer keeps for each entry from the direction to the update.
        state: of it, what comes from host memory for the step; 0 where all state is on the device.
    """

    bytes: int = 2**31
    kept: int = 0
    state: int = 0

    @property
    def iteration(self) -> int:
        """For the iteration of the matrices of a stack that are worked on at once."""
        return self.bytes // 4

    @property
    def part(self) -> int:
        """For what is done to each entry of a shard, so many shards at once."""
        return self.bytes // 16

    def for_chunks(self, largest: int) -> int:
        """What is left for the chunks at work, where the iteration of the largest matrix takes so much."""
        return self.bytes - self.part - (self.iteration if largest <= self.iteration else 0)


DEFAULT_WORKSPACE = Workspace()


def bucket_bytes(matrix: Matrix, scheme: Scheme, count: int, most: int) -> int:
    """What a bucket of so many matrices takes on its busiest rank, at most: shards, buffers, whole matrices, factors.

    ``most`` are the entries of the shards there. Without the work on those of a stack that are iterated on at once. See
    the schemes for when each is given back.
    """
    item, (rows, cols) = matrix.itemsize, matrix.shape
    own, on_rank = most * item, -(-count // matrix.ranks) * rows * cols * item
    if scheme in ("local", "blockwise"):
        return 2 * own
    if scheme == "owner":
        return own + on_rank * matrix.copies  # of which all go out
    if scheme == "duplicated":
        return matrix.ranks * own + max(own, count * rows * cols * item)
    if scheme == "share":
        return max(own + on_rank, (matrix.ranks + 1) * on_rank)
    cut = cut_dimension(matrix.shape, matrix.rectangles) or 0
    # in fp32: shards that are scaled or normalized, their successors, and Gram matrices, sent and received
    return own + 3 * max(most, count) * 4 + count * 4 * matrix.shape[1 - cut] ** 2 * 4


def in_chunks(plan: Plan, parameters: Sequence[int], workspace: Workspace, largest: int) -> dict[int, int]:
    """The chunk of each matrix that is in a bucket of a plan; the buckets are in the order of execution.

    All matrices of a parameter, of which ``parameters`` has the number, are in one chunk. Where the whole plan does not
    fit into the workspace, a chunk takes a third of it, so that three are at work; more where it needs that for as many
    matrices of a bucket as there are compute ranks, so that each rank has one; and where these do not fit at all, one
    parameter at a time. ``largest`` is what an iteration of the largest matrix takes.

    Where state comes from host memory, one chunk is at work, and the state of the next arrives. A chunk then takes also
    no more than a share of the whole plan: see :data:`OFFLOADED_CHUNKS`.
    """
    bucket_of = {i: number for number, bucket in enumerate(plan.buckets) for i in bucket.matrices}
    like = _like(plan)
    matrices_of: dict[int, list[int]] = {}
    for i in bucket_of:
        matrices_of.setdefault(parameters[i], []).append(i)

    def needed(some: Sequence[int], held: Mapping[int, int]) -> int:
        counts, of_buckets = Counter(held), dict[int, dict[int, int]]()
        counts.update(like[i] for each in some for i in matrices_of[each])
        for i, count in counts.items():
            of_buckets.setdefault(bucket_of[i], {})[i] = count
        return sum(_needed(plan, plan.buckets[number], each, workspace) for number, each in of_buckets.items())

    room, of_all = workspace.for_chunks(largest), needed(list(matrices_of), {})
    most = min(room // IN_FLIGHT, of_all // OFFLOADED_CHUNKS) if workspace.state else room // IN_FLIGHT
    if of_all <= room and not workspace.state:
        return dict.fromkeys(bucket_of, 0)
    chunk, held, chunk_of = 0, Counter[int](), dict[int, int]()
    for number, bucket in enumerate(plan.buckets):
        ranks = plan.matrices[bucket.matrices[0]].ranks if bucket.compute_ranks else 1
        waiting = list(dict.fromkeys(parameters[i] for i in bucket.matrices if parameters[i] not in chunk_of))
        while waiting:
            each = sum(bucket_of[i] == number for i in matrices_of[waiting[0]])
            some = waiting[: -(-ranks // each)]
            if needed(some, {}) > room:
                some = some[:1]
            if held and needed(some, held) > most:
                chunk, held = chunk + 1, Counter()
            held.update(like[i] for one in some for i in matrices_of[one])
            chunk_of |= dict.fromkeys(some, chunk)
            del waiting[: len(some)]
    return {i: chunk_of[parameters[i]] for i in bucket_of}


def chunk_bytes(plan: Plan, workspace: Workspace) -> list[int]:
    """What each chunk of a plan takes on its busiest rank, at most."""
    of_each, like = Counter[int](), _like(plan)
    for bucket in plan.buckets:
        of_each[bucket.chunk] += _needed(plan, bucket, Counter(like[i] for i in bucket.matrices), workspace)
    return [of_each[chunk] for chunk in sorted(of_each)]


def _like(plan: Plan) -> dict[int, int]:
    """Of each matrix the first one of its bucket of which each rank holds as much."""
    first: dict[tuple[Any, ...], int] = {}
    matrices = [(number, i) for number, bucket in enumerate(plan.buckets) for i in bucket.matrices]
    return {i: first.setdefault((number, plan.matrices[i].held), i) for number, i in matrices}


def _needed(plan: Plan, bucket: Bucket, counts: Mapping[int, int], workspace: Workspace) -> int:
    """What matrices of a bucket take: so many as are held like this one, by its index."""
    held = Counter[int]()
    for i, count in counts.items():
        for rank, entries in plan.matrices[i].held:
            held[rank] += count * entries
    matrix, most = plan.matrices[bucket.matrices[0]], max(held.values(), default=0)
    return bucket_bytes(matrix, bucket.scheme, sum(counts.values()), most) + workspace.kept * most
