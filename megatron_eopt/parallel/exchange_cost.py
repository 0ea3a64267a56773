"""What the exchanges of :mod:`~megatron_eopt.parallel.exchange` cost, exactly as a step counts them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from megatron_eopt.parallel.collectives import sent_bytes
from megatron_eopt.parallel.exchange import Spread
from megatron_eopt.parallel.plan_records import Matrix, grouped
from megatron_eopt.parallel.rectangles import Shape
from megatron_eopt.parallel.workspace import IN_FLIGHT


@dataclass(frozen=True)
class Exchange:
    """What ranks of a group do together at one place of a step.

    Attributes:
        sent: bytes, of each rank.
        buffers: most bytes of what is exchanged, of each rank: where it lies, and as it travels.
    """

    collective: str
    group: str
    calls: int
    sent: list[int]
    buffers: list[int]


class Side(NamedTuple):
    """What a rule sums over ranks, for each row or column of a matrix."""

    dim: int  # 0 for rows
    numbers: int
    itemsize: int

    def bytes_of(self, shape: Shape) -> int:
        """Bytes of the sums of a matrix."""
        return shape[self.dim] * self.numbers * self.itemsize


@dataclass(frozen=True)
class SideSum:
    """Sums for so many equal matrices."""

    matrix: Matrix
    count: int
    side: Side

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return self.count * self.side.bytes_of(self.matrix.shape)


Brought = Sequence[tuple[Spread, int]]  # equal matrices, and how many tensors of each one


def brought(several: Brought) -> list[Exchange]:
    """Cost of :func:`~megatron_eopt.parallel.exchange.bring`."""
    first, _ = several[0]
    matrix = first.matrix
    ranks = matrix.ranks
    if not first.numbers:
        most = max(_held(several, rank) for rank in range(ranks))
        sent = sent_bytes("all_gather", most, ranks)
        return [Exchange("all_gather", matrix.group, 1, [sent] * ranks, [2 * (1 + ranks) * most] * ranks)]
    if matrix.copies == ranks:
        return []
    sent_by = []
    for rank in range(ranks):
        near = matrix.copy_of(rank)
        sent = 0
        for spread, tensors in several:
            others = sum(spread.numbers[near]) - spread.numbers[rank]
            sent += others * tensors * spread.matrix.rectangles[rank].numel * matrix.itemsize
        sent_by.append(sent)
    return [Exchange("all_to_all", matrix.group, 1, sent_by, _buffers(several))]


def handed_out(several: Brought) -> list[Exchange]:
    """Cost of :func:`~megatron_eopt.parallel.exchange.hand_out`."""
    first, _ = several[0]
    matrix = first.matrix
    ranks = matrix.ranks
    if not first.numbers:
        return []
    whole = [_whole(several, rank) for rank in range(ranks)]
    if matrix.copies == ranks:
        # a chain: what a rank does not pass on is that of the next one
        sent_by = [sum(whole) - whole[(rank + 1) % ranks] for rank in range(ranks)]
        return [Exchange("broadcast", matrix.group, sum(map(bool, whole)), sent_by, _buffers(several))]
    sent_by = []
    for rank in range(ranks):
        stays = 0
        for spread, tensors in several:
            stays += spread.numbers[rank] * tensors * spread.matrix.rectangles[rank].numel * matrix.itemsize
        sent_by.append(matrix.copies * whole[rank] - stays)
    return [Exchange("all_to_all", matrix.group, matrix.copies, sent_by, _buffers(several))]


def summed(of_rules: Sequence[Sequence[SideSum]]) -> list[Exchange]:
    """Cost of :meth:`~megatron_eopt.parallel.engine.Engine.side_sums` of rules that go on together."""
    found = []
    for at_once in zip_longest(*of_rules):
        some = filter(None, at_once)
        for alike in grouped(some, lambda each: (each.matrix.group, each.side.dim, each.side.itemsize)).values():
            matrix = alike[0].matrix
            size = sum(each.bytes for each in alike)
            sent = sent_bytes("all_reduce", size, matrix.ranks)
            # what a rank has of it, the same within whole sides, and these of all matrices together
            found.append(Exchange("all_reduce", matrix.group, 1, [sent] * matrix.ranks, [3 * size] * matrix.ranks))
    return found


def busiest(exchanges: Sequence[Exchange]) -> int:
    """Bytes that the busiest rank sends, summed over groups."""
    sent: dict[str, list[int]] = {}
    for exchange in exchanges:
        so_far = sent.get(exchange.group, [0] * len(exchange.sent))
        sent[exchange.group] = [a + b for a, b in zip(so_far, exchange.sent, strict=True)]
    return sum(map(max, sent.values()))


def most_buffers(chunks: Sequence[Sequence[Exchange]]) -> int:
    """Most bytes of a rank's buffers while chunks of one group take turns."""
    of_chunks = []
    for exchanges in filter(None, chunks):
        of_ranks = zip(*(exchange.buffers for exchange in exchanges), strict=True)
        of_chunks.append(list(map(max, of_ranks)))
    most = 0
    for first in range(len(of_chunks)):
        at_work = zip(*of_chunks[first : first + IN_FLIGHT], strict=True)
        most = max(most, *map(sum, at_work))
    return most


def _held(several: Brought, rank: int) -> int:
    """Bytes of a rank's shards."""
    return _bytes(several, lambda spread: spread.count * spread.matrix.rectangles[rank].numel)


def _whole(several: Brought, rank: int) -> int:
    """Bytes of the matrices that a rank works on."""
    return _bytes(several, lambda spread: spread.numbers[rank] * spread.matrix.shape[0] * spread.matrix.shape[1])


def _bytes(several: Brought, entries: Callable[[Spread], int]) -> int:
    return sum(tensors * entries(spread) * spread.matrix.itemsize for spread, tensors in several)


def _buffers(several: Brought) -> list[int]:
    ranks = range(several[0][0].matrix.ranks)
    return [2 * (_held(several, rank) + _whole(several, rank)) for rank in ranks]
