"""What a step does: buckets of matrices and their schemes.

Pure Python, from shapes, shards and settings alone: the same on every rank, also without a process group.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from itertools import chain
from math import ceil
from typing import Any, get_args

from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.parallel.cost import Costs, Works, cube_flops, largest_iteration, whole_flops
from megatron_eopt.parallel.plan_records import Bucket, Matrix, Plan, Scheme, TpMode, grouped
from megatron_eopt.parallel.rectangles import cut_dimension
from megatron_eopt.parallel.workspace import DEFAULT_WORKSPACE, Workspace, chunk_bytes, in_chunks

REPLICATED_ROWS = 1024  # most rows of a Gram matrix that every rank computes: to split it takes more collectives

BUSIEST = 1.25  # most times its share that a rank should have to compute

SMALL_ENTRIES = 128 * 128  # most entries of a matrix that every rank may compute to save a collective
SMALL_FLOPS = 1e10  # and most operations of such matrices together: a GPU makes them while a collective starts

SHARED_PARTS = 4  # of a bucket, so that the first results leave before all are computed


def make_plan(
    matrices: Iterable[Matrix],
    mode: TpMode,
    works: Works,
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
      dealt as others, and under ``auto`` where one has more than others could take over.
    - Other shards go by the scheme that is named; by ``owner`` where ``distributed`` or ``gram`` should not serve them
      (the short side is cut, so the Gram matrix would be that of the long one, or the Gram form must not run).
    - ``gram`` is ``gram_split`` for a short side over :data:`REPLICATED_ROWS`, else ``gram_replicated``.
    - ``auto`` is ``owner``, but for few small matrices, which are ``duplicated``. Where the busiest rank of a group
      then has over :data:`BUSIEST` times its share of the operations, what is left of a bucket beyond full rounds goes
      by ``gram`` where that may serve: of the largest matrices first, as many as leave the busiest rank the
      least to do.

    Compute ranks are dealt in rounds; the last round of a bucket goes to the ranks with the least to do so far, the
    largest matrices first, so that two ranks differ by at most one matrix. Where shards differ, a rank gets matrices of
    which it holds much. A chunk executes first the buckets that exchange, those with the most operations first, then
    those that fill the waiting.

    ``parameters`` has the number of each matrix's parameter, ascending, by default another for each; ``share_groups``
    are labels of groups whose whole matrices are shared out. Raises ``ValueError`` for an unknown mode, and for shards
    that do not tile copies of their matrix.
    """
    check_choice("tp_mode", mode, get_args(TpMode))
    draft = Plan(tuple(matrices), ())
    _check(draft.matrices)
    if parameters is None:
        parameters = range(len(draft.matrices))
    planner = _Planner(draft, mode, works, workspace, parameters)
    return replace(draft, buckets=tuple(planner.buckets(share_groups)))


class _Planner:
    """Makes the buckets of the matrices of a draft, which has none yet."""

    def __init__(
        self,
        draft: Plan,
        mode: TpMode,
        works: Works,
        workspace: Workspace,
        parameters: Sequence[int],
    ) -> None:
        self._draft = draft
        self._mode = mode
        self._works = works
        self._workspace = workspace
        self._parameters = parameters
        self._costs = Costs(draft, works)

    def buckets(self, share_groups: Set[str]) -> list[Bucket]:
        """All buckets, in the order of execution."""
        # label and ranks -> buckets of equal matrices; a matrix of one rank may have any label
        groups: dict[tuple[str, int], list[Bucket]] = {}
        # from here on the order does not depend on that of the parameters
        kinds = grouped(range(len(self._draft.matrices)), self._kind)
        for _, indices in sorted(kinds.items()):
            matrix = self._draft.matrices[indices[0]]
            of_group = groups.setdefault((matrix.group, matrix.ranks), [])
            of_group += self._served(tuple(indices), matrix.group in share_groups)
        for key, of_group in groups.items():
            groups[key] = self._with_compute_ranks(self._balanced(of_group))
        buckets = list[Bucket]()
        for bucket in self._in_chunks([groups[key] for key in sorted(groups)]):
            buckets += _in_parts(bucket, self._draft.one_of(bucket).ranks)
        return sorted(buckets, key=self._order)

    def _kind(self, index: int) -> tuple[Any, ...]:
        """Equal for matrices that may be in one bucket; the largest come first."""
        matrix = self._draft.matrices[index]
        rectangles = matrix.rectangles
        if (self._mode in ("auto", "owner") and matrix.uneven) or self._stays(matrix):
            rectangles = ()
        return (
            -whole_flops(matrix.shape, self._works[matrix.iteration]),
            matrix.group,
            matrix.shape,
            rectangles,
            matrix.itemsize,
            matrix.iteration,
            matrix.ranks,
        )

    def _order(self, bucket: Bucket) -> tuple[int, bool, float]:
        """By chunk; what exchanges first, the most operations first."""
        exchanges = bucket.scheme not in ("local", "blockwise")
        return bucket.chunk, not exchanges, -self._costs.of_bucket(bucket).flops

    def _served(self, indices: tuple[int, ...], share: bool) -> list[Bucket]:
        """How equal matrices are served, each kind for itself."""
        matrix = self._draft.matrices[indices[0]]
        if matrix.ranks == 1 or 0 in matrix.shape:
            return [Bucket(indices, "local")]
        if not matrix.sharded:
            return [Bucket(indices, "share" if share else "local")]
        if matrix.copies > 1:
            return [Bucket(indices, "owner")]
        if self._stays(matrix):
            return [Bucket(indices, "local")]
        mode = self._mode
        if mode in ("blockwise", "duplicated", "owner"):
            return [Bucket(indices, mode)]
        if mode != "auto":
            return [Bucket(indices, self._that_sums(indices) or "owner")]
        in_place = self._in_place(indices)
        if in_place:
            return in_place
        flops = whole_flops(matrix.shape, self._works[matrix.iteration])
        entries = matrix.shape[0] * matrix.shape[1]
        if self._alike(indices) and entries <= SMALL_ENTRIES and len(indices) * flops <= SMALL_FLOPS:
            return [Bucket(indices, "duplicated")]
        return [Bucket(indices, "owner")]

    def _alike(self, indices: Sequence[int]) -> bool:
        """Whether ranks hold equal parts of all these matrices."""
        return len({self._draft.matrices[i].rectangles for i in indices}) == 1

    def _stays(self, matrix: Matrix) -> bool:
        """Whether one rank has all of a matrix, and no mode that may move it was named."""
        return matrix.holder is not None and self._mode in ("duplicated", "distributed", "gram")

    def _in_place(self, indices: Sequence[int]) -> list[Bucket]:
        """Matrices that lie whole on one rank stay there, if none then has too many; else none."""
        there = [i for i in indices if self._draft.matrices[i].holder is not None]
        if not there:
            return []
        most = max(Counter(self._draft.matrices[i].holder for i in there).values())
        share = len(there) / self._draft.matrices[there[0]].ranks
        if most > max(BUSIEST * share, ceil(share)):
            return []
        rest = [i for i in indices if self._draft.matrices[i].holder is None]
        buckets = [Bucket(tuple(there), "local")]
        if rest:
            buckets.append(Bucket(tuple(rest), "owner"))
        return buckets

    def _that_sums(self, indices: Sequence[int]) -> Scheme | None:
        """The mode's scheme that sums Gram matrices of the short side, if one serves."""
        matrix = self._draft.matrices[indices[0]]
        cut = cut_dimension(matrix.shape, matrix.rectangles)
        if cut is None or matrix.shape[cut] != max(matrix.shape):
            return None
        if self._mode == "distributed":
            return "distributed"
        if self._works[matrix.iteration].settings.restarts is None:
            return None
        return "gram_split" if min(matrix.shape) > REPLICATED_ROWS else "gram_replicated"

    def _balanced(self, buckets: list[Bucket]) -> list[Bucket]:
        """Under ``auto`` what a few ranks alone would compute is shared by all, where that makes the busiest faster."""
        if self._mode != "auto":
            return buckets
        load = self._load(buckets)
        most = BUSIEST * sum(load) / len(load)
        busiest = max(load)
        ranks = len(load)
        best = buckets
        changed = buckets
        for bucket in buckets:  # the largest matrices come first
            if busiest <= most:
                break
            rest = bucket.matrices[len(bucket.matrices) // ranks * ranks :]
            matrix = self._draft.one_of(bucket)
            if bucket.scheme != "owner" or matrix.copies > 1 or not rest or not self._alike(bucket.matrices):
                continue
            scheme = self._that_sums(rest)
            if scheme is None:
                continue
            changed = [each for each in changed if each is not bucket]
            if len(rest) < len(bucket.matrices):
                changed.append(replace(bucket, matrices=bucket.matrices[: -len(rest)]))
            changed.append(Bucket(rest, scheme))
            needed = max(self._load(changed))
            if needed < busiest:
                best = changed
                busiest = needed
        return best

    def _load(self, buckets: Sequence[Bucket]) -> list[float]:
        """Operations of each rank of a group."""
        return self._costs.flops_of_ranks(self._with_compute_ranks(buckets))

    def _in_chunks(self, groups: Sequence[list[Bucket]]) -> list[Bucket]:
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
            of_buckets = [draft.matrices[i] for bucket in of_label for i in bucket.matrices]
            largest = largest_iteration(of_buckets, self._works)
            alone = replace(draft, buckets=tuple(of_label))
            of_matrices = in_chunks(alone, self._parameters, self._workspace, largest)
            for i, chunk in of_matrices.items():
                chunk_of[i] = chunks + chunk
            chunks += 1 + max(of_matrices.values())
        together = sum(chunk_bytes(replace(draft, buckets=tuple(buckets)), self._workspace))
        room = self._workspace.for_chunks(largest_iteration(draft.matrices, self._works))
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
        work = self._works[matrix.iteration]
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
    for matrix in matrices:
        # shards have as many entries as all copies
        entries = sum(rectangle.numel for rectangle in matrix.rectangles)
        rows, cols = matrix.shape
        if entries != matrix.copies * rows * cols or matrix.ranks % matrix.copies:
            raise ValueError(
                f"the shards of {matrix.name!r} do not tile its shape {matrix.shape}: {list(matrix.rectangles)}"
            )


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
