"""What a step does: buckets of matrices and their schemes.

Pure Python, from shapes, shards and settings alone: the same on every rank, also without a process group.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
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
from megatron_eopt.parallel.records import (
    Bucket,
    Matrix,
    Plan,
    Scheme,
    TpMode,
    cut_dimension,
    whole,
)
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
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, m in enumerate(draft.matrices):
        rectangles = () if mode in ("auto", "owner") and m.uneven else m.rectangles
        flops = whole_flops(m.shape, work_of(m, work))
        kind = -flops, m.group, m.shape, rectangles, m.itemsize, m.iteration, m.ranks
        alike.setdefault(kind, []).append(index)

    costs = Costs(draft, work, rates)
    # from here on the order does not depend on that of the parameters
    kinds = [(draft.matrices[alike[kind][0]], tuple(alike[kind])) for kind in sorted(alike)]

    def order(bucket: Bucket) -> tuple[int, bool, float]:
        idle = bucket.scheme in ("local", "blockwise")
        return bucket.chunk, idle, -costs.of_bucket(bucket).seconds

    numbers = range(len(draft.matrices)) if parameters is None else parameters

    def cut(of_groups: Sequence[list[Bucket]]) -> Sequence[list[Bucket]]:
        chunk_of = _chunks(draft, list(chain(*of_groups)), order, work, workspace, numbers)
        if not chunk_of:
            return of_groups
        return [_with_compute_ranks(draft, list(_cut(buckets, chunk_of)), work) for buckets in of_groups]

    def seconds(of_groups: Sequence[list[Bucket]]) -> float:
        return costs.of_buckets(chain(*cut(of_groups))).seconds

    of_labels: dict[str, list[list[list[Bucket]]]] = {}
    for group, ranks in sorted({(m.group, m.ranks) for m, _ in kinds}):
        of_this_group = [indices for m, indices in kinds if (m.group, m.ranks) == (group, ranks)]
        options = [_options(draft, indices, mode, work, group in share_groups) for indices in of_this_group]
        of_labels.setdefault(group, []).append(_best(draft, options, work, costs))
    # groups of one label share chunks, and what is best in one chunk need not be best in several
    of_groups = chain(*(min(product(*of_label), key=seconds) for of_label in of_labels.values()))
    served = chain(*cut(list(of_groups)))
    parts = chain(*(_in_parts(bucket, draft.matrices[bucket.matrices[0]].ranks) for bucket in served))
    return replace(draft, buckets=tuple(sorted(parts, key=order)))


def _chunks(
    draft: Plan,
    buckets: Sequence[Bucket],
    order: Callable[[Bucket], Any],
    work: Works,
    workspace: Workspace,
    parameters: Sequence[int],
) -> dict[int, int]:
    """Each matrix's chunk, label by label; empty if all fit."""
    of_labels: dict[str, list[Bucket]] = {}
    for bucket in sorted(buckets, key=order):
        of_labels.setdefault(draft.matrices[bucket.matrices[0]].group, []).append(bucket)
    chunk_of: dict[int, int] = {}
    for of_label in of_labels.values():
        largest = largest_iteration([draft.matrices[i] for bucket in of_label for i in bucket.matrices], work)
        alone = replace(draft, buckets=tuple(of_label))
        first = 1 + max(chunk_of.values(), default=-1)
        chunk_of |= {i: first + chunk for i, chunk in in_chunks(alone, parameters, workspace, largest).items()}
    together = sum(chunk_bytes(replace(draft, buckets=tuple(buckets)), workspace))
    fit = together <= workspace.for_chunks(largest_iteration(draft.matrices, work))
    return {} if fit and not workspace.state and len(set(chunk_of.values())) == len(of_labels) else chunk_of


def _cut(buckets: Sequence[Bucket], chunk_of: Mapping[int, int]) -> Iterator[Bucket]:
    for bucket in buckets:
        of_chunks: dict[int, list[int]] = {}
        for i in bucket.matrices:
            of_chunks.setdefault(chunk_of[i], []).append(i)
        for chunk in sorted(of_chunks):
            yield Bucket(tuple(of_chunks[chunk]), bucket.scheme, (), chunk)


def _options(draft: Plan, indices: tuple[int, ...], mode: TpMode, work: Works, share: bool) -> list[tuple[Bucket, ...]]:
    """Ways to serve equal matrices, by preference, without compute ranks."""
    matrix = draft.matrices[indices[0]]

    def by(*schemes: Scheme) -> list[tuple[Bucket, ...]]:
        return [(Bucket(indices, scheme),) for scheme in schemes]

    if matrix.ranks == 1 or 0 in matrix.shape:
        return by("local")
    if all(rectangle == whole(matrix.shape) for rectangle in matrix.rectangles):
        return by("share" if share else "local")
    if matrix.uneven and any(draft.matrices[i].rectangles != matrix.rectangles for i in indices):
        return by("owner")
    cut = cut_dimension(matrix.shape, matrix.rectangles)
    if matrix.copies > 1:
        return by("owner")
    if mode in ("blockwise", "duplicated", "owner"):
        return by(mode)
    along_long_side = cut is not None and matrix.shape[cut] == max(matrix.shape)
    if mode == "distributed":
        return by("distributed" if along_long_side else "owner")
    grams: list[Scheme] = []
    if work_of(matrix, work).restarts is not None and along_long_side:
        grams.append("gram_replicated")
        if min(matrix.shape) > REPLICATED_ROWS:
            grams.append("gram_split")
    if mode == "gram":
        return by(*grams) or by("owner")
    sums: list[Scheme] = [*grams, "distributed"] if along_long_side else grams
    options = by("owner")
    rest = len(indices) % matrix.ranks
    if 0 < rest < len(indices):
        first = Bucket(indices[:-rest], "owner")
        last = indices[-rest:]
        options += [(first, Bucket(last, scheme)) for scheme in sums]
    options += by(*sums)
    if matrix.shape[0] * matrix.shape[1] <= SMALL_ENTRIES:
        options += by("duplicated")
    return options


def _best(draft: Plan, options: Sequence[list[tuple[Bucket, ...]]], work: Works, costs: Costs) -> list[list[Bucket]]:
    """Options of a group with compute ranks, the quickest first."""

    def serve(picked: Sequence[tuple[Bucket, ...]]) -> list[Bucket]:
        return _with_compute_ranks(draft, [bucket for buckets in picked for bucket in buckets], work)

    def seconds(picked: Sequence[tuple[Bucket, ...]]) -> float:
        return costs.of_buckets(serve(picked)).seconds

    def improved(picked: list[tuple[Bucket, ...]]) -> list[tuple[Bucket, ...]]:
        least = seconds(picked)
        before = float("inf")
        while least < before:
            before = least
            for i, choices in enumerate(options):
                before_i = picked[:i]
                after_i = picked[i + 1 :]
                for choice in choices if len(choices) > 1 else ():
                    trial = [*before_i, choice, *after_i]
                    needed = seconds(trial)
                    if needed < least:
                        picked = trial
                        least = needed
        return picked

    quickest = [min(choices, key=lambda choice: seconds([choice])) for choices in options]
    starts = [[choices[0] for choices in options], quickest]
    found = [*sorted(map(improved, starts), key=seconds), *starts]
    return list(map(serve, (picked for i, picked in enumerate(found) if picked not in found[:i])))


def _with_compute_ranks(plan: Plan, buckets: Sequence[Bucket], work: Works) -> list[Bucket]:
    """A group's buckets with compute ranks, the largest matrices first."""
    ranks = plan.matrices[buckets[0].matrices[0]].ranks
    load = [0.0] * ranks
    done = list(buckets)

    def flops(bucket: Bucket) -> float:
        count = cube_flops if bucket.scheme == "gram_split" else whole_flops
        matrix = plan.matrices[bucket.matrices[0]]
        return count(matrix.shape, work_of(matrix, work))

    for i in sorted(range(len(buckets)), key=lambda i: -flops(buckets[i])):
        bucket = buckets[i]
        if bucket.scheme not in ("owner", "gram_split", "share"):
            continue
        rounds, rest = divmod(len(bucket.matrices), ranks)
        last = sorted(sorted(range(ranks), key=load.__getitem__)[:rest])  # of equals the first
        compute_ranks = (*range(ranks),) * rounds + (*last,)
        for rank in last:
            load[rank] += flops(bucket)
        done[i] = replace(bucket, compute_ranks=_where_held(plan, bucket, compute_ranks))
    return done


def _where_held(plan: Plan, bucket: Bucket, compute_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Compute ranks, moved to the entries where shards differ."""
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for i in bucket.matrices:
        alike.setdefault(plan.matrices[i].held, []).append(i)
    if len(alike) == 1 or not plan.matrices[bucket.matrices[0]].uneven:
        return compute_ranks
    # in an order that does not depend on that of the parameters, but for matrices that lie alike
    waiting = [deque(alike[held]) for held in sorted(alike)]
    room = Counter(compute_ranks)
    rank_of = dict[int, int]()
    held_by = [(-entries, rank, kind) for kind, held in enumerate(sorted(alike)) for rank, entries in held]
    for _, rank, kind in sorted(triple for triple in held_by if room[triple[1]]):
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
        ranks = matrix.ranks
        group = matrix.group
        if name in names:
            raise ValueError(f"two matrices have the name {name!r}")
        names.add(name)
        if ranks > 1 and (others := sizes.setdefault(group, ranks)) != ranks:
            raise ValueError(f"{name!r} has {ranks} shards, others of group {group!r} have {others}")
        if not _tile(matrix):
            raise ValueError(f"the shards of {name!r} do not tile its shape {matrix.shape}: {list(matrix.rectangles)}")


def _tile(matrix: Matrix) -> bool:
    """Whether shards have as many entries as all copies."""
    entries = sum(rectangle.numel for rectangle in matrix.rectangles)
    rows, cols = matrix.shape
    return entries == matrix.copies * rows * cols and matrix.ranks % matrix.copies == 0


def _in_parts(bucket: Bucket, ranks: int) -> list[Bucket]:
    """Up to :data:`SHARED_PARTS` buckets of whole rounds, under ``share``."""
    if bucket.scheme != "share":
        return [bucket]
    rounds = -(-len(bucket.matrices) // ranks)
    size = -(-rounds // SHARED_PARTS) * ranks
    parts = [slice(i, i + size) for i in range(0, len(bucket.matrices), size)]
    return [replace(bucket, matrices=bucket.matrices[x], compute_ranks=bucket.compute_ranks[x]) for x in parts]


@lru_cache
def digest(value: tuple[Any, ...]) -> str:
    """SHA-256 of a fact of many numbers, which many matrices share."""
    return sha256(repr(value).encode()).hexdigest()


def fingerprint(plan: Plan, label: str | None = None) -> str:
    """SHA-256 of a plan, or of what a group shares."""
    facts = [(what, digest(x) if isinstance(x, tuple) else x) for what, x in _facts(plan, label)]
    return sha256(repr(facts).encode()).hexdigest()


def first_difference(mine: Plan, other: Plan, label: str | None = None) -> str | None:
    """The first matrix in which two plans differ, and how."""
    ours = _of_group(mine, label)[0]
    theirs = _of_group(other, label)[0]
    for i, (a, b) in enumerate(zip_longest(ours, theirs)):
        if a is None or b is None:
            return f"{(a or b).name!r} is in the {'second' if a is None else 'first'} only"
        if a.name != b.name:
            return f"matrix {i} is {a.name!r} in the one and {b.name!r} in the other"
    for (what, a_is), (_, b_is) in zip(_facts(mine, label), _facts(other, label), strict=False):
        if a_is != b_is:
            return f"{what} {a_is!r} in the one and {b_is!r} in the other"
    return None


def _of_group(plan: Plan, label: str | None) -> tuple[list[Matrix], list[Bucket]]:
    buckets = [bucket for bucket in plan.buckets if label in (None, plan.matrices[bucket.matrices[0]].group)]
    return [matrix for matrix in plan.matrices if label in (None, matrix.group)], buckets


def _facts(plan: Plan, label: str | None) -> Iterator[tuple[str, Any]]:
    matrices, buckets = _of_group(plan, label)
    for matrix in matrices:
        for what in ("shape", "rectangles", "group", "itemsize", "iteration"):
            yield f"{matrix.name!r} has the {what}", getattr(matrix, what)
    ranks = [(bucket, *pair) for bucket in buckets for pair in zip_longest(bucket.matrices, bucket.compute_ranks)]
    decided = {plan.matrices[i].name: (bucket.scheme, compute_rank) for bucket, i, compute_rank in ranks}
    for matrix in matrices:
        scheme, compute_rank = decided.get(matrix.name, (None, None))  # of a plan that orthogonalizes nothing
        yield f"{matrix.name!r} has the scheme", scheme
        yield f"{matrix.name!r} has the compute rank", compute_rank
    for number, bucket in enumerate(buckets):
        names = tuple(plan.matrices[i].name for i in bucket.matrices)
        yield f"bucket {number} begins with", names[0]
        yield f"bucket {number} has the matrices", names


def sharing_pays(plan: Plan, works: Works, rates: Rates) -> bool:
    """Whether copies are predicted to work faster together than alone."""
    if not any(matrix.copies > 1 and matrix.sharded for matrix in plan.matrices):
        return True
    alone = [replace(m, rectangles=m.rectangles[m.copy_of(0)]) if m.sharded else m for m in plan.matrices]
    seconds = plan_cost(make_plan(alone, "auto", works, rates), works, rates).seconds
    return seconds > plan_cost(plan, works, rates).seconds
