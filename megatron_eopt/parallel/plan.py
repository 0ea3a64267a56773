"""What a step does: buckets of matrices and their schemes.

Pure Python, from shapes, shards and settings alone: the same on every rank, also without a process group.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from itertools import chain, product, zip_longest
from typing import Any, get_args

from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.parallel.cost import (
    DEFAULT_RATES,
    Costs,
    Rates,
    Works,
    cube_flops,
    largest_iteration,
    plan_cost,
    whole_flops,
    work_of,
)
from megatron_eopt.parallel.records import Bucket, Matrix, Plan, Scheme, TpMode, cut_dimension, grouped
from megatron_eopt.parallel.workspace import DEFAULT_WORKSPACE, Workspace, chunk_bytes, in_chunks

REPLICATED_ROWS = 1024  # most rows of a Gram matrix that every rank computes: to split it takes more collectives

SMALL_ENTRIES = 128 * 128  # most entries of a matrix that every rank may compute to save a collective

SHARED_PARTS = 4  # of a bucket, so that the first results leave before all are computed


def validate_tp_mode(tp_mode: str) -> None:
    """Raise ``ValueError`` for an unknown mode."""
    check_choice("tp_mode", tp_mode, get_args(TpMode))


def make_plan(
    matrices: Iterable[Matrix],
    mode: TpMode,
    work: Works,
    rates: Rates = DEFAULT_RATES,
    share_groups: Set[str] = frozenset({"dp"}),
    workspace: Workspace = DEFAULT_WORKSPACE,
    parameters: Sequence[int] | None = None,
) -> Plan:
    """The plan of a list of matrices, on every rank.

    Matrices of equal shape, shards, group, item size and iteration are one bucket, or two for a mixed scheme, or more
    where the workspace cannot hold them together (:func:`~megatron_eopt.parallel.workspace.in_chunks`). Under ``owner``
    and ``auto`` uneven shards of one bucket may differ from matrix to matrix:

    - Matrices of one rank, and those without entries, are ``local``.
    - Matrices that every rank of a group holds whole are ``share``, or ``local`` if the group is not to share.
    - Matrices that are cut and held in several copies go by ``owner``, and so do those whose shards differ in a bucket.
    - Other shards go by the scheme that is named; by ``owner`` where ``distributed`` or ``gram`` should not serve them
      (the short side is cut, so the Gram matrix would be that of the long one, or the Gram form must not run).
    - ``gram`` is ``gram_split`` for a short side over :data:`REPLICATED_ROWS` where that is predicted to be faster,
      else ``gram_replicated``.
    - ``auto`` minimizes the busiest rank's predicted time over all buckets of a group. B matrices over T ranks may go,
      in this order where two are equal: all by ``owner``; ``floor(B / T) * T`` by ``owner`` and the rest by ``gram``,
      replicated or split, or ``distributed``; all by one of these; and, up to :data:`SMALL_ENTRIES`, by ``duplicated``.
      It starts with ``owner`` everywhere, and with what is best for each bucket alone, and changes one bucket after
      another, the largest matrices first, until none gets better. Of what it found and what it started with it takes
      the fastest, each cut into chunks where the workspace does that.

    Compute ranks are dealt in rounds; the last round of a bucket goes to the ranks with the least to do so far, the
    largest matrices first, so that two ranks differ by at most one matrix. Where shards differ, a rank gets matrices of
    which it holds much. A chunk executes first the buckets that exchange, the most expensive first, then those that
    fill the waiting.

    ``parameters`` has the number of each matrix's parameter, ascending, by default another for each; ``share_groups``
    are labels of groups whose whole matrices are shared out. Raises ``ValueError`` for an unknown mode, two matrices of
    one name, shards that do not tile copies of their matrix, and groups of different sizes under one label.
    """
    validate_tp_mode(mode)
    draft = Plan(tuple(matrices), ())
    _check(draft.matrices)
    if parameters is None:
        parameters = range(len(draft.matrices))
    costs = Costs(draft, work, rates)

    def kind(index: int) -> tuple[Any, ...]:
        m = draft.matrices[index]
        rectangles = () if mode in ("auto", "owner") and m.uneven else m.rectangles
        flops = whole_flops(m.shape, work_of(m, work))
        return -flops, m.group, m.shape, rectangles, m.itemsize, m.iteration, m.ranks

    def order(bucket: Bucket) -> tuple[int, bool, float]:
        idle = bucket.scheme in ("local", "blockwise")
        return bucket.chunk, idle, -costs.of_bucket(bucket).seconds

    def cut(of_groups: Sequence[list[Bucket]]) -> list[Bucket]:
        buckets = list(chain(*of_groups))
        chunk_of = _chunks(draft, sorted(buckets, key=order), work, workspace, parameters)
        if not chunk_of:
            return buckets
        cut_buckets = list[Bucket]()
        for of_group in of_groups:
            cut_buckets += _with_compute_ranks(draft, _cut(of_group, chunk_of), work)
        return cut_buckets

    def seconds(of_groups: Sequence[list[Bucket]]) -> float:
        return costs.of_buckets(cut(of_groups)).seconds

    # from here on the order does not depend on that of the parameters
    options: dict[str, dict[int, list[list[Option]]]] = {}  # by label and number of ranks
    for _, indices in sorted(grouped(range(len(draft.matrices)), kind).items()):
        m = draft.matrices[indices[0]]
        of_kind = _options(draft, tuple(indices), mode, work, m.group in share_groups)
        options.setdefault(m.group, {}).setdefault(m.ranks, []).append(of_kind)
    of_groups = list[list[Bucket]]()
    for _, by_ranks in sorted(options.items()):
        best = [_best(draft, of_ranks, work, costs) for _, of_ranks in sorted(by_ranks.items())]
        # groups of one label share chunks, and what is best in one chunk need not be best in several
        quickest = min(product(*best), key=seconds)
        of_groups += quickest
    parts = list[Bucket]()
    for bucket in cut(of_groups):
        parts += _in_parts(bucket, draft.one_of(bucket).ranks)
    return replace(draft, buckets=tuple(sorted(parts, key=order)))


def _chunks(
    draft: Plan,
    buckets: Sequence[Bucket],
    work: Works,
    workspace: Workspace,
    parameters: Sequence[int],
) -> dict[int, int]:
    """Each matrix's chunk, label by label, in the order of execution; empty if all fit."""
    of_labels = grouped(buckets, lambda bucket: draft.one_of(bucket).group)
    chunk_of: dict[int, int] = {}
    for of_label in of_labels.values():
        largest = largest_iteration([draft.matrices[i] for bucket in of_label for i in bucket.matrices], work)
        alone = replace(draft, buckets=tuple(of_label))
        first = 1 + max(chunk_of.values(), default=-1)
        for i, chunk in in_chunks(alone, parameters, workspace, largest).items():
            chunk_of[i] = first + chunk
    together = sum(chunk_bytes(replace(draft, buckets=tuple(buckets)), workspace))
    fit = together <= workspace.for_chunks(largest_iteration(draft.matrices, work))
    one_each = len(set(chunk_of.values())) == len(of_labels)
    return {} if fit and one_each and not workspace.state else chunk_of


def _cut(buckets: Sequence[Bucket], chunk_of: Mapping[int, int]) -> list[Bucket]:
    found = []
    for bucket in buckets:
        for chunk, indices in sorted(grouped(bucket.matrices, chunk_of.__getitem__).items()):
            found.append(Bucket(tuple(indices), bucket.scheme, (), chunk))
    return found


Option = tuple[Bucket, ...]  # a way to serve equal matrices, without compute ranks


def _options(
    draft: Plan,
    indices: tuple[int, ...],
    mode: TpMode,
    work: Works,
    share: bool,
) -> list[Option]:
    """Ways to serve equal matrices, by preference."""
    matrix = draft.matrices[indices[0]]

    def by(*schemes: Scheme) -> list[Option]:
        return [(Bucket(indices, scheme),) for scheme in schemes]

    if matrix.ranks == 1 or 0 in matrix.shape:
        return by("local")
    if not matrix.sharded:
        return by("share" if share else "local")
    if matrix.copies > 1:
        return by("owner")
    if matrix.uneven and any(draft.matrices[i].rectangles != matrix.rectangles for i in indices):
        return by("owner")
    if mode in ("blockwise", "duplicated", "owner"):
        return by(mode)
    cut = cut_dimension(matrix.shape, matrix.rectangles)
    sums: list[Scheme] = []
    if cut is not None and matrix.shape[cut] == max(matrix.shape):
        if mode != "distributed" and work_of(matrix, work).restarts is not None:
            sums.append("gram_replicated")
            if min(matrix.shape) > REPLICATED_ROWS:
                sums.append("gram_split")
        if mode != "gram":
            sums.append("distributed")
    if mode != "auto":
        return by(*sums) or by("owner")
    options = by("owner")
    rest = len(indices) % matrix.ranks
    if 0 < rest < len(indices):
        first = Bucket(indices[:-rest], "owner")
        for scheme in sums:
            options.append((first, Bucket(indices[-rest:], scheme)))
    options += by(*sums)
    if matrix.shape[0] * matrix.shape[1] <= SMALL_ENTRIES:
        options += by("duplicated")
    return options


def _best(
    draft: Plan,
    options: Sequence[list[Option]],
    work: Works,
    costs: Costs,
) -> list[list[Bucket]]:
    """Options of a group with compute ranks, the quickest first."""

    def serve(picked: Sequence[Option]) -> list[Bucket]:
        return _with_compute_ranks(draft, list(chain(*picked)), work)

    def seconds(picked: Sequence[Option]) -> float:
        return costs.of_buckets(serve(picked)).seconds

    def improved(picked: list[Option]) -> list[Option]:
        least = seconds(picked)
        before = float("inf")
        while least < before:
            before = least
            for i, choices in enumerate(options):
                for choice in choices:
                    if choice is picked[i]:
                        continue
                    trial = list(picked)
                    trial[i] = choice
                    needed = seconds(trial)
                    if needed < least:
                        picked = trial
                        least = needed
        return picked

    preferred = [choices[0] for choices in options]
    quickest = [min(choices, key=lambda choice: seconds([choice])) for choices in options]
    better = sorted([improved(preferred), improved(quickest)], key=seconds)
    found = list[list[Option]]()
    for picked in (*better, preferred, quickest):
        if picked not in found:
            found.append(picked)
    return [serve(picked) for picked in found]


def _with_compute_ranks(plan: Plan, buckets: Sequence[Bucket], work: Works) -> list[Bucket]:
    """A group's buckets with compute ranks, the largest matrices first."""
    ranks = plan.matrices[buckets[0].matrices[0]].ranks
    load = [0.0] * ranks
    done = list(buckets)

    def flops(bucket: Bucket) -> float:
        count = cube_flops if bucket.scheme == "gram_split" else whole_flops
        matrix = plan.one_of(bucket)
        return count(matrix.shape, work_of(matrix, work))

    for i in sorted(range(len(buckets)), key=lambda i: -flops(buckets[i])):
        bucket = buckets[i]
        if bucket.scheme not in ("owner", "gram_split", "share"):
            continue
        rounds, rest = divmod(len(bucket.matrices), ranks)
        by_load = sorted(range(ranks), key=load.__getitem__)  # of equals the first
        last = sorted(by_load[:rest])
        for rank in last:
            load[rank] += flops(bucket)
        done[i] = replace(bucket, compute_ranks=_where_held(plan, bucket, (*range(ranks),) * rounds + (*last,)))
    return done


def _where_held(plan: Plan, bucket: Bucket, compute_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Compute ranks, moved to the entries where shards differ."""
    alike = grouped(bucket.matrices, lambda i: plan.matrices[i].held)
    if len(alike) == 1 or not plan.one_of(bucket).uneven:
        return compute_ranks
    # in an order that does not depend on that of the parameters, but for matrices that lie alike
    kinds = sorted(alike)
    waiting = [deque(alike[held]) for held in kinds]
    room = Counter(compute_ranks)
    holders = []
    for kind, held in enumerate(kinds):
        holders += [(-entries, rank, kind) for rank, entries in held]
    rank_of = dict[int, int]()
    for _, rank, kind in sorted(holders):
        while room[rank] and waiting[kind]:
            rank_of[waiting[kind].popleft()] = rank
            room[rank] -= 1
    rank_of |= zip(chain(*waiting), sorted(room.elements()), strict=True)
    return tuple(rank_of[i] for i in bucket.matrices)


def _check(matrices: Sequence[Matrix]) -> None:
    names: set[str] = set()
    sizes: dict[str, int] = {}
    for matrix in matrices:
        name = matrix.name
        if name in names:
            raise ValueError(f"two matrices have the name {name!r}")
        names.add(name)
        if matrix.ranks > 1:
            others = sizes.setdefault(matrix.group, matrix.ranks)
            if others != matrix.ranks:
                raise ValueError(f"{name!r} has {matrix.ranks} shards, others of group {matrix.group!r} have {others}")
        # shards have as many entries as all copies
        entries = sum(rectangle.numel for rectangle in matrix.rectangles)
        rows, cols = matrix.shape
        if entries != matrix.copies * rows * cols or matrix.ranks % matrix.copies:
            raise ValueError(f"the shards of {name!r} do not tile its shape {matrix.shape}: {list(matrix.rectangles)}")


def _in_parts(bucket: Bucket, ranks: int) -> list[Bucket]:
    """Up to :data:`SHARED_PARTS` buckets of whole rounds, under ``share``."""
    if bucket.scheme != "share":
        return [bucket]
    rounds = -(-len(bucket.matrices) // ranks)
    size = -(-rounds // SHARED_PARTS) * ranks
    parts = []
    for start in range(0, len(bucket.matrices), size):
        part = slice(start, start + size)
        parts.append(replace(bucket, matrices=bucket.matrices[part], compute_ranks=bucket.compute_ranks[part]))
    return parts


@lru_cache
def digest(value: tuple[Any, ...]) -> str:
    """SHA-256 of a fact of many numbers, which many matrices share."""
    return sha256(repr(value).encode()).hexdigest()


def fingerprint(plan: Plan, label: str | None = None) -> str:
    """SHA-256 of a plan, or of what a group shares."""
    facts = [(what, digest(x) if isinstance(x, tuple) else x) for what, x in _facts(plan, label)]
    return sha256(repr(facts).encode()).hexdigest()


def first_difference(mine: Plan, other: Plan, label: str | None = None) -> str | None:
    """The first fact in which two plans differ."""
    ours = dict(_facts(mine, label))
    theirs = dict(_facts(other, label))
    for what in ours if len(ours) >= len(theirs) else theirs:
        x = ours.get(what)
        y = theirs.get(what)
        if x != y:
            return f"{what} {x!r} in the one and {y!r} in the other"
    return None


def _facts(plan: Plan, label: str | None) -> Iterator[tuple[str, Any]]:
    matrices = [matrix for matrix in plan.matrices if label in (None, matrix.group)]
    buckets = [bucket for bucket in plan.buckets if label in (None, plan.one_of(bucket).group)]
    for number, matrix in enumerate(matrices):
        yield f"matrix {number} is", matrix.name
    for matrix in matrices:
        for what in ("shape", "rectangles", "group", "itemsize", "iteration"):
            yield f"{matrix.name!r} has the {what}", getattr(matrix, what)
    named = [tuple(plan.matrices[i].name for i in bucket.matrices) for bucket in buckets]
    for bucket, names in zip(buckets, named, strict=True):
        for name, compute_rank in zip_longest(names, bucket.compute_ranks):
            yield f"{name!r} has the scheme", bucket.scheme
            yield f"{name!r} has the compute rank", compute_rank
    for number, names in enumerate(named):
        yield f"bucket {number} begins with", names[0]
        yield f"bucket {number} has the matrices", names


def sharing_pays(plan: Plan, works: Works, rates: Rates) -> bool:
    """Whether copies are predicted to work faster together than alone."""
    if not any(matrix.copies > 1 and matrix.sharded for matrix in plan.matrices):
        return True
    alone = []
    for matrix in plan.matrices:
        if matrix.sharded:
            matrix = replace(matrix, rectangles=matrix.rectangles[matrix.copy_of(0)])
        alone.append(matrix)
    seconds = plan_cost(make_plan(alone, "auto", works, rates), works, rates).seconds
    return seconds > plan_cost(plan, works, rates).seconds
