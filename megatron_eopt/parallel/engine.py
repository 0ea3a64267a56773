"""All that an optimizer knows of ranks: made once by all of them together, and frozen after.

An optimizer describes its parameters and gets an :class:`Engine`, whose methods are what ranks do together: agree on
flags, split parameters into their logical matrices and merge them, orthogonalize these, reduce statistics of them, and
gather whole matrices.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import chain, islice, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.matrices import WHOLE, LocalRows, Split
from megatron_eopt.orthogonalize import timing
from megatron_eopt.orthogonalize.kernels import choose, made
from megatron_eopt.orthogonalize.newton_schulz import Form, NewtonSchulz
from megatron_eopt.orthogonalize.precision import gram_dtype, product_dtype
from megatron_eopt.orthogonalize.products import Fp32Precision, Products, default_products
from megatron_eopt.orthogonalize.timing import fastest, seconds, times
from megatron_eopt.parallel.collectives import all_gather, all_reduce, lowest
from megatron_eopt.parallel.cost import DEFAULT_RATES, Rates, Work, chunk_seconds, largest_iteration
from megatron_eopt.parallel.explain import explain, explain_offloaded
from megatron_eopt.parallel.layout import Layout, local_rows, split_layout
from megatron_eopt.parallel.plan import fingerprint, first_difference, make_plan
from megatron_eopt.parallel.records import Bucket, Matrix, Plan, TpMode, whole
from megatron_eopt.parallel.scheduler import Chunk, Part, Piece, Program, in_order, run, widest
from megatron_eopt.parallel.schemes.whole import Job, Shapes, bring, cut_out, gather, hand_out
from megatron_eopt.parallel.statistics import Statistics, Wanted, reduce_statistics
from megatron_eopt.parallel.watched import Watched
from megatron_eopt.parallel.workspace import DEFAULT_WORKSPACE, OF_ENTRY, Workspace, chunk_bytes

_MOST_PLANS = 1024  # that are kept: one for each set of parameters that had gradients in a step
_SENT_BYTES = 2**22


@dataclass(frozen=True)
class Parameter:
    """What an engine has to know of a parameter.

    Attributes:
        name: the same on every rank, and unique.
        dtype: of its updates.
        layout: of the parameter, or of each matrix of a stack; None where its entries step each for itself.
        split: its logical matrices.
        iteration: what orthogonalizes these; None where nothing is orthogonalized.
        settings: what else is the same on all ranks that share it, by name: plain data.
        groups: of ranks that share a parameter without layout, by label.
        offloaded: bytes that this rank keeps of it in host memory.
    """

    name: str
    dtype: torch.dtype
    layout: Layout | None = None
    split: Split = WHOLE
    iteration: NewtonSchulz | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict)
    offloaded: int = 0

    @property
    def shared_by(self) -> Mapping[str, ProcessGroup]:
        """The groups of ranks that share it, by label."""
        layout = self.layout
        return self.groups if layout is None or layout.group is None else {layout.label: layout.group}


@dataclass(frozen=True)
class Spread:
    """How equal matrices are spread over the ranks of a group.

    Attributes:
        matrix: one of them, with entries, cut or held in copies.
        numbers: how many each rank works on, the first ones the first; empty where each rank works on all.
    """

    matrix: Matrix
    numbers: Sequence[int]


class Engine:
    """Parameters, the groups of ranks that share them, and the plan by which they are orthogonalized.

    The constructor makes the plan as every rank does by itself, unless rates are to be measured. All ranks
    :meth:`prepare` it together, and then it is frozen: other parameters or settings want another engine.

    Args:
        parameters: in the same order on every rank.
        device: of the updates.
        tp_mode: what the user asked for.
        rates: for the predictions of ``auto``; None measures them, for which all ranks come here together.
        workspace: what a step may take beside parameters, gradients and state.

    Raises:
        ValueError: for two groups of ranks of the same name, for shards that are not those of a matrix, and where only
            some of the parameters with a layout have an iteration.

    Attributes:
        groups: of ranks, by label.
        plan: see :mod:`~megatron_eopt.parallel.plan`; of those parameters that have an iteration.
        works: what its costs were predicted with, by the names of the iterations.
        rates: what the times were predicted with.
        watched: the step that is made, where somebody watches it.
    """

    watched: Watched | None = None

    def __init__(
        self,
        parameters: Sequence[Parameter],
        device: torch.device,
        tp_mode: TpMode = "duplicated",
        rates: Rates | None = DEFAULT_RATES,
        workspace: Workspace = DEFAULT_WORKSPACE,
    ) -> None:
        self.device = device
        self.workspace = workspace
        self.groups = _groups(parameters)
        self._sharers = [
            (group, torch.tensor([p.shared_by.get(label) is group for p in parameters], device=device))
            for label, group in self.groups.items()
        ]
        self._first = all(group.rank() == 0 for group in self.groups.values())
        self._parameters = list(parameters)
        iterations = (p.iteration for p in parameters if p.iteration is not None)
        self._iterations = {each.name: replace(each, max_bytes=workspace.iteration) for each in iterations}
        self._rows: dict[int, LocalRows] = {}
        self._plain = set(range(len(parameters)))  # that are one matrix, or none, as they lie here
        self._of_matrix: list[tuple[int, Layout]] = []  # of each matrix of the plan its parameter and its layout
        planned = []
        for i, p in enumerate(parameters):
            if p.layout is None:
                continue
            if self._iterations and p.iteration is None:
                raise ValueError(
                    f"{p.name} has a layout and no iteration, but other parameters have one: an engine orthogonalizes "
                    f"all matrices of its plan, or none; give this parameter another engine"
                )
            self._rows[i] = local_rows(p.layout, p.split)
            if not p.split.is_whole or p.layout.padding:
                self._plain.discard(i)
            iteration = "" if p.iteration is None else p.iteration.name
            for part, each in zip(p.split.names(p.layout.shape[0]), split_layout(p.layout, p.split), strict=True):
                name = f"{p.name}[{part}]" if part else p.name
                itemsize = p.dtype.itemsize if p.iteration is None else p.iteration.sent_dtype(p.dtype).itemsize
                planned.append(Matrix(name, each.shape, each.rectangles, each.label, itemsize, iteration))
                self._of_matrix.append((i, each))
        self.works = {name: self._work(name) for name in self._iterations}
        self.rates = rates or measured_rates(self.groups, device, self._product_dtypes()[0])
        self.plan = Plan(tuple(planned), ())
        if self._iterations:
            numbers = [i for i, _ in self._of_matrix]
            self.plan = make_plan(planned, tp_mode, self.works, self.rates, workspace=workspace, parameters=numbers)
        self._chunks: dict[tuple[int, ...], list[Chunk]] = {}
        self._products: Callable[[int], Products | None] = lambda rows: None  # by rows; chosen by prepare()
        self._room = workspace.for_chunks(largest_iteration(planned if self.works else (), self.works))
        self._room *= not workspace.state  # whose slots on the device are those of the chunk at work and of the next
        self.matrices: list[tuple[Matrix, ...]] = [()] * len(parameters)
        """Of each parameter its logical matrices, as they are orthogonalized: ``blockwise`` makes each shard one."""
        for matrix, (i, layout) in zip(planned, self._of_matrix, strict=True):
            worked_on, shape = matrix, layout.rectangle.shape
            if tp_mode == "blockwise":
                worked_on = replace(matrix, shape=shape, rectangles=(whole(shape),), group="")
            self.matrices[i] += (worked_on,)

    def prepare(self, kernel: str | None = None, kept: str | None = None) -> str | None:
        """Agree with the other ranks on the plan and on the kernel of symmetric products; all ranks call it together.

        The result is the choice of a kernel; None where nothing is orthogonalized. On a GPU kernels are timed where one
        choice reaches the whole run: in a single process, or in a group of all ranks. Elsewhere it is the first kernel
        that serves, since by their own times replicas that exchange nothing could each choose another.

        Args:
            kernel: the one that the user asks for.
            kept: that of the checkpoint or of the run, taken where the user asks for none.

        Raises:
            ValueError: if the plan, or the settings of a parameter, differ between ranks.
            RuntimeError: if the kernel cannot serve on one of them.
        """
        check_same(self.plan, self.groups, self.device, self._parameters)
        if not self._iterations:
            return None
        run = dist.get_world_size() if dist.is_initialized() else 1
        reached = max((group.size() for group in self.groups.values()), default=1) == run
        if kernel is None and kept is None and reached and timing.is_timed(self.device):
            kept = fastest(-_lowest(-times(*self.stacks()), self.groups))
        stacks, dtypes, device, precision = self.stacks()
        agree = partial(_lowest, groups=self.groups)
        choice = choose(stacks, dtypes, device, kernel=kernel, kept=kept, fp32_precision=precision, agree=agree)
        self._products = lambda rows: made(choice.kernel, rows, precision)
        self._chunks.clear()
        return choice.kernel

    def explain(self) -> str:
        """The plan as a table: scheme, operations, bytes, collectives and predicted time of each bucket."""
        table = explain(self.plan, self.works, self.rates, self.workspace)
        state, seconds = self.offloaded(), chunk_seconds(self.plan, self.works, self.rates)
        return f"{table}\n{explain_offloaded(state, seconds)}" if any(state) else table

    def offloaded(self) -> list[int]:
        """Of each chunk of the plan the bytes that this rank keeps in host memory."""
        chunk_of = {self._of_matrix[m][0]: bucket.chunk for bucket in self.plan.buckets for m in bucket.matrices}
        found = [0] * (1 + max(chunk_of.values(), default=0))
        for i, chunk in chunk_of.items():
            found[chunk] += self._parameters[i].offloaded
        return found

    def order(self, indices: Sequence[int]) -> list[list[int]]:
        """Which parameters are in each chunk, in the order in which :meth:`run` starts their programs."""
        return [[i for part in chunk.parts for i in part.parameters] for chunk in self._chunks_of(indices)]

    def agree(self, flags: Tensor) -> Tensor:
        """Element-wise minimum of ``flags`` (k x parameters) over the ranks that share each parameter."""
        for group, shared in self._sharers:
            flags = torch.where(shared, lowest(flags, group), flags)
        return flags

    def shares(self, index: int) -> bool:
        """Whether other ranks wait for this one's part of a parameter."""
        return bool(self._parameters[index].shared_by)

    def counts(self, index: int) -> bool:
        """Whether this rank reports on its part of a parameter; an unshared one is reported once."""
        return self._first or self.shares(index)

    def flat(self, indices: Sequence[int]) -> list[Matrix]:
        """The logical matrices of parameters, one parameter's after the other's."""
        return [matrix for i in indices for matrix in self.matrices[i]]

    def split(self, indices: Sequence[int], tensors: list[Tensor]) -> list[Tensor]:
        """This rank's shards of the logical matrices of parameters, in the order of :meth:`flat`.

        ``tensors`` are this rank's parts of the parameters, or what has their shapes. The list is emptied, so that each
        can be freed when it was worked on.
        """
        if self._plain.issuperset(indices):
            shards, tensors[:] = list(tensors), []
            return shards
        shards = [shard for i, x in zip(indices, tensors, strict=True) for shard in self._split_one(i, x)]
        tensors.clear()
        return shards

    def merge(self, indices: Sequence[int], shards: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of :meth:`split`."""
        if self._plain.issuperset(indices):
            return list(shards)
        each = iter(shards)
        return [self._rows[i].merge(list(islice(each, len(self.matrices[i])))) for i in indices]

    def orthogonalize(
        self, indices: Sequence[int], shards: list[Tensor]
    ) -> Generator[list[Tensor], list[Tensor], list[Tensor]]:
        """Wait, in a program that :meth:`run` runs, for this rank's shards of the orthogonal factors of matrices.

        Args:
            indices: of the parameters, ascending.
            shards: of their logical matrices, in the order of :meth:`flat`. They are not written to; the list is
                emptied.

        Returns:
            New tensors of the same shapes, in the dtypes of the updates.
        """
        return (yield shards)

    def run(self, indices: Sequence[int], program: Callable[[Sequence[int]], Program]) -> None:
        """Run programs for parameters, for as many at a time as the workspace has room for.

        Args:
            indices: of the parameters, ascending. Of those that are shared with other ranks all ranks name the same.
            program: starts the program of some of them, which orthogonalizes once; called for each of them once.
        """
        # with no room one chunk at a time
        run(self._chunks_of(indices), program, self._room, self.watched)

    def factors(self, indices: Sequence[int], shards: list[Tensor]) -> list[Tensor]:
        """The orthogonal factors of matrices, outside of programs; arguments as of :meth:`orthogonalize`.

        The result is the list ``shards``, in which each shard made room for its factor.
        """
        numbers = iter(range(len(shards)))
        at = {i: list(islice(numbers, len(self.matrices[i]))) for i in indices}
        if len(shards) != (expected := len(self.flat(indices))):
            raise ValueError(f"the plan has {expected} matrices, got {len(shards)} shards")

        def program(some: Sequence[int]) -> Program:
            numbers = [number for i in some for number in at[i]]
            found = yield from self.orthogonalize(some, [shards[number] for number in numbers])
            for number, factor in zip(numbers, found, strict=True):
                shards[number] = factor

        self.run(indices, program)
        return shards

    def statistics(self, wanted: Sequence[Wanted]) -> list[Statistics]:
        """Statistics of logical matrices, with at most one all-reduce for each group; the same on all its ranks."""
        pending = []
        for label in sorted({one.matrix.group for one in wanted}):
            indices = [i for i, one in enumerate(wanted) if one.matrix.group == label]
            pending.append((indices, reduce_statistics([wanted[i] for i in indices], self.groups.get(label))))
        found = {i: each for indices, sums in pending for i, each in zip(indices, sums.wait(), strict=True)}
        return [found[i] for i in range(len(wanted))]

    def sums(self, tensors: Sequence[Tensor], labels: Sequence[str]) -> list[Tensor]:
        """The sums of tensors over the groups of these labels, one exchange for all tensors of a group and dtype.

        A tensor with an empty label stays as it is.
        """
        found = list(tensors)
        kinds = sorted({(label, str(x.dtype)) for x, label in zip(tensors, labels, strict=True) if label})
        pending = []
        for kind in kinds:
            indices = [i for i, x in enumerate(tensors) if (labels[i], str(x.dtype)) == kind]
            several = torch.cat([tensors[i].reshape(-1) for i in indices])
            pending.append((indices, all_reduce(several, self.groups[kind[0]])))
        for indices, sums in pending:
            for i, part in zip(indices, sums.wait().split([tensors[i].numel() for i in indices]), strict=True):
                found[i] = part.view(tensors[i].shape)
        return found

    def gather_whole(
        self, stacks: Sequence[Sequence[Tensor]], spread: Sequence[Spread | None]
    ) -> Generator[None, None, list[list[Tensor]]]:
        """Bring whole matrices together, by one collective, and return stacks of them; yields while it waits.

        Where nothing is exchanged it does not yield.

        Args:
            stacks: some for each of ``spread``, of this rank's shards (n x rows x cols) of ``n`` tensors.
            spread: how these are; all of one group. Where None, stacks stay as they are.
        """
        return self._exchanged(stacks, spread, bring, gather)

    def scatter_back(
        self, stacks: Sequence[Sequence[Tensor]], spread: Sequence[Spread | None]
    ) -> Generator[None, None, list[list[Tensor]]]:
        """Go the way back from :meth:`gather_whole`, to stacks of shards; where all have all, these are views."""
        return self._exchanged(stacks, spread, hand_out, _own_shards)

    def _exchanged(
        self,
        stacks: Sequence[Sequence[Tensor]],
        spread: Sequence[Spread | None],
        of_one: Callable[..., Callable[[], list[Tensor]]],
        of_all: Callable[..., Callable[[], list[Tensor]]],
    ) -> Generator[None, None, list[list[Tensor]]]:
        kinds = list(zip(stacks, spread, strict=True))
        sent = [(x, each) for some, each in kinds if each is not None for x in some]
        if not sent:
            return [list(some) for some in stacks]
        tensors, matrices = [x for x, _ in sent], [each.matrix for _, each in sent]
        numbers, group = [each.numbers for _, each in sent], self.groups[matrices[0].group]
        wait = of_one(tensors, matrices, numbers, group) if numbers[0] else of_all(tensors, matrices, group)
        yield
        arrived = iter(wait())
        return [list(some) if each is None else [next(arrived) for _ in some] for some, each in kinds]

    def _split_one(self, index: int, x: Tensor) -> list[Tensor]:
        return [x] if index in self._plain else self._rows[index].split(x)

    def _chunks_of(self, indices: Sequence[int]) -> list[Chunk]:
        wanted = tuple(indices)
        if wanted not in self._chunks:
            if len(self._chunks) > _MOST_PLANS:
                self._chunks.clear()
            kept = set(wanted)
            numbers = [m for m, (i, _) in enumerate(self._of_matrix) if i in kept]
            plan = subset(self.plan, numbers)
            of_chunks: dict[int, list[Bucket]] = {}
            for bucket in plan.buckets:
                of_chunks.setdefault(bucket.chunk, []).append(bucket)
            needed = chunk_bytes(self.plan, self.workspace)  # of all parameters: the same whichever have gradients
            self._chunks[wanted] = [self._chunk(plan, some, numbers, needed[n]) for n, some in of_chunks.items()]
        return self._chunks[wanted]

    def _chunk(self, plan: Plan, buckets: Sequence[Bucket], numbers: Sequence[int], needed: int) -> Chunk:
        """Buckets of a plan, whose matrices have these ``numbers`` among all, as they are worked on together."""
        jobs: list[Job] = []
        dtypes, stacked = [], []
        for bucket in buckets:
            order, alike = in_order(plan, bucket)
            of_bucket = [numbers[bucket.matrices[i]] for i in order]
            matrix, (_, layout) = plan.matrices[bucket.matrices[0]], self._of_matrix[of_bucket[0]]
            settings, shape = self._iterations[matrix.iteration], layout.rectangle.shape
            dtypes.append(widest([settings.sent_dtype(self._dtype(m)) for m in of_bucket]))
            form: Form = "gram" if bucket.scheme.startswith("gram") else "auto"
            form = "standard" if bucket.scheme == "distributed" else form
            worked_on = shape if bucket.scheme == "blockwise" else layout.shape
            settings = replace(settings, products=self._products(min(worked_on)))
            iteration = settings.compile(worked_on, dtypes[-1], self.device, form)
            group = self.groups.get(matrix.group)
            jobs.append(Job(bucket, matrix, group, iteration, self._shapes(of_bucket), alike, self._first))
            stacked.append(of_bucket)
        parts, some, held = [], dict[int, list[int]](), Counter[tuple[str, int]]()
        for m in sorted(chain(*stacked)):
            i, matrix = self._of_matrix[m][0], self.plan.matrices[m]
            own = {(matrix.group, rank): entries for rank, entries in matrix.held}
            held.update(own)
            if some and i not in some and _most(held) * OF_ENTRY > self.workspace.part:
                parts.append(self._part(some, stacked))
                some, held = {}, Counter(own)
            some.setdefault(i, []).append(m)
        return Chunk(jobs, dtypes, [*parts, self._part(some, stacked)], needed)

    def _shapes(self, matrices: Sequence[int]) -> Shapes:
        shapes = [self._of_matrix[m][1].rectangle.shape for m in matrices]
        return (len(shapes), *shapes[0]) if len(set(shapes)) == 1 else shapes

    def _part(self, matrices: Mapping[int, Sequence[int]], stacked: Sequence[Sequence[int]]) -> Part:
        """Parameters with their ``matrices``, which are among those of buckets as they are ``stacked``."""
        at, pieces = {m: at for at, m in enumerate(chain(*matrices.values()))}, []
        for bucket, of_bucket in enumerate(stacked):
            if rows := [row for row, m in enumerate(of_bucket) if m in at]:
                own = [of_bucket[row] for row in rows]
                in_own, dtypes = [at[m] for m in own], [self._dtype(m) for m in own]
                pieces.append(Piece(bucket, rows, in_own, self._shapes(own), dtypes))
        return Part(tuple(matrices), pieces)

    def _dtype(self, matrix: int) -> torch.dtype:
        return self._parameters[self._of_matrix[matrix][0]].dtype

    def _work(self, name: str) -> Work:
        """What costs are predicted with: the same on every rank, so not with the kernel that will be chosen."""
        iteration, share = self._iterations[name], 0.5
        own = [(self._parameters[i], each) for i, each in self._of_matrix]
        own = [(p, each) for p, each in own if p.iteration is not None and p.iteration.name == name]
        if self.device.type == "cpu":
            share = default_products(self.device, torch.float32).share(max((min(x.shape) for _, x in own), default=0))
        itemsize = max(product_dtype(p.dtype, iteration.fp32_matmul_prec).itemsize for p, _ in own)
        return Work(schedule=iteration.schedule, restarts=iteration.restarts, share=share, itemsize=itemsize)

    def stacks(self) -> tuple[list[tuple[int, ...]], list[torch.dtype], torch.device, Fp32Precision]:
        """What a kernel is chosen for: matrices and stacks (n x rows x cols), dtypes, device and precision of fp32."""
        stacks = set()
        for bucket in self.plan.buckets if self._iterations else ():
            matrix, (_, layout) = self.plan.matrices[bucket.matrices[0]], self._of_matrix[bucket.matrices[0]]
            shape = layout.rectangle.shape if bucket.scheme == "blockwise" else matrix.shape
            count = -(-len(bucket.matrices) // (matrix.ranks if bucket.compute_ranks else 1))
            stacks.add((count, *shape) if count > 1 else shape)
        products = self._product_dtypes() if self._iterations else []
        dtypes = dict.fromkeys(dtype for each in products for dtype in (each, gram_dtype(each, self.device)) if dtype)
        high = any(each.fp32_matmul_prec == "high" for each in self._iterations.values())
        return sorted(each for each in stacks if 0 not in each), list(dtypes), self.device, "tf32" if high else "ieee"

    def _product_dtypes(self) -> list[torch.dtype]:
        """The dtypes in which the products of the standard form are computed."""
        precision = next(iter(self._iterations.values())).fp32_matmul_prec
        return [product_dtype(dtype, precision) for dtype in sorted({p.dtype for p in self._parameters}, key=str)]


def subset(plan: Plan, kept: Sequence[int]) -> Plan:
    """The plan with some of its matrices alone, ascending; each keeps its scheme and its compute rank."""
    new = {old: i for i, old in enumerate(kept)}
    buckets = []
    for bucket in plan.buckets:
        left = [i for i, matrix in enumerate(bucket.matrices) if matrix in new]
        if left:
            compute_ranks = tuple(bucket.compute_ranks[i] for i in left) if bucket.compute_ranks else ()
            indices = tuple(new[bucket.matrices[i]] for i in left)
            buckets.append(replace(bucket, matrices=indices, compute_ranks=compute_ranks))
    return Plan(tuple(plan.matrices[i] for i in kept), tuple(buckets))


def _own_shards(
    stacks: Sequence[Tensor], matrices: Sequence[Matrix], group: ProcessGroup
) -> Callable[[], list[Tensor]]:
    """This rank's shards of whole matrices."""
    return lambda: [cut_out(x, each.rectangles[group.rank()]) for x, each in zip(stacks, matrices, strict=True)]


def _most(held: Mapping[tuple[str, int], int]) -> int:
    """The entries of the ranks that hold the most of each group, together; ``held`` are those of group and rank."""
    most: dict[str, int] = {}
    for (label, _), entries in held.items():
        most[label] = max(entries, most.get(label, 0))
    return sum(most.values())


def measured_rates(groups: Mapping[str, ProcessGroup], device: torch.device, dtype: torch.dtype) -> Rates:
    """How fast the slowest rank multiplies, sends and starts a collective: the same figures on every rank.

    Without groups, over which matrices are exchanged, bytes and latency stay those of the default.
    """
    rows = 4096 if device.type == "cuda" else 1024
    x = torch.randn(rows, rows, device=device).to(dtype)
    flag, sent = torch.zeros(1, device=device), torch.zeros(_SENT_BYTES // 4, device=device)

    def bytes_and_calls(group: ProcessGroup) -> tuple[float, float]:
        latency = seconds(lambda: all_reduce(flag, group).wait(), device)
        gathered = seconds(lambda: all_gather(sent, group).wait(), device)
        return (group.size() - 1) * _SENT_BYTES / max(gathered - latency, 1e-9), 1 / latency

    rates = [2 * rows**3 / seconds(lambda: x @ x, device)]
    for group in groups.values():
        rates += bytes_and_calls(group)
    flops, *others = _lowest(torch.tensor(rates, dtype=torch.float64, device=device), groups).tolist()
    if not others:
        return replace(DEFAULT_RATES, flops=flops)
    return Rates(flops=flops, bytes=min(others[::2]), latency=1 / min(others[1::2]))


def _lowest(x: Tensor, groups: Mapping[str, ProcessGroup]) -> Tensor:
    """Element-wise minimum over the ranks of every group, one group after another."""
    for group in groups.values():
        x = lowest(x, group)
    return x


def check_same(
    plan: Plan, groups: Mapping[str, ProcessGroup], device: torch.device, parameters: Sequence[Parameter] = ()
) -> None:
    """Refuse a plan, or settings of parameters, that differ between the ranks of a group; the first one is named."""
    for label, group in groups.items():
        settings = {p.name: p.settings for p in parameters if label in p.shared_by}
        hashed = sha256((fingerprint(plan, label) + repr(settings)).encode()).digest()
        own = torch.tensor(list(hashed), dtype=torch.int32, device=device)
        least, most = lowest(own, group), -lowest(-own, group)
        if torch.equal(least, most):
            continue
        of_ranks: list[Any] = [None] * group.size()
        dist.all_gather_object(of_ranks, (plan, settings), group=group)
        (first, of_first), *_ = of_ranks
        told = (_first_setting(of_first, own) or first_difference(first, other, label) for other, own in of_ranks)
        rank, difference = next((rank, each) for rank, each in enumerate(told) if each is not None)
        raise ValueError(
            f"the optimizer's plan differs between ranks 0 and {rank} of group {label!r}: {difference}. Ranks that "
            f"share parameters need the same parameters in the same order, with the same settings"
        )


def _first_setting(of_one: Mapping[str, Any], of_other: Mapping[str, Any]) -> str | None:
    """The first parameter, and the setting of it, in which two ranks differ."""
    for i, (one, another) in enumerate(zip_longest(of_one, of_other)):
        if one != another:
            return f"parameter {i} is {one!r} in the one and {another!r} in the other"
        for key in {**of_one[one], **of_other[one]}:
            mine, theirs = (settings[one].get(key) for settings in (of_one, of_other))
            if repr(mine) != repr(theirs):
                return f"{one!r} has {key} {mine!r} in the one and {theirs!r} in the other"
    return None


def _groups(parameters: Sequence[Parameter]) -> dict[str, ProcessGroup]:
    """The groups of ranks that share parameters, in the order of their labels, which is the same on every rank."""
    groups: dict[str, ProcessGroup] = {}
    for parameter in parameters:
        for label, group in parameter.shared_by.items():
            if groups.setdefault(label, group) is not group:
                raise ValueError(
                    f"{parameter.name} lies on another group of ranks than parameters before it, but both are called "
                    f"{label!r}: give the dimensions of one device mesh other names, or each mesh an optimizer"
                )
    return dict(sorted(groups.items()))
