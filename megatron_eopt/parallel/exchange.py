"""How shards of several ranks become whole matrices, and come back."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.parallel.collectives import Pending, all_gather, all_to_all, broadcast
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.parallel.rectangles import Rectangle, Shape, Strip, cut_dimension, strips

Shapes = tuple[int, int, int] | list[Shape]  # (n x rows x cols), or of matrices that lie back to back

LayoutRuns = Sequence[tuple[int, Matrix]]  # equal layouts in order: (how many, the first)


class OwnerExchange:
    """The ways of matrices to the rank that computes each, and back.

    Of several copies of a matrix the shards of one come, and those of all go.

    Attributes:
        here: the matrices that this rank computes.
        arriving: the same, as the ranks of one copy hold them.
    """

    def __init__(self, runs: Sequence[LayoutRuns], matrix: Matrix, group: ProcessGroup) -> None:
        rank = group.rank()
        self.here = runs[rank] or [(0, matrix)]
        self.arriving = self.here
        self.copy = matrix.copy_of(rank)
        self._group = group
        if matrix.copies > 1:
            self.arriving = [(count, replace(x, rectangles=x.rectangles[self.copy])) for count, x in self.here]
        self._sent = []  # entries of this rank's shards of the matrices of each rank
        for of_rank in runs:
            self._sent.append(sum(count * x.rectangles[rank].numel for count, x in of_rank))
        self._received = entries_of(self.here)

    def send(self, flat: Tensor) -> Pending[Tensor]:
        """Send shards, rank by rank, to the compute ranks of this rank's copy, which has all of each matrix.

        ``flat`` has shards of matrices that these compute, or of all.
        """
        sent = self._in_copy(self._sent)
        if flat.numel() > sum(sent):
            first = sum(self._sent[: self.copy.start])
            flat = flat[first : first + sum(sent)]
        return all_to_all(flat, sent, self._in_copy(self._received), self._group)

    def send_back(self, flat: Tensor) -> Pending[Tensor]:
        """Send what :func:`cut_up` made of matrices here; shards arrive as they were sent."""
        return all_to_all(flat, self._received, self._sent, self._group)

    def send_to_each_copy(self, flat: Tensor) -> list[Pending[Tensor]]:
        """Send what :func:`cut_up` made of :attr:`arriving`, to each copy of ranks by itself.

        Copies lie alike, so that one buffer serves all. What arrives for this rank's copy has all shards, as they were
        sent.
        """
        started = []
        size = self.copy.stop - self.copy.start
        for first in range(0, self._group.size(), size):
            copy = slice(first, first + size)
            arriving = self._sent if copy == self.copy else [0] * len(self._sent)
            started.append(all_to_all(flat, _within(copy, self._received), arriving, self._group))
        return started

    def _in_copy(self, sizes: Sequence[int]) -> list[int]:
        return _within(self.copy, sizes)


def _within(ranks: slice, sizes: Sequence[int]) -> list[int]:
    """Sizes for some ranks, and 0 for all others."""
    some = range(ranks.start, ranks.stop)
    return [size if rank in some else 0 for rank, size in enumerate(sizes)]


Factors = Tensor | list[Tensor]  # a stack (n x rows x cols), or its matrices; of any strides

Exchanged = Callable[[], list[Tensor]]
"""Waits for an exchange that is under way, and returns its stacks."""


def gather(
    stacks: Sequence[Tensor],
    matrices: Sequence[Matrix],
    group: ProcessGroup,
    short_first: bool = False,
) -> Exchanged:
    """Start to gather matrices on every rank, by all-gather.

    A stack has this rank's shards (n x rows x cols) of ``n`` matrices like that of ``matrices``.
    """
    runs = [(len(stack), matrix) for stack, matrix in zip(stacks, matrices, strict=True)]
    flat = stacks[0].reshape(-1)
    if len(stacks) > 1:
        flat = torch.cat([stack.reshape(-1) for stack in stacks])
    missing = max(entries_of(runs)) - flat.numel()
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    pending = all_gather(flat, group)
    return lambda: assemble(pending.wait(), [[run] for run in runs], short_first)


@dataclass(frozen=True)
class Spread:
    """How equal matrices are spread over a group."""

    matrix: Matrix  # one of them, with entries, cut or held in copies
    count: int  # how many there are
    numbers: Sequence[int]  # how many each rank works on, in order; empty where each rank works on all


def bring(stacks: Sequence[Tensor], spread: Sequence[Spread], group: ProcessGroup) -> Exchanged:
    """Start to bring matrices where they are worked on, from stacks of shards."""
    if not spread[0].numbers:
        return gather(stacks, [kind.matrix for kind in spread], group)
    if spread[0].matrix.copies == group.size():
        rank = group.rank()
        return lambda: [x.split(list(kind.numbers))[rank] for x, kind in zip(stacks, spread, strict=True)]
    owners = _owners(spread, group)
    pending = owners.send(_by_rank(stacks, spread, owners.copy))
    return lambda: assemble(pending.wait(), [[run] for run in owners.arriving])


def hand_out(stacks: Sequence[Tensor], spread: Sequence[Spread], group: ProcessGroup) -> Exchanged:
    """Start the way back from :func:`bring`, to stacks of shards."""
    shards = [kind.matrix.rectangles[group.rank()] for kind in spread]
    if not spread[0].numbers:
        return lambda: [cut_out(x, shard) for x, shard in zip(stacks, shards, strict=True)]
    shapes = [(kind.count, *shard.shape) for kind, shard in zip(spread, shards, strict=True)]
    if spread[0].matrix.copies == group.size():
        return _hand_out_whole(stacks, spread, shapes, group)
    owners = _owners(spread, group)
    pending = owners.send_to_each_copy(cut_up(stacks, owners.arriving))
    # all that arrives comes with one of them
    return lambda: _of_stacks(max((each.wait() for each in pending), key=Tensor.numel), spread, shapes)


def _hand_out_whole(
    stacks: Sequence[Tensor], spread: Sequence[Spread], shapes: Sequence[tuple[int, int, int]], group: ProcessGroup
) -> Exchanged:
    """:func:`hand_out` to ranks that each hold a copy: an all-to-all would need a buffer for every one of them."""
    pending = []
    for rank in range(group.size()):
        size = sum(kind.numbers[rank] * rows * cols for kind, (_, rows, cols) in zip(spread, shapes, strict=True))
        if rank == group.rank():
            flat = torch.cat([stack.reshape(-1) for stack in stacks])
        else:
            flat = stacks[0].new_empty(size)
        if size:
            pending.append(broadcast(flat, rank, group))
    return lambda: _of_stacks(torch.cat([each.wait() for each in pending]), spread, shapes)


def _owners(spread: Sequence[Spread], group: ProcessGroup) -> OwnerExchange:
    runs = []
    for rank in range(group.size()):
        runs.append([(kind.numbers[rank], kind.matrix) for kind in spread])
    return OwnerExchange(runs, spread[0].matrix, group)


def _by_rank(stacks: Sequence[Tensor], spread: Sequence[Spread], ranks: slice) -> Tensor:
    """What some ranks work on of stacks, as one tensor, rank by rank."""
    if len(stacks) == 1:
        return stacks[0].reshape(-1)
    parts = [x.split(list(kind.numbers))[ranks] for x, kind in zip(stacks, spread, strict=True)]
    flat = list[Tensor]()
    for of_rank in zip(*parts, strict=True):
        flat += [part.reshape(-1) for part in of_rank]
    return torch.cat(flat)


def _of_stacks(flat: Tensor, spread: Sequence[Spread], shapes: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """The inverse of :func:`_by_rank`."""
    if len(shapes) == 1:
        return [flat.view(shapes[0])]
    sizes = []
    for rank in range(len(spread[0].numbers)):
        for kind, (_, rows, cols) in zip(spread, shapes, strict=True):
            sizes.append(kind.numbers[rank] * rows * cols)
    parts = flat.split(sizes)
    return [torch.cat(parts[i :: len(shapes)]).view(shape) for i, shape in enumerate(shapes)]


def entries_of(runs: LayoutRuns) -> list[int]:
    """Entries of each rank's shards."""
    found: list[int] = []
    for strip in _strips(runs):
        held = 0
        for (count, _), rectangle in zip(runs, strip.rectangles, strict=True):
            held += count * rectangle.numel
        found += [held // strip.ranks] * strip.ranks
    return found


def assemble(received: Tensor, groups: Sequence[LayoutRuns], short_first: bool = False) -> list[Tensor]:
    """A stack of whole matrices of each group, whose shape is the same, from all ranks' parts.

    Args:
        received: parts of all groups, rank by rank; 1-D, or with a row for each rank, which may be padded. It is the
            result if it is the matrix already.
        groups: layouts of the matrices.
        short_first: store tall matrices transposed.
    """
    runs = [run for group in groups for run in group]
    stacks = list[Tensor]()
    of_runs = list[Tensor]()
    for group in groups:
        _, matrix = group[0]
        rows, cols = matrix.shape
        transposed = short_first and rows > cols
        count = sum(count for count, _ in group)
        is_alone = count == len(runs) == 1 and received.numel() == rows * cols  # no row is padded
        if is_alone and not transposed and cut_dimension(matrix.shape, matrix.rectangles) == 0:
            return [received.view(1, rows, cols)]
        if transposed:
            stack = received.new_empty(count, cols, rows).mT
        else:
            stack = received.new_empty(count, rows, cols)
        stacks.append(stack)
        of_runs += by_run(stack, group)
    for part, place in _pairs(received, of_runs, runs):
        _copy(part, place)
    return stacks


def cut_up(stacks: Sequence[Tensor], runs: LayoutRuns) -> Tensor:
    """All ranks' parts of stacks of whole matrices, rank by rank."""
    flat = stacks[0].new_empty(sum(entries_of(runs)))
    for part, place in _pairs(flat, stacks, runs):
        _copy(place, part)
    return flat


def _copy(x: Tensor, out: Tensor) -> None:
    """Copy matrices (ranks x n x rows x cols)."""
    if x.device.type != "cpu" or x.stride(-1) == out.stride(-1):
        out.copy_(x)
        return
    # a CPU transposes matrices one by one four times as fast
    for of_rank, of_out in zip(x, out, strict=True):
        for matrix, place in zip(of_rank, of_out, strict=True):
            place.copy_(matrix)


def _pairs(flat: Tensor, stacks: Sequence[Tensor], runs: LayoutRuns) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of what several ranks have of a stack, in ``flat`` and in the stack."""
    rank = 0
    start = 0
    for strip in _strips(runs):
        sizes = []
        for (count, _), rectangle in zip(runs, strip.rectangles, strict=True):
            sizes.append(count * rectangle.numel // strip.ranks)
        size = sum(sizes)
        if flat.ndim == 2:
            rows = flat[rank : rank + strip.ranks, :size]
        else:
            rows = flat[start : start + size * strip.ranks].view(strip.ranks, size)
        parts = rows.split(sizes, dim=1)
        for part, stack, dim, rectangle in zip(parts, stacks, strip.dims, strip.rectangles, strict=True):
            if part.numel():
                of_ranks = cut_out(stack, rectangle).unflatten(dim + 1, (strip.ranks, -1))
                place = of_ranks.movedim(dim + 1, 0)  # the ranks as the first dimension, as in flat
                yield part.view(place.shape), place
        rank += strip.ranks
        start += size * strip.ranks


def _strips(runs: LayoutRuns) -> tuple[Strip, ...]:
    return strips(tuple(matrix.rectangles for _, matrix in runs))


def by_run(stack: Tensor, runs: LayoutRuns) -> Sequence[Tensor]:
    """A stack of the matrices of several runs, as one for each run."""
    if len(runs) == 1:
        return [stack]
    return stack.split([count for count, _ in runs])


def cut_out(x: Tensor, rectangle: Rectangle) -> Tensor:
    """The view of a shard of matrices, perhaps stacked."""
    return x[..., rectangle.top : rectangle.bottom, rectangle.left : rectangle.right]


def shards_of(flat: Tensor, shapes: Shapes) -> Factors:
    """Matrices back to back; a stack if their shapes agree."""
    if isinstance(shapes, tuple):
        return flat.view(shapes)
    parts = flat.split([rows * cols for rows, cols in shapes])
    return [x.view(shape) for x, shape in zip(parts, shapes, strict=True)]
