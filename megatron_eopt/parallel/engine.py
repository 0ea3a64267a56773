"""All that an optimizer knows of ranks."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.matrices import LocalRows
from megatron_eopt.parallel.agreement import check_same, groups_by_label
from megatron_eopt.parallel.chunks import CompiledChunk, Compiler, ParamSpec
from megatron_eopt.parallel.collectives import lowest
from megatron_eopt.parallel.cost import largest_iteration
from megatron_eopt.parallel.exchange import Exchanged, Spread, bring, hand_out
from megatron_eopt.parallel.explain import explain, explain_offloaded
from megatron_eopt.parallel.layout import local_rows
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.plan_records import Matrix, Plan, TpMode
from megatron_eopt.parallel.rectangles import Rectangle, whole
from megatron_eopt.parallel.scheduler import Program, run_chunks
from megatron_eopt.parallel.statistics import Statistics, StatisticsRequest, statistics_of, sum_over
from megatron_eopt.parallel.workspace import BYTES_OF_ENTRY, DEFAULT_WORKSPACE, Workspace

_MOST_PLANS = 1024  # kept, one for each set of parameters with gradients


class Engine:
    """Parameters, their groups of ranks, and the plan.

    All ranks :meth:`prepare` it together; then it is frozen. The ``parameters`` are in the same order on every rank;
    ``device`` is that of the updates. Raises ``ValueError`` for two groups of one name, shards that do not make up a
    matrix, and layouts with and without an iteration.

    Attributes:
        groups: of ranks, by label.
        plan: of the parameters that have an iteration.
        works: the iterations that costs are counted of, by name.
    """

    def __init__(
        self,
        parameters: Sequence[ParamSpec],
        device: torch.device,
        tp_mode: TpMode = "duplicated",
        workspace: Workspace = DEFAULT_WORKSPACE,
    ) -> None:
        self.device = device
        self.workspace = workspace
        self.groups = groups_by_label((p.name, p.shared_by) for p in parameters)
        self._parameters = list(parameters)
        self._compiler = Compiler(parameters, self.groups, device, workspace)
        self._rows: dict[int, LocalRows] = {}
        for i, p in enumerate(parameters):
            if p.layout is not None:
                self._rows[i] = local_rows(p.layout, p.split)
        self.matrices: list[tuple[Matrix, ...]] = [()] * len(parameters)
        """Of each parameter, as they are orthogonalized: ``blockwise`` makes each shard a matrix."""
        planned = self._compiler.matrices
        indices = self._compiler.parameter_of
        for i, matrix in zip(indices, planned, strict=True):
            if tp_mode == "blockwise":
                shape = self.shard(matrix).shape
                matrix = replace(matrix, shape=shape, rectangles=(whole(shape),), group="")
            self.matrices[i] += (matrix,)
        self.works = self._compiler.works()
        self.plan = Plan(tuple(planned), ())
        self._room = workspace.for_chunks(0)
        if self.works:
            self.plan = make_plan(planned, tp_mode, self.works, workspace=workspace, parameters=indices)
            self._room = workspace.for_chunks(largest_iteration(planned, self.works))
        if workspace.state:
            self._room = 0  # its slots on the device are those of the chunk at work and of the next
        self._chunks: dict[tuple[int, ...], list[CompiledChunk]] = {}
        self._copied = BYTES_OF_ENTRY
        self._marks: tuple[Sequence[bool], list[Tensor]] = ([], [])

    def prepare(self) -> None:
        """Compare the plan and the settings with those of the sharing ranks.

        All of them call it together. Raises ``ValueError`` if plan or settings differ.
        """
        settings: dict[str, dict[str, Mapping[str, Any]]] = {label: {} for label in self.groups}
        for p in self._parameters:
            for label in p.shared_by:
                settings[label][p.name] = p.settings
        check_same(self.plan, self.groups, settings)

    def slice_chunks(self, copied: int) -> None:
        """Let programs take as many parameters as the workspace lets them copy; they copy some bytes of each entry."""
        self._copied = copied
        self._chunks.clear()

    def explain(self) -> str:
        """The plan as a table of its buckets' costs."""
        table = explain(self.plan, self.works, self.workspace, self._compiler.parameter_of)
        state = self.offloaded()
        if any(state):
            table += "\n" + explain_offloaded(state)
        return table

    def offloaded(self) -> list[int]:
        """Bytes in this rank's host memory, for each chunk."""
        chunk_of = dict[int, int]()  # of each parameter
        for bucket in self.plan.buckets:
            for matrix in bucket.matrices:
                chunk_of[self._compiler.parameter_of[matrix]] = bucket.chunk
        bytes_of = [0] * (1 + max(chunk_of.values(), default=0))
        for index, chunk in chunk_of.items():
            bytes_of[chunk] += self._parameters[index].offloaded
        return bytes_of

    def shares(self, index: int) -> bool:
        """Whether other ranks wait for this one's shard."""
        return bool(self._parameters[index].shared_by)

    def flat(self, indices: Sequence[int]) -> list[Matrix]:
        """The logical matrices of parameters, in their order."""
        return [matrix for i in indices for matrix in self.matrices[i]]

    def order(self, indices: Sequence[int]) -> list[list[int]]:
        """The parameters of each chunk, as :meth:`run` starts them."""
        order = []
        for chunk in self._chunks_of(indices):
            order.append([i for of_slice in chunk.slices for i in of_slice.parameters])
        return order

    def _chunks_of(self, indices: Sequence[int]) -> list[CompiledChunk]:
        wanted = tuple(indices)
        if wanted not in self._chunks:
            if len(self._chunks) > _MOST_PLANS:
                self._chunks.clear()
            self._chunks[wanted] = self._compiler.chunks(self.plan, wanted, self._copied)
        return self._chunks[wanted]

    def agree(self, flag: Tensor, present: Sequence[bool]) -> Tensor:
        """Minimum of a flag over the sharing ranks; -1 where some have gradients that others lack.

        ``present`` says which parameters have one here.
        """
        if self._marks[0] != present:
            self._marks = present, [self._mark(group, present) for group in self.groups.values()]
        for group, mark in zip(self.groups.values(), self._marks[1], strict=True):
            least, low, high = lowest(torch.cat([flag.view(1), mark]), group).unbind()
            flag = torch.where(low == -high, least, -1)
        return flag

    def _mark(self, group: ProcessGroup, present: Sequence[bool]) -> Tensor:
        """A number of what is present of parameters that a group shares, and its negative: both have a minimum."""
        pairs = zip(self._parameters, present, strict=True)
        shared = bytes(has for p, has in pairs if group in p.shared_by.values())
        number = crc32(shared) >> 1
        return torch.tensor([number, -number], dtype=torch.int32, device=self.device)

    def split(self, indices: Sequence[int], tensors: list[Tensor]) -> list[Tensor]:
        """This rank's shards of logical matrices, as :meth:`flat`; empties ``tensors``."""
        shards: list[Tensor] = []
        for i, x in zip(indices, tensors, strict=True):
            rows = self._rows.get(i)
            if rows is not None and x.ndim > 2 and not rows.stacked:
                x = x.flatten(1)
            if rows is None or rows.is_whole:
                shards.append(x)
            else:
                shards += rows.split(x)
        tensors.clear()
        return shards

    def rows(self, index: int) -> LocalRows:
        """This rank's rows of a parameter's logical matrices."""
        return self._rows[index]

    def is_whole(self, index: int) -> bool:
        """Whether a parameter of two dimensions is its only logical matrix, as it lies."""
        return index not in self._rows or self._rows[index].is_whole

    def merge(self, indices: Sequence[int], shards: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of :meth:`split`."""
        remaining = iter(shards)
        merged = []
        for i in indices:
            rows = self._rows.get(i)
            if rows is None or rows.is_whole:
                merged.append(next(remaining))
            else:
                merged.append(rows.merge(list(islice(remaining, len(self.matrices[i])))))
        return merged

    @torch.no_grad()
    def run(self, indices: Sequence[int], program: Callable[[Sequence[int]], Program]) -> None:
        """Run programs for parameters, within the bounds of the workspace.

        ``program`` starts the program of some of these parameters, which orthogonalizes once; it is called for each of
        them once. ``indices`` are ascending. The order is the same on every rank if all name the same shared
        parameters: see :func:`~megatron_eopt.parallel.scheduler.run_chunks`.
        """
        run_chunks(self._chunks_of(indices), program, self.device, self._room)

    def factors(self, indices: Sequence[int], shards: list[Tensor]) -> list[Tensor]:
        """The orthogonal factors of ``shards``, in that list, without programs."""
        first_of = dict[int, int]()  # where the shards of each parameter begin
        count = 0
        for i in indices:
            first_of[i] = count
            count += len(self.matrices[i])

        def program(some: Sequence[int]) -> Program:
            numbers = list[int]()
            for i in some:
                numbers += range(first_of[i], first_of[i] + len(self.matrices[i]))
            factors = yield [shards[number] for number in numbers]
            for number, factor in zip(numbers, factors, strict=True):
                shards[number] = factor

        self.run(indices, program)
        return shards

    def statistics(self, wanted: Sequence[StatisticsRequest]) -> list[Statistics]:
        """Statistics of logical matrices, with one all-reduce for each group."""
        return statistics_of(wanted, self.groups)

    def sums(self, tensors: Sequence[Tensor], labels: Sequence[str]) -> list[Tensor]:
        """Sums of tensors over groups; without a label they stay."""
        return sum_over(tensors, labels, self.groups)

    def shard(self, matrix: Matrix) -> Rectangle:
        """What this rank has of a matrix."""
        return matrix.shard_in(self.groups)

    def side_sums(self, tensors: Sequence[Tensor], matrices: Sequence[Matrix], dim: int) -> list[Tensor]:
        """Sums over ranks of what they have for rows (dim 0) or columns of matrices.

        Tensors (... x length x k) have the length of this rank's part of a side, those that are returned that of the
        whole side. What is of matrices that ranks have whole stays; of several copies one counts.
        """
        whole_sides = []
        for x, matrix in zip(tensors, matrices, strict=True):
            if matrix.sharded:
                shard = self.shard(matrix)
                start, end = (shard.left, shard.right) if dim else (shard.top, shard.bottom)
                own = x
                x = own.new_zeros(*own.shape[:-2], matrix.shape[dim], own.shape[-1])
                if matrix.copy_of(self.groups[matrix.group].rank()).start == 0:
                    x[..., start:end, :] = own
            whole_sides.append(x)
        return self.sums(whole_sides, [matrix.group if matrix.sharded else "" for matrix in matrices])

    def gather_whole(
        self,
        stacks: Sequence[Sequence[Tensor]],
        spread: Sequence[Spread | None],
    ) -> Generator[None, None, list[list[Tensor]]]:
        """Bring whole matrices together, by one collective.

        Yields while it waits, if something is exchanged, and returns stacks of them. ``stacks`` has, for each of
        ``spread``, some of this rank's shards (n x rows x cols) of ``n`` tensors; they stay where it is None.
        ``spread`` is of one group.
        """
        return self._exchanged(stacks, spread, bring)

    def scatter_back(
        self,
        stacks: Sequence[Sequence[Tensor]],
        spread: Sequence[Spread | None],
    ) -> Generator[None, None, list[list[Tensor]]]:
        """The way back from :meth:`gather_whole`; views where nothing is exchanged."""
        return self._exchanged(stacks, spread, hand_out)

    def _exchanged(
        self,
        stacks: Sequence[Sequence[Tensor]],
        spread: Sequence[Spread | None],
        start: Callable[[list[Tensor], list[Spread], ProcessGroup], Exchanged],
    ) -> Generator[None, None, list[list[Tensor]]]:
        exchanged = [list(some) for some in stacks]
        tensors = list[Tensor]()
        kinds = list[Spread]()
        for some, kind in zip(exchanged, spread, strict=True):
            if kind is not None:
                tensors += some
                kinds += [kind] * len(some)
        if not tensors:
            return exchanged
        wait = start(tensors, kinds, self.groups[kinds[0].matrix.group])
        del tensors
        yield
        arrived = iter(wait())
        for some, kind in zip(exchanged, spread, strict=True):
            if kind is not None:
                some[:] = islice(arrived, len(some))
        return exchanged
