"""What a bucket costs: operations, bytes and collectives, exactly as a step counts them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import add, sub
from typing import NamedTuple

import torch

from megatron_eopt.orthogonalize.forms import Iteration
from megatron_eopt.orthogonalize.newton_schulz import Form, NewtonSchulz
from megatron_eopt.parallel.collectives import sent_bytes
from megatron_eopt.parallel.plan_records import Bucket, Matrix, Plan, Scheme, grouped, in_rounds
from megatron_eopt.parallel.rectangles import Shape, cut_dimension
from megatron_eopt.parallel.workspace import BYTES_OF_ENTRY, IN_FLIGHT, Workspace, chunk_bytes

# The form that a scheme asks for; the others take the cheaper one.
FORMS: Mapping[Scheme, Form] = {"gram_replicated": "gram", "gram_split": "gram", "distributed": "standard"}


@dataclass(frozen=True)
class Work:
    """An iteration whose costs are counted: those of what a step runs."""

    settings: NewtonSchulz
    dtype: torch.dtype = torch.float32  # the widest in which matrices are exchanged
    device: torch.device | str = "cpu"

    def compiled(self, shape: Shape, scheme: Scheme = "local") -> Iteration:
        """The iteration of matrices of a shape under a scheme."""
        return self.settings.compile(shape, self.dtype, self.device, FORMS.get(scheme, "auto"))


Works = Mapping[str, Work]  # iterations by name


class Cost(NamedTuple):
    """Cost of a rank, or the largest figures of several."""

    flops: float = 0.0
    bytes: int = 0  # sent
    collectives: int = 0


def whole_flops(shape: Shape, work: Work) -> float:
    """Operations of one whole matrix."""
    rows, cols = sorted(shape)
    return work.compiled(shape).flops(rows, cols)


def largest_iteration(matrices: Iterable[Matrix], works: Works) -> int:
    """Bytes of the largest iteration of a matrix, in any form that it may take."""
    largest = 0
    for shape, work in {(matrix.shape, works[matrix.iteration]) for matrix in matrices}:
        rows, cols = sorted(shape)
        forms = [work.compiled(shape)]
        if work.settings.restarts is not None:
            forms.append(work.compiled(shape, "gram_split"))
        largest = max(largest, *(form.bytes(rows, cols) for form in forms))
    return largest


def cube_flops(shape: Shape, work: Work) -> float:
    """Operations of the Gram form on its Gram matrices."""
    return work.compiled(shape, "gram_split").flops(min(shape), 0)


def bucket_flops(
    plan: Plan,
    bucket: Bucket,
    rank: int,
    works: Works,
) -> float:
    """Operations of one rank of the bucket's group."""
    matrix = plan.one_of(bucket)
    work = works[matrix.iteration]
    shape = matrix.shape
    rectangle = matrix.rectangles[rank]
    count = len(bucket.matrices)
    owned = bucket.compute_ranks.count(rank)
    if bucket.scheme in ("owner", "share") or (bucket.scheme == "local" and bucket.compute_ranks):
        return owned * whole_flops(shape, work)
    if bucket.scheme in ("local", "duplicated"):
        return count * whole_flops(shape, work)
    if bucket.scheme == "blockwise":
        return count * whole_flops(rectangle.shape, work)
    dim = _kept_dim(matrix)
    kept = shape[dim]
    cut = rectangle.shape[1 - dim]
    of_one = work.compiled(shape, bucket.scheme).flops(kept, cut)
    if bucket.scheme == "distributed":
        return count * of_one
    cubes = cube_flops(shape, work)
    products = of_one - cubes
    computed = count if bucket.scheme == "gram_replicated" else owned
    return count * products + computed * cubes


def bucket_traffic(
    plan: Plan,
    bucket: Bucket,
    rank: int,
    works: Works,
) -> dict[str, tuple[int, int]]:
    """Collective -> number of calls, and bytes this rank sends.

    - ``owner``: each rank of the compute rank's copy sends its shard of a matrix there; all others get shards back.
    - ``duplicated``: all shards are padded to the largest one.
    - ``distributed``: the squared norms, then in each step the Gram matrices of the dimension that is not cut.
    - ``gram_split``: the matrices of full rounds in one buffer, each of the rest by itself.
    - ``share``: whole matrices, padded to equally many on every rank.
    """
    matrix = plan.one_of(bucket)
    count = len(bucket.matrices)
    ranks = matrix.ranks
    if bucket.scheme in ("local", "blockwise"):
        return {}
    if bucket.scheme == "owner":
        return {"all_to_all": (2, _sent_by_owner(plan, bucket)[rank])}
    if bucket.scheme == "duplicated":
        entries = count * max(rectangle.numel for rectangle in matrix.rectangles)
        return {"all_gather": (1, sent_bytes("all_gather", entries * matrix.itemsize, ranks))}
    if bucket.scheme == "share":
        most = max(Counter(bucket.compute_ranks).values())
        of_one = matrix.shape[0] * matrix.shape[1] * matrix.itemsize
        return {"all_gather": (1, sent_bytes("all_gather", most * of_one, ranks))}
    work = works[matrix.iteration]
    gram = matrix.shape[_kept_dim(matrix)] ** 2 * max(4, matrix.itemsize)  # summed in fp32, or fp64
    sums = sent_bytes("all_reduce", count * gram, ranks)
    if bucket.scheme == "distributed":
        steps = len(work.settings.schedule)
        norms = sent_bytes("all_reduce", count * 8, ranks)  # squared, in fp64
        return {"all_reduce": (1 + steps, norms + steps * sums)}
    segments = len(work.settings.restarts or ()) + 1
    if bucket.scheme == "gram_replicated":
        return {"all_reduce": (segments, segments * sums)}
    full, rest = in_rounds(bucket.compute_ranks, ranks)
    traffic = {}
    if full:
        scattered = sent_bytes("reduce_scatter", len(full) * gram, ranks)
        gathered = sent_bytes("all_gather", len(full) // ranks * gram, ranks)
        traffic["reduce_scatter"] = (segments, segments * scattered)
        traffic["all_gather"] = (segments, segments * gathered)
    if rest:
        for name in ("reduce", "broadcast"):
            sent = sum(sent_bytes(name, gram, ranks, rank, bucket.compute_ranks[i]) for i in rest)
            traffic[name] = (segments * len(rest), segments * sent)
    return traffic


def _sent_by_owner(plan: Plan, bucket: Bucket) -> list[int]:
    """Bytes that each rank sends under ``owner``, both ways."""
    matrix = plan.one_of(bucket)
    owned = Counter(bucket.compute_ranks)
    ranks = matrix.ranks // matrix.copies  # of a copy, whose shards go to the compute ranks among them
    near = Counter(rank // ranks for rank in bucket.compute_ranks)
    size = matrix.shape[0] * matrix.shape[1]
    sent = [owned[rank] * matrix.copies * size for rank in range(matrix.ranks)]
    if not matrix.uneven:  # so all of the bucket lie alike
        for rank, held in matrix.held:
            sent[rank] += (near[rank // ranks] - 2 * owned[rank]) * held
    else:
        for i, compute_rank in zip(bucket.matrices, bucket.compute_ranks, strict=True):
            for rank, held in plan.matrices[i].held:
                if rank // ranks == compute_rank // ranks:
                    sent[rank] += -held if rank == compute_rank else held
    return [entries * matrix.itemsize for entries in sent]


def cost_of(flops: float, traffic: Mapping[str, tuple[int, int]]) -> Cost:
    """The cost of operations, and of (calls, bytes) of collectives."""
    calls = sum(calls for calls, _ in traffic.values())
    sent = sum(sent for _, sent in traffic.values())
    return Cost(flops, sent, calls)


class Costs:
    """What buckets of a plan's matrices cost, each computed once."""

    def __init__(self, plan: Plan, works: Works) -> None:
        self._plan = plan
        self._works = works
        self._known: dict[Bucket, list[Cost]] = {}

    def of_bucket(self, bucket: Bucket) -> Cost:
        """What a bucket costs the busiest rank of its group."""
        return _busiest(set(self._of_ranks(bucket)))

    def of_buckets(self, buckets: Iterable[Bucket]) -> Cost:
        """Cost of each group's busiest rank, summed over the groups."""
        of_groups = list[Cost]()
        for of_group in grouped(buckets, self._group).values():
            costs = set(zip(*map(self._of_ranks, of_group), strict=True))  # many ranks have the same work
            of_groups.append(_busiest(map(_sum, costs)))
        return _sum(of_groups)

    def flops_of_ranks(self, buckets: Iterable[Bucket]) -> list[float]:
        """Operations of each rank of a group, over all of its buckets."""
        of_buckets = [[cost.flops for cost in self._of_ranks(bucket)] for bucket in buckets]
        return [sum(of_rank) for of_rank in zip(*of_buckets, strict=True)]

    def _of_ranks(self, bucket: Bucket) -> list[Cost]:
        if bucket not in self._known:
            self._known[bucket] = _rank_costs(self._plan, bucket, self._works)
        return self._known[bucket]

    def _group(self, bucket: Bucket) -> tuple[str, int]:
        matrix = self._plan.one_of(bucket)
        return matrix.group, matrix.ranks


def plan_cost(plan: Plan, works: Works) -> Cost:
    """Cost of each group's busiest rank, summed over the groups."""
    return Costs(plan, works).of_buckets(plan.buckets)


def step_bytes(plan: Plan, works: Works, workspace: Workspace) -> int:
    """Most temporaries of a step on its busiest rank."""
    of_chunks, of_iterations, of_hooks = step_parts(plan, works, workspace)
    return of_chunks + max(of_iterations, of_hooks)  # one of these at a time


def step_parts(plan: Plan, works: Works, workspace: Workspace) -> tuple[int, int, int]:
    """Most temporaries of a step: of chunks, iterations and hooks."""
    largest = largest_iteration(plan.matrices, works)
    room = workspace.for_chunks(largest)
    chunks = chunk_bytes(plan, workspace)
    if workspace.state and chunks:  # one chunk is at work, beside the state of two
        without = chunk_bytes(plan, replace(workspace, kept=workspace.kept - workspace.state))
        chunks = [max(without) + 2 * max(map(sub, chunks, without))]
    most = 0
    for first in range(len(chunks)):
        held = 0
        for needed in chunks[first : first + IN_FLIGHT]:
            if held and held + needed > room:
                break
            held += needed
        most = max(most, held)
    of_stacks = 0
    for bucket in plan.buckets:
        of_one = largest_iteration([plan.one_of(bucket)], works)
        of_stacks = max(of_stacks, len(bucket.matrices) * of_one)
    entries = [max(rectangle.numel for rectangle in matrix.rectangles) for matrix in plan.matrices]
    of_hooks = max(workspace.iteration, max(entries, default=0) * BYTES_OF_ENTRY)
    return most, max(largest, min(of_stacks, workspace.iteration)), min(of_hooks, sum(entries) * BYTES_OF_ENTRY)


def _sum(costs: Iterable[Cost]) -> Cost:
    """Add left to right: sum() rounds otherwise, which changes saved plans."""
    return reduce(lambda a, b: Cost(*map(add, a, b)), costs, Cost())


def _busiest(costs: Iterable[Cost]) -> Cost:
    return Cost(*map(max, zip(*costs, strict=True)))


def _rank_costs(plan: Plan, bucket: Bucket, works: Works) -> list[Cost]:
    """A bucket's cost for each rank, computed once for equals."""
    matrix = plan.one_of(bucket)
    owned = Counter(bucket.compute_ranks)
    by_owner = bucket.scheme == "owner"
    sent = _sent_by_owner(plan, bucket) if by_owner else [0] * matrix.ranks
    known: dict[tuple[Shape, int, int, int], Cost] = {}
    costs = []
    for rank, rectangle in enumerate(matrix.rectangles):
        # what a rank passes on of the rest of gram_split depends on the rank after it
        kind = (rectangle.shape, owned[rank], owned[(rank + 1) % matrix.ranks], sent[rank])
        if kind not in known:
            if by_owner:
                traffic = {"all_to_all": (2, sent[rank])}
            else:
                traffic = bucket_traffic(plan, bucket, rank, works)
            known[kind] = cost_of(bucket_flops(plan, bucket, rank, works), traffic)
        costs.append(known[kind])
    return costs


def _kept_dim(matrix: Matrix) -> int:
    """The dimension of summed Gram matrices, which is not cut."""
    cut = cut_dimension(matrix.shape, matrix.rectangles)
    assert cut is not None, "a plan has this scheme only for matrices that are cut along one dimension"
    return 1 - cut
