"""Parameters, and how their plan is compiled into chunks."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_eopt.matrices import WHOLE, Split
from megatron_eopt.orthogonalize.newton_schulz import REUSED_BYTES, NewtonSchulz
from megatron_eopt.parallel.cost import Work
from megatron_eopt.parallel.exchange import LayoutRuns, Shapes
from megatron_eopt.parallel.layout import Layout, split_layout
from megatron_eopt.parallel.plan_records import Bucket, Matrix, Plan, grouped
from megatron_eopt.parallel.rectangles import Rectangle, Shape
from megatron_eopt.parallel.schemes.whole import Job
from megatron_eopt.parallel.workspace import BYTES_OF_ENTRY, Workspace, chunk_bytes


@dataclass(frozen=True)
class ParamSpec:
    """What an engine has to know of a parameter."""

    name: str  # the same on every rank, and unique
    dtype: torch.dtype  # of its updates
    layout: Layout | None = None  # of it, or of each matrix of a stack; None where its entries step each for itself
    split: Split = WHOLE  # its logical matrices
    iteration: NewtonSchulz | None = None  # what orthogonalizes these; None where nothing is orthogonalized
    settings: Mapping[str, Any] = field(default_factory=dict)  # plain data that is the same on all ranks that share it
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict)  # by label, that share one without layout
    offloaded: int = 0  # bytes that this rank keeps of it in host memory

    @property
    def shared_by(self) -> Mapping[str, ProcessGroup]:
        """The groups of ranks that share it, by label."""
        layout = self.layout
        return self.groups if layout is None or layout.group is None else {layout.label: layout.group}

    def matrices(self) -> list[Matrix]:
        """Its logical matrices; none without a layout."""
        if self.layout is None:
            return []
        iteration = ""
        itemsize = self.dtype.itemsize
        if self.iteration is not None:
            iteration = self.iteration.name
            itemsize = self.iteration.sent_dtype(self.dtype).itemsize
        found = []
        parts = self.split.names(self.layout.shape[0])
        for part, layout in zip(parts, split_layout(self.layout, self.split), strict=True):
            name = f"{self.name}[{part}]" if part else self.name
            found.append(Matrix(name, layout.shape, layout.rectangles, layout.label, itemsize, iteration))
        return found


@dataclass(frozen=True)
class ParamSlice:
    """The parameters of a chunk that one program works on."""

    parameters: list[int]
    rows: list[tuple[int, int]]  # of each shard of the program: its bucket in the chunk, and its row of the stack
    dtypes: list[torch.dtype]  # of the updates


@dataclass(frozen=True)
class CompiledChunk:
    """Compiled buckets that are worked on together."""

    jobs: list[Job]
    slices: list[ParamSlice]
    bytes: int


class Compiler:
    """The logical matrices of an engine's parameters, and what is compiled for a plan of them.

    Attributes:
        matrices: of all parameters, in their order.
        parameter_of: the index of each matrix's parameter.
        iterations: those of the parameters, by name.
    """

    def __init__(
        self,
        parameters: Sequence[ParamSpec],
        groups: Mapping[str, ProcessGroup],
        device: torch.device,
        workspace: Workspace,
    ) -> None:
        self._groups = groups
        self._device = device
        self._workspace = workspace
        self.matrices: list[Matrix] = []
        self.parameter_of: list[int] = []
        self.iterations: dict[str, NewtonSchulz] = {}
        self._dtypes: list[torch.dtype] = []  # of each matrix's updates
        for i, p in enumerate(parameters):
            if p.iteration is not None:
                self.iterations[p.iteration.name] = replace(p.iteration, max_bytes=workspace.iteration)
            for matrix in p.matrices():
                self.matrices.append(matrix)
                self.parameter_of.append(i)
                self._dtypes.append(p.dtype)

    def works(self) -> dict[str, Work]:
        """What costs are counted of, by iteration; equal on all ranks."""
        return {name: self._work(name, iteration) for name, iteration in self.iterations.items()}

    def _work(self, name: str, iteration: NewtonSchulz) -> Work:
        pairs = zip(self.matrices, self._dtypes, strict=True)
        sent = [iteration.sent_dtype(dtype) for matrix, dtype in pairs if matrix.iteration == name]
        return Work(iteration, reduce(torch.promote_types, sent), self._device)

    def chunks(
        self,
        plan: Plan,
        parameters: Sequence[int],
        copied: int,
    ) -> list[CompiledChunk]:
        """A plan's chunks with these parameters.

        Programs are for as many parameters as the workspace has room to copy, of each entry so many bytes. On a CPU
        they are for fewer, so that the next one takes the same memory again.
        """
        kept = set(parameters)
        numbers = {m for m, i in enumerate(self.parameter_of) if i in kept}
        of_chunks = grouped(subset(plan, numbers), lambda bucket: bucket.chunk)
        needed = chunk_bytes(plan, self._workspace)  # of all parameters: the same whichever have gradients
        compiled = []
        for number, buckets in of_chunks.items():
            jobs = list[Job]()
            stacked = list[list[int]]()
            for bucket in buckets:
                order, runs = in_order(plan, bucket)
                stacked.append(order)
                jobs.append(self._job(plan, bucket, order, runs))
            compiled.append(CompiledChunk(jobs, self._slices(plan, stacked, copied), needed[number]))
        return compiled

    def _job(
        self,
        plan: Plan,
        bucket: Bucket,
        order: Sequence[int],
        runs: Sequence[LayoutRuns],
    ) -> Job:
        matrix = plan.one_of(bucket)
        settings = self.iterations[matrix.iteration]
        dtype = reduce(torch.promote_types, [settings.sent_dtype(self._dtypes[m]) for m in order])
        shape = self._worked_on(bucket, matrix)
        of_shards = [plan.matrices[m].shard_in(self._groups).shape for m in order]
        shapes: Shapes = of_shards
        if len(set(of_shards)) == 1:
            shapes = (len(of_shards), *of_shards[0])
        return Job(
            bucket=bucket,
            matrix=matrix,
            group=self._groups.get(matrix.group),
            iteration=Work(settings, dtype, self._device).compiled(shape, bucket.scheme),
            shapes=shapes,
            dtype=dtype,
            runs=runs,
        )

    def _slices(self, plan: Plan, stacked: Sequence[Sequence[int]], copied: int) -> list[ParamSlice]:
        """A chunk's parameters, as many at once as programs copy.

        They follow one another bucket by bucket, so that a slice has few shapes.
        """
        room = self._workspace.iteration
        if self._device.type == "cpu":
            room = min(room, REUSED_BYTES // 4 * BYTES_OF_ENTRY)
        rows = dict[int, tuple[int, int]]()
        for bucket, of_bucket in enumerate(stacked):
            for row, m in enumerate(of_bucket):
                rows[m] = (bucket, row)
        matrices_of: dict[int, list[int]] = {}  # of each parameter
        for m in sorted(rows):
            matrices_of.setdefault(self.parameter_of[m], []).append(m)
        parts: list[list[int]] = []
        held = dict[str, Counter[int]]()  # entries of ranks, by their group
        for i in dict.fromkeys(self.parameter_of[m] for m in rows):
            group = plan.matrices[matrices_of[i][0]].group
            own = Counter[int]()
            for m in matrices_of[i]:
                own.update(dict(plan.matrices[m].held))
            held[group] = held.get(group, Counter()) + own
            most = sum(max(of_ranks.values(), default=0) for of_ranks in held.values())
            if not parts or most * copied > room:
                parts.append([])
                held = {group: own}
            parts[-1].append(i)
        slices = []
        for part in parts:
            parameters = sorted(part)
            matrices = [m for i in parameters for m in matrices_of[i]]
            slices.append(ParamSlice(parameters, [rows[m] for m in matrices], [self._dtypes[m] for m in matrices]))
        return slices

    def _worked_on(self, bucket: Bucket, matrix: Matrix) -> Shape:
        """The shape that is orthogonalized."""
        return matrix.shard_in(self._groups).shape if bucket.scheme == "blockwise" else matrix.shape


def subset(plan: Plan, kept: Collection[int]) -> list[Bucket]:
    """A plan's buckets with some of its matrices alone."""
    buckets = []
    for bucket in plan.buckets:
        matrices = []
        compute_ranks = list[int]()
        for i, matrix in enumerate(bucket.matrices):
            if matrix in kept:
                matrices.append(matrix)
                compute_ranks += bucket.compute_ranks[i : i + 1]  # none in schemes that have none
        if matrices:
            buckets.append(replace(bucket, matrices=tuple(matrices), compute_ranks=tuple(compute_ranks)))
    return buckets


def in_order(plan: Plan, bucket: Bucket) -> tuple[list[int], list[LayoutRuns]]:
    """A bucket's matrices in the order of their stack, and those of each compute rank.

    Stacks that are sent have compute ranks in order, and equal layouts of one rank one behind another.
    """
    if bucket.scheme not in ("owner", "share"):
        return list(bucket.matrices), []
    first: dict[tuple[Rectangle, ...], int] = {}
    kinds = dict[int, tuple[int, int]]()  # compute rank, and the first matrix of the layout
    for rank, i in zip(bucket.compute_ranks, bucket.matrices, strict=True):
        kinds[i] = (rank, first.setdefault(plan.matrices[i].rectangles, i))
    order = sorted(kinds, key=kinds.__getitem__)
    runs: list[list[tuple[int, Matrix]]] = [[] for _ in range(plan.matrices[order[0]].ranks)]
    for (rank, i), same in groupby(order, kinds.__getitem__):
        runs[rank].append((len(list(same)), plan.matrices[i]))
    return order, list(runs)
