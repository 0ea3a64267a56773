"""What a bucket costs under a scheme: operations, bytes, collectives, and the time they are predicted to take.

Bytes and collectives are exact: what the exchange counts is what is predicted here. Times are modelled, operations over
a rate plus bytes over a rate plus a latency for each collective, nothing overlapped: they order the schemes.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.forms import gram_flops, standard_flops
from megatron_eopt.parallel import traffic
from megatron_eopt.parallel.records import Bucket, Matrix, Plan, Shape, cut_dimension, in_rounds

NORM_BYTES = 8
"""Of a squared norm where it is summed over ranks: fp64."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a rank works. Fixed figures by default, so that every rank makes the same plan.

    Attributes:
        flops: operations per second.
        bytes: bytes per second that a rank sends.
        latency: seconds that a collective takes however little it carries.

    Raises:
        ValueError: for a rate that is not a positive finite number, or a latency that is negative.
    """

    flops: float = 500e12
    bytes: float = 300e9
    latency: float = 20e-6

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and name != "latency"):
                raise ValueError(f"rate {name!r} must be a positive number (a latency may be 0), got {value!r}")

    def state_dict(self) -> dict[str, float]:
        """The rates as plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Rates":
        """The rates of a checkpoint.

        Raises:
            ValueError: where one is missing, unknown or no rate.
        """
        known = {field.name for field in fields(cls)}
        if set(state) != known:
            raise ValueError(f"rates have the keys {', '.join(sorted(known))}, got {', '.join(sorted(state))}")
        return cls(**state)


DEFAULT_RATES = Rates()


@dataclass(frozen=True, kw_only=True)
class Work:
    """The iteration, as far as its cost depends on it.

    Attributes:
        schedule: one ``(a, b, c)`` per step.
        restarts: those of the Gram form; None where it must not run.
        share: the part of a symmetric product that is computed: 1/2 with kernels for it, 1 without.
        gram_itemsize: bytes of an entry of a Gram matrix on the wire: 4 for fp32, 2 for fp16.

    Raises:
        ValueError: for an empty schedule, restarts outside of it, and a share or item size that does not exist.
    """

    schedule: tuple[Coefficients, ...]
    restarts: tuple[int, ...] | None
    share: float = 0.5
    gram_itemsize: int = 4

    def __post_init__(self) -> None:
        if not self.schedule:
            raise ValueError("the schedule of an iteration has at least one step")
        if any(not 0 < step < len(self.schedule) for step in self.restarts or ()):
            raise ValueError(f"restarts lie between 1 and {len(self.schedule) - 1}, got {self.restarts}")
        if not 0.5 <= self.share <= 1:
            raise ValueError(f"between 1/2 and 1 of a symmetric product is computed, got {self.share!r}")
        if self.gram_itemsize not in (2, 4):
            raise ValueError(f"Gram matrices are exchanged in 2 or 4 bytes an entry, got {self.gram_itemsize!r}")

    @property
    def segments(self) -> int:
        """How often the Gram form computes a Gram matrix."""
        return len(self.restarts or ()) + 1


Works = Work | Mapping[str, Work]
"""The iteration of all matrices, or the iterations by the name that each matrix has."""


def work_of(matrix: Matrix, work: Works) -> Work:
    """The iteration of a matrix."""
    return work if isinstance(work, Work) else work[matrix.iteration]


@dataclass(frozen=True)
class Cost:
    """What the busiest rank has to do; each figure is the largest over the ranks.

    Attributes:
        flops: floating-point operations.
        bytes: bytes sent.
        collectives: how many.
        seconds: predicted time.
    """

    flops: float = 0.0
    bytes: int = 0
    collectives: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.collectives + other.collectives,
            self.seconds + other.seconds,
        )


def whole_flops(shape: Shape, work: Work) -> float:
    """Operations of one whole matrix, in the form that costs fewer of those that may run."""
    rows, cols = sorted(shape)
    standard = standard_flops(rows, cols, work.schedule, work.share)
    if work.restarts is None:
        return standard
    return min(standard, gram_flops(rows, cols, work.schedule, work.restarts, work.share))


def cube_flops(shape: Shape, work: Work) -> float:
    """Operations of the Gram form between its first and last product: those on (n x n) matrices, n the short side."""
    return gram_flops(min(shape), 0, work.schedule, work.restarts or (), work.share)


def bucket_flops(plan: Plan, bucket: Bucket, rank: int, work: Works) -> float:
    """Floating-point operations of one rank of the bucket's group."""
    matrix, count = plan.matrices[bucket.matrices[0]], len(bucket.matrices)
    work, owned = work_of(matrix, work), bucket.compute_ranks.count(rank)
    shape, rectangle = matrix.shape, matrix.rectangles[rank]
    if bucket.scheme in ("owner", "share"):
        return owned * whole_flops(shape, work)
    if bucket.scheme in ("local", "duplicated"):
        return count * whole_flops(shape, work)
    if bucket.scheme == "blockwise":
        return count * whole_flops(rectangle.shape, work)
    kept, cut = _kept_side(matrix), rectangle.shape[1 - _kept_dim(matrix)]
    if bucket.scheme == "distributed":
        return count * standard_flops(kept, cut, work.schedule, work.share)
    cubes = cube_flops(shape, work)
    products = gram_flops(kept, cut, work.schedule, work.restarts or (), work.share) - cubes
    return count * products + (count if bucket.scheme == "gram_replicated" else owned) * cubes


def bucket_calls(plan: Plan, bucket: Bucket, work: Works) -> dict[str, int]:
    """Collective -> how often every rank of the group calls it."""
    work = work_of(plan.matrices[bucket.matrices[0]], work)
    match bucket.scheme:
        case "owner":
            return {"all_to_all": 2}
        case "duplicated" | "share":
            return {"all_gather": 1}
        case "distributed":
            return {"all_reduce": 1 + len(work.schedule)}
        case "gram_replicated":
            return {"all_reduce": work.segments}
        case "gram_split":
            rounds, rest = divmod(len(bucket.compute_ranks), plan.matrices[bucket.matrices[0]].ranks)
            calls = {"reduce_scatter": bool(rounds), "all_gather": bool(rounds), "reduce": rest, "broadcast": rest}
            return {name: of_segment * work.segments for name, of_segment in calls.items() if of_segment}
        case _:
            return {}


def bucket_bytes(plan: Plan, bucket: Bucket, rank: int, work: Works) -> dict[str, int]:
    """Collective -> bytes that one rank of the bucket's group sends in all its calls.

    - ``owner``: there each rank sends its shard of a matrix to its owner, and back each owner the other ranks' shards.
    - ``duplicated``: all shards are padded to the largest one.
    - ``distributed``: the squared norms, then in each step the Gram matrices of the dimension that is not cut.
    - ``gram_split``: the matrices of full rounds in one buffer, each of the rest by itself.
    - ``share``: whole matrices, padded to equally many on every rank.
    """
    matrix, count = plan.matrices[bucket.matrices[0]], len(bucket.matrices)
    ranks, rectangles = matrix.ranks, matrix.rectangles
    if bucket.scheme == "owner":
        (rows, cols), own, owned = matrix.shape, rectangles[rank].numel, bucket.compute_ranks.count(rank)
        return {"all_to_all": ((count - owned) * own + owned * (rows * cols - own)) * matrix.itemsize}
    if bucket.scheme == "duplicated":
        largest = max(rectangle.numel for rectangle in rectangles)
        return {"all_gather": traffic.all_gather(largest * count * matrix.itemsize, ranks)}
    if bucket.scheme == "share":
        (rows, cols), on_one = matrix.shape, -(-count // ranks)
        return {"all_gather": traffic.all_gather(on_one * rows * cols * matrix.itemsize, ranks)}
    if bucket.scheme in ("local", "blockwise"):
        return {}
    work = work_of(matrix, work)
    gram = _kept_side(matrix) ** 2 * work.gram_itemsize
    sums = traffic.all_reduce(count * gram, ranks)
    if bucket.scheme == "distributed":
        return {"all_reduce": traffic.all_reduce(count * NORM_BYTES, ranks) + len(work.schedule) * sums}
    if bucket.scheme == "gram_replicated":
        return {"all_reduce": work.segments * sums}
    full, rest = in_rounds(bucket.compute_ranks, ranks)
    roots = [bucket.compute_ranks[index] for index in rest]
    sent = {
        "reduce_scatter": traffic.reduce_scatter(len(full) * gram, ranks),
        "all_gather": traffic.all_gather(len(full) // ranks * gram, ranks),
        "reduce": sum(traffic.reduce(gram, rank, root) for root in roots),
        "broadcast": sum(traffic.broadcast(gram, rank, root, ranks) for root in roots),
    }
    return {name: work.segments * sent[name] for name in bucket_calls(plan, bucket, work)}


def rank_cost(plan: Plan, bucket: Bucket, rank: int, work: Works, rates: Rates = DEFAULT_RATES) -> Cost:
    """What a bucket costs one rank of its group."""
    flops = bucket_flops(plan, bucket, rank, work)
    sent = sum(bucket_bytes(plan, bucket, rank, work).values())
    calls = sum(bucket_calls(plan, bucket, work).values())
    return Cost(flops, sent, calls, flops / rates.flops + sent / rates.bytes + calls * rates.latency)


def bucket_cost(plan: Plan, bucket: Bucket, work: Works, rates: Rates = DEFAULT_RATES) -> Cost:
    """What a bucket costs the busiest rank of its group."""
    return _busiest(_rank_costs(plan, bucket, work, rates))


def plan_cost(plan: Plan, work: Works, rates: Rates = DEFAULT_RATES) -> Cost:
    """What a plan costs: the busiest rank of each group over all of its buckets, summed over the groups.

    Less than the sum of its buckets where different ranks are busy with them.
    """
    groups: dict[tuple[str, int], list[Cost]] = {}
    for bucket in plan.buckets:
        matrix = plan.matrices[bucket.matrices[0]]
        before = groups.setdefault((matrix.group, matrix.ranks), [Cost()] * matrix.ranks)
        costs = _rank_costs(plan, bucket, work, rates)
        groups[matrix.group, matrix.ranks] = [a + b for a, b in zip(before, costs, strict=True)]
    return sum((_busiest(costs) for costs in groups.values()), Cost())


def _rank_costs(plan: Plan, bucket: Bucket, work: Works, rates: Rates) -> list[Cost]:
    """What a bucket costs each rank; computed once for ranks with as much to do, of which there may be hundreds."""
    owned = Counter(bucket.compute_ranks)
    known: dict[tuple[Shape, int, int], Cost] = {}
    costs = []
    rectangles = plan.matrices[bucket.matrices[0]].rectangles
    for rank, rectangle in enumerate(rectangles):
        # what a rank passes on of the rest of gram_split depends on the rank after it
        kind = (rectangle.shape, owned[rank], owned[(rank + 1) % len(rectangles)])
        if kind not in known:
            known[kind] = rank_cost(plan, bucket, rank, work, rates)
        costs.append(known[kind])
    return costs


def _busiest(costs: list[Cost]) -> Cost:
    return Cost(
        max(cost.flops for cost in costs),
        max(cost.bytes for cost in costs),
        max(cost.collectives for cost in costs),
        max(cost.seconds for cost in costs),
    )


def _kept_dim(matrix: Matrix) -> int:
    """The dimension that is not cut, of a matrix with shards along one."""
    cut = cut_dimension(matrix.shape, matrix.rectangles)
    if cut is None:
        raise ValueError(f"{matrix.name!r} is not cut along one dimension, which its scheme needs")
    return 1 - cut


def _kept_side(matrix: Matrix) -> int:
    """Rows of the Gram matrix that the ranks sum."""
    return matrix.shape[_kept_dim(matrix)]
