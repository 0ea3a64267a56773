"""What a step does: buckets of matrices and their schemes.

Pure Python, from shapes, shards and settings alone: the same on every rank, also without a process group.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from itertools import chain, product
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
from megatron_eopt.parallel.records import Bucket, Matrix, Plan, Scheme, TpMode, grouped
from megatron_eopt.parallel.rectangles import cut_dimension
from megatron_eopt.parallel.workspace import DEFAULT_WORKSPACE, Workspace, chunk_bytes, in_chunks

REPLICATED_ROWS = 1024  # most rows of a Gram matrix that every rank computes: to split it takes more collectives

SMALL_ENTRIES = 128 * 128  # most entries of a matrix that every rank may compute to save a collective

SHARED_PARTS = 4  # of a bucket, so that the first results leave before all are computed

Option = tuple[Bucket, ...]  # a way to serve equal matrices, without compute ranks


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
    - Matrices that lie whole on one rank, as experts of a stack do, stay there (``local``). Under ``owner`` they are
      dealt as others, and under ``auto`` where that is predicted to be faster.
    - Other shards go by the scheme that is named; by ``owner`` where ``distributed`` or ``gram`` should not serve them
      (the short side is cut, so the Gram matrix would be that of the long one, or the Gram form must not run).
    - ``gram`` is ``gram_split`` for a short side over :data:`REPLICATED_ROWS` where that is predicted to be faster,
      else ``gram_replicated``.
    - ``auto`` minimizes the busiest rank's predicted time over all buckets of a group. B matrices over T ranks may go,
      in this order where two are equal: all by ``owner``; ``local`` where one rank has all of a matrix, the rest by
      ``owner``; ``floor(B / T) * T`` by ``owner`` and the rest by ``gram``, replicated or split, or ``distributed``;
      all by one of these; and, up to :data:`SMALL_ENTRIES`, by ``duplicated``. It starts with ``owner`` everywhere, and
      with what is best for each bucket alone, and changes one bucket after another, the largest matrices first, until
      none gets better. Of what it found and what it started with it takes the fastest, each cut into chunks where the
      workspace does that.

    Compute ranks are dealt in rounds; the last round of a bucket goes to the ranks with the least to do so far, the
    largest matrices first, so that two ranks differ by at most one matrix. Where shards differ, a rank gets matrices of
    which it holds much. A chunk executes first the buckets that exchange, the most expensive first, then those that
    fill the waiting.

    ``parameters`` has the number of each matrix's parameter, ascending, by default another for each; ``share_groups``
    are labels of groups whose whole matrices are shared out. Raises ``ValueError`` for an unknown mode, two matrices of
    one name, shards that do not tile copies of their matrix, and groups of different sizes under one label.
    """
    check_choice("tp_mode", mode, get_args(TpMode))
    draft = Plan(tuple(matrices), ())
    _check(draft.matrices)
    if parameters is None:
        parameters = range(len(draft.matrices))
    planner = _Planner(draft, mode, work, rates, workspace, parameters)
    return replace(draft, buckets=tuple(planner.buckets(share_groups)))


class _Planner:
    """Makes the buckets of the matrices of a draft, which has none yet."""

    def __init__(
        self,
        draft: Plan,
        mode: TpMode,
        work: Works,
        rates: Rates,
        workspace: Workspace,
        parameters: Sequence[int],
    ) -> None:
        self._draft = draft
        self._mode = mode
        self._work = work
        self._workspace = workspace
        self._parameters = parameters
        self._costs = Costs(draft, work, rates)

    def buckets(self, share_groups: Set[str]) -> list[Bucket]:
        """All buckets, in the order of execution."""
        # label -> number of ranks -> the options of each kind of matrices; a matrix of one rank may have any label
        options: dict[str, dict[int, list[list[Option]]]] = {}
        # from here on the order does not depend on that of the parameters
        kinds = grouped(range(len(self._draft.matrices)), self._kind)
        for _, indices in sorted(kinds.items()):
            matrix = self._draft.matrices[indices[0]]
            by_ranks = options.setdefault(matrix.group, {})
            of_kinds = by_ranks.setdefault(matrix.ranks, [])
            of_kinds.append(self._options(tuple(indices), matrix.group in share_groups))
        groups = list[list[Bucket]]()
        for _, by_ranks in sorted(options.items()):
            best = [self._quickest_first(of_kinds) for _, of_kinds in sorted(by_ranks.items())]
            # groups of one label share chunks, and what is best in one chunk need not be best in several
            groups += min(product(*best), key=self._seconds_in_chunks)
        buckets = list[Bucket]()
        for bucket in self._in_chunks(groups):
            buckets += _in_parts(bucket, self._draft.one_of(bucket).ranks)
        return sorted(buckets, key=self._order)

    def _kind(self, index: int) -> tuple[Any, ...]:
        """Equal for matrices that may be in one bucket; the largest come first."""
        matrix = self._draft.matrices[index]
        rectangles = matrix.rectangles
        if (self._mode in ("auto", "owner") and matrix.uneven) or self._stays(matrix):
            rectangles = ()
        return (
            -whole_flops(matrix.shape, work_of(matrix, self._work)),
            matrix.group,
            matrix.shape,
            rectangles,
            matrix.itemsize,
            matrix.iteration,
            matrix.ranks,
        )

    def _order(self, bucket: Bucket) -> tuple[int, bool, float]:
        """By chunk; what exchanges first, the most expensive first."""
        exchanges = bucket.scheme not in ("local", "blockwise")
        return bucket.chunk, not exchanges, -self._costs.of_bucket(bucket).seconds

    def _options(self, indices: tuple[int, ...], share: bool) -> list[Option]:
        """Ways to serve equal matrices, by preference."""
        matrix = self._draft.matrices[indices[0]]
        mode = self._mode

        def by(*schemes: Scheme) -> list[Option]:
            return [(Bucket(indices, scheme),) for scheme in schemes]

        if matrix.ranks == 1 or 0 in matrix.shape:
            return by("local")
        if not matrix.sharded:
            return by("share" if share else "local")
        if matrix.copies > 1:
            return by("owner")
        if self._stays(matrix):
            return by("local")
        options = by("owner")
        if mode == "auto":
            options += self._in_place(indices)
        if matrix.uneven and any(self._draft.matrices[i].rectangles != matrix.rectangles for i in indices):
            return options
        if mode in ("blockwise", "duplicated", "owner"):
            return by(mode)
        sums = self._that_sum(matrix)
        if mode != "auto":
            return by(*sums) or by("owner")
        rest = len(indices) % matrix.ranks
        if 0 < rest < len(indices):
            full_rounds = Bucket(indices[:-rest], "owner")
            for scheme in sums:
                options.append((full_rounds, Bucket(indices[-rest:], scheme)))
        options += by(*sums)
        if matrix.shape[0] * matrix.shape[1] <= SMALL_ENTRIES:
            options += by("duplicated")
        return options

    def _stays(self, matrix: Matrix) -> bool:
        """Whether one rank has all of a matrix, and no mode that may move it was named."""
        return matrix.holder is not None and self._mode in ("duplicated", "distributed", "gram")

    def _in_place(self, indices: Sequence[int]) -> list[Option]:
        """The way on which matrices that lie whole on one rank stay there, if there are any."""
        there = [i for i in indices if self._draft.matrices[i].holder is not None]
        if not there:
            return []
        rest = [i for i in indices if self._draft.matrices[i].holder is None]
        option = [Bucket(tuple(there), "local")]
        if rest:
            option.append(Bucket(tuple(rest), "owner"))
        return [tuple(option)]

    def _that_sum(self, matrix: Matrix) -> list[Scheme]:
        """The mode's schemes that sum Gram matrices of the short side, by preference."""
        cut = cut_dimension(matrix.shape, matrix.rectangles)
        if cut is None or matrix.shape[cut] != max(matrix.shape):
            return []
        schemes = list[Scheme]()
        if self._mode != "distributed" and work_of(matrix, self._work).restarts is not None:
            schemes.append("gram_replicated")
            if min(matrix.shape) > REPLICATED_ROWS:
                schemes.append("gram_split")
        if self._mode != "gram":
            schemes.append("distributed")
        return schemes

    def _quickest_first(self, options: Sequence[list[Option]]) -> list[list[Bucket]]:
        """Buckets of a group of ranks, by predicted time: one option of each kind."""
        preferred = [choices[0] for choices in options]
        quickest = [min(choices, key=lambda choice: self._seconds([choice])) for choices in options]
        better = [self._improved(preferred, options), self._improved(quickest, options)]
        better.sort(key=self._seconds)
        found = list[list[Option]]()
        for picked in (*better, preferred, quickest):
            if picked not in found:
                found.append(picked)
        return [self._served(picked) for picked in found]

    def _improved(self, picked: list[Option], options: Sequence[list[Option]]) -> list[Option]:
        """Change one option after another until no change is faster."""
        least = self._seconds(picked)
        before = float("inf")
        while least < before:
            before = least
            for i, choices in enumerate(options):
                for choice in choices:
                    if choice is picked[i]:
                        continue
                    changed = list(picked)
                    changed[i] = choice
                    needed = self._seconds(changed)
                    if needed < least:
                        picked = changed
                        least = needed
        return picked

    def _seconds(self, picked: Sequence[Option]) -> float:
        return self._costs.of_buckets(self._served(picked)).seconds

    def _served(self, picked: Sequence[Option]) -> list[Bucket]:
        return self._with_compute_ranks(list(chain(*picked)))

    def _seconds_in_chunks(self, groups: Iterable[list[Bucket]]) -> float:
        return self._costs.of_buckets(self._in_chunks(groups)).seconds

    def _in_chunks(self, groups: Iterable[list[Bucket]]) -> list[Bucket]:
        """The buckets of groups of ranks, cut where they do not fit together."""
        buckets = list(chain(*groups))
        chunk_of = self._chunk_of(sorted(buckets, key=self._order))
        if not chunk_of:
            return buckets
        found = list[Bucket]()
        for of_group in groups:
            cut = list[Bucket]()
            for bucket in of_group:
                for chunk, indices in sorted(grouped(bucket.matrices, chunk_of.__getitem__).items()):
                    cut.append(Bucket(tuple(indices), bucket.scheme, (), chunk))
            found += self._with_compute_ranks(cut)
        return found

    def _chunk_of(self, buckets: Sequence[Bucket]) -> dict[int, int]:
        """Each matrix's chunk, label by label, in the order of execution; empty if all fit."""
        draft = self._draft
        by_label = grouped(buckets, lambda bucket: draft.one_of(bucket).group)
        chunk_of: dict[int, int] = {}
        chunks = 0
        for of_label in by_label.values():
            largest = largest_iteration([draft.matrices[i] for bucket in of_label for i in bucket.matrices], self._work)
            alone = replace(draft, buckets=tuple(of_label))
            of_matrices = in_chunks(alone, self._parameters, self._workspace, largest)
            for i, chunk in of_matrices.items():
                chunk_of[i] = chunks + chunk
            chunks += 1 + max(of_matrices.values())
        together = sum(chunk_bytes(replace(draft, buckets=tuple(buckets)), self._workspace))
        room = self._workspace.for_chunks(largest_iteration(draft.matrices, self._work))
        if together <= room and chunks == len(by_label) and not self._workspace.state:
            return {}
        return chunk_of

    def _with_compute_ranks(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """A group's buckets with compute ranks, the largest matrices first."""
        ranks = self._draft.one_of(buckets[0]).ranks
        load = [0.0] * ranks
        done = list(buckets)
        flops = [self._flops(bucket) for bucket in buckets]
        for i in sorted(range(len(buckets)), key=lambda i: -flops[i]):
            bucket = buckets[i]
            if bucket.scheme == "local":
                holders = [self._draft.matrices[m].holder for m in bucket.matrices]
                in_place = tuple(rank for rank in holders if rank is not None)
                for rank in in_place:
                    load[rank] += flops[i]
                done[i] = replace(bucket, compute_ranks=in_place)
            if bucket.scheme not in ("owner", "gram_split", "share"):
                continue
            rounds, rest = divmod(len(bucket.matrices), ranks)
            by_load = sorted(range(ranks), key=load.__getitem__)  # of equals the first
            last_round = sorted(by_load[:rest])
            for rank in last_round:
                load[rank] += flops[i]
            in_rounds = (*range(ranks),) * rounds + tuple(last_round)
            done[i] = replace(bucket, compute_ranks=_where_held(self._draft, bucket, in_rounds))
        return done

    def _flops(self, bucket: Bucket) -> float:
        """Operations of a matrix on its compute rank."""
        matrix = self._draft.one_of(bucket)
        work = work_of(matrix, self._work)
        if bucket.scheme == "gram_split":
            return cube_flops(matrix.shape, work)
        return whole_flops(matrix.shape, work)


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
        for rank, entries in held:
            holders.append((-entries, rank, kind))
    rank_of = dict[int, int]()
    for _, rank, kind in sorted(holders):
        while room[rank] and waiting[kind]:
            matrix = waiting[kind].popleft()
            rank_of[matrix] = rank
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
