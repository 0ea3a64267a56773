"""Memory of a step, and the chunks that bound it.

Beside parameters, gradients and state. Pure Python, from shapes and schemes alone: the same on every rank.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_eopt.parallel.plan_records import Bucket, Matrix, Plan, Scheme
from megatron_eopt.parallel.rectangles import cut_dimension

IN_FLIGHT = 3  # buckets at work: one whose shards arrive, one that is computed, one whose results leave
OFFLOADED_CHUNKS = 8  # at least, with state in host memory: the first, which is waited for, is small
SMALL_CHUNK = 8  # part of the workspace: less takes longer to launch than to copy
BYTES_OF_ENTRY = 24  # most bytes of an entry in hooks: copies of gradient, momentum, direction and update


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Bytes of a step's temporaries, and what they are for."""

    bytes: int = 2**31  # of all, but for an iteration of one matrix that takes more than `iteration`
    kept: int = 0  # by an optimizer, for each entry, from the direction to the update
    state: int = 0  # of it, what comes from host memory

    @property
    def iteration(self) -> int:
        """For matrices that are iterated on at once, or element-wise work."""
        return self.bytes // 4

    def for_chunks(self, largest: int) -> int:
        """For the chunks at work; ``largest`` is the largest iteration's."""
        small = self.bytes // 16  # statistics and tables
        return self.bytes - small - (self.iteration if largest <= self.iteration else 0)


DEFAULT_WORKSPACE = Workspace()


def bucket_bytes(
    matrix: Matrix,
    scheme: Scheme,
    count: int,
    most: int,
) -> int:
    """Most bytes of a bucket; ``most`` entries on a rank.

    Shards, buffers, whole matrices and factors, without the iteration. The schemes show when each is freed.
    """
    item = matrix.itemsize
    rows, cols = matrix.shape
    largest = most * item
    on_rank = -(-count // matrix.ranks) * rows * cols * item
    if scheme in ("local", "blockwise"):
        return 2 * largest
    if scheme == "owner":
        return largest + on_rank * matrix.copies  # of which all go out
    if scheme == "duplicated":
        return matrix.ranks * largest + max(largest, count * rows * cols * item)
    if scheme == "share":
        return max(largest + on_rank, (matrix.ranks + 1) * on_rank)
    cut = cut_dimension(matrix.shape, matrix.rectangles) or 0
    # in fp32: shards that are scaled or normalized, their successors, and Gram matrices, sent and received
    return largest + 3 * max(most, count) * 4 + count * 4 * matrix.shape[1 - cut] ** 2 * 4


def in_chunks(
    plan: Plan,
    parameters: Sequence[int],
    workspace: Workspace,
    largest: int,
) -> dict[int, int]:
    """The chunk of each matrix in a plan's buckets.

    All matrices of a parameter (``parameters`` has its number) are in one chunk. If the plan does not fit into the
    workspace, a chunk takes a third of it, so that three are at work; more to give each compute rank a matrix of a
    bucket; and if these do not fit at all, one parameter at a time. Buckets are in the order of execution; ``largest``
    is what an iteration of the largest matrix takes. With state in host memory one chunk is at work while the state of
    the next arrives, and a chunk takes at most a share of the plan, or of the workspace if that is more: see
    :data:`OFFLOADED_CHUNKS` and :data:`SMALL_CHUNK`. A bucket that fits into a chunk is not cut.
    """
    like = _like(plan)
    bucket_of = dict[int, int]()
    matrices_of: dict[int, list[int]] = {}
    for number, bucket in enumerate(plan.buckets):
        for i in bucket.matrices:
            bucket_of[i] = number
            matrices_of.setdefault(parameters[i], []).append(i)

    def counted(some: Sequence[int]) -> Counter[int]:
        return Counter(like[i] for parameter in some for i in matrices_of[parameter])

    def needed(counts: Mapping[int, int]) -> int:
        of_buckets = dict[int, dict[int, int]]()
        for i, count in counts.items():
            of_buckets.setdefault(bucket_of[i], {})[i] = count
        return sum(_needed(plan, plan.buckets[n], of_bucket, workspace) for n, of_bucket in of_buckets.items())

    room = workspace.for_chunks(largest)
    most = room // IN_FLIGHT
    of_all = needed(counted(list(matrices_of)))
    if workspace.state:
        most = min(most, max(of_all // OFFLOADED_CHUNKS, workspace.bytes // SMALL_CHUNK))
    elif of_all <= room:
        return dict.fromkeys(bucket_of, 0)
    chunk = 0
    held = Counter[int]()
    chunk_of = dict[int, int]()  # of each parameter
    for number, bucket in enumerate(plan.buckets):
        ranks = plan.one_of(bucket).ranks if bucket.compute_ranks else 1
        waiting = list(dict.fromkeys(parameters[i] for i in bucket.matrices if parameters[i] not in chunk_of))
        of_bucket = counted(waiting)
        if held and needed(of_bucket) <= most < needed(held + of_bucket):  # cut, it would take twice the launches
            chunk += 1
            held = Counter()
        while waiting:
            of_parameter = sum(bucket_of[i] == number for i in matrices_of[waiting[0]])
            some = waiting[: -(-ranks // of_parameter)]
            if needed(counted(some)) > room:
                some = some[:1]
            counts = counted(some)
            if held and needed(held + counts) > most:
                chunk += 1
                held = Counter()
            held += counts
            chunk_of |= dict.fromkeys(some, chunk)
            del waiting[: len(some)]
    return {i: chunk_of[parameters[i]] for i in bucket_of}


def chunk_bytes(plan: Plan, workspace: Workspace) -> list[int]:
    """Most bytes of each chunk on its busiest rank."""
    of_each = Counter[int]()
    like = _like(plan)
    for bucket in plan.buckets:
        of_each[bucket.chunk] += _needed(plan, bucket, Counter(like[i] for i in bucket.matrices), workspace)
    return [of_each[chunk] for chunk in sorted(of_each)]


def _like(plan: Plan) -> dict[int, int]:
    """For each matrix, the first in its bucket held alike."""
    like = dict[int, int]()
    for bucket in plan.buckets:
        first = dict[tuple[tuple[int, int], ...], int]()
        for i in bucket.matrices:
            like[i] = first.setdefault(plan.matrices[i].held, i)
    return like


def _needed(
    plan: Plan,
    bucket: Bucket,
    counts: Mapping[int, int],
    workspace: Workspace,
) -> int:
    """Bytes of some matrices of a bucket, counted by :func:`_like`."""
    held = Counter[int]()
    for i, count in counts.items():
        for rank, entries in plan.matrices[i].held:
            held[rank] += count * entries
    matrix = plan.one_of(bucket)
    most = max(held.values(), default=0)
    return bucket_bytes(matrix, bucket.scheme, sum(counts.values()), most) + workspace.kept * most
