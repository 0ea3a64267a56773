"""A parameter in a step of SOAP: this rank's pieces of its matrices, the whole ones made of them, and the way back."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.matrices import LocalRows
from megatron_eopt.optimizers.parameters import local
from megatron_eopt.optimizers.soap_state import EXP_AVG, EXP_AVG_SQ, SIDES, STEPS
from megatron_eopt.optimizers.soap_step import Preconditioned, Side, update_of
from megatron_eopt.orthogonalize.precision import fp32_products
from megatron_eopt.parallel.collectives import Pending, all_gather
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.schemes.stacks import assemble, cut_out

MOST_BYTES = 2**28
"""Of the whole tensors that are gathered at once, where a single parameter does not take more."""


DECAY_POWERS = {"decoupled": 1, "independent": 0, "palm": 2}
"""Method of weight decay -> power of the learning rate in it."""


@dataclass(frozen=True)
class Place:
    """Where the logical matrices of a parameter lie.

    Attributes:
        layouts: one for each.
        rows: what splits this rank's part into pieces of them.
        ends: of the keys of their state.
    """

    layouts: list[Layout]
    rows: LocalRows
    ends: list[str]

    def gathered(self, state: Mapping[str, Any]) -> list[int]:
        """The matrices that need what other ranks have: those that are cut, and have a factor."""
        return [
            part
            for part, (layout, end) in enumerate(zip(self.layouts, self.ends, strict=True))
            if layout.sharded and any(factor + end in state for factor, _ in SIDES)
        ]


@dataclass(frozen=True)
class Task:
    """A parameter that a step works on: the same on all ranks that share it.

    Attributes:
        parameter: with or without a gradient.
        state: of it.
        place: of its matrices.
        settings: of its group.
        accepted: whether it takes part; if not, everything stays as it is.
        first: whether it has no bases so far, but is to have some; only if accepted.
    """

    parameter: Tensor
    state: dict[str, Any]
    place: Place
    settings: Mapping[str, Any]
    accepted: Tensor
    first: bool

    @cached_property
    def gathered(self) -> list[int]:
        """The matrices that need what other ranks have."""
        return self.place.gathered(self.state)

    @property
    def bytes(self) -> int:
        """Of the whole tensors that are gathered."""
        shapes = [self.place.layouts[part].shape for part in self.gathered]
        return sum(3 * rows * cols for rows, cols in shapes) * self.state[EXP_AVG].element_size()

    def pieces(self) -> list[Preconditioned]:
        """This rank's pieces of the matrices, with the sides of the whole ones."""
        momentum, squares, gradient = _here(self.state[EXP_AVG]), _here(self.state[EXP_AVG_SQ]), self.parameter.grad
        gradient = torch.zeros_like(momentum) if gradient is None else _here(gradient).to(momentum.dtype)
        gradient = torch.where(self.accepted, -gradient if self.settings["maximize"] else gradient, 0.0)
        gradients, momenta, seconds = (self.place.rows.split(x) for x in (gradient, momentum, squares))
        sides = [self._sides(end) for end in self.place.ends]
        return [Preconditioned(*each) for each in zip(gradients, momenta, seconds, sides, strict=True)]

    def _sides(self, end: str) -> tuple[Side | None, Side | None]:
        left, right = (
            Side(self.state[factor + end], self.state[basis + end]) if factor + end in self.state else None
            for factor, basis in SIDES
        )
        return left, right

    def step(self, matrices: Sequence[Preconditioned]) -> None:
        """Make the step of a parameter, of which this rank writes its own part.

        Args:
            matrices: the pieces, or where they are gathered the whole ones.
        """
        # a basis of nothing would turn to that of the gradients to come only step by step
        if self.first and not any(bool(matrix.gradient.any()) for matrix in matrices if matrix.factored):
            return
        self.state[STEPS] += self.accepted
        p, momentum, squares = (_here(x) for x in (self.parameter, self.state[EXP_AVG], self.state[EXP_AVG_SQ]))
        flag, lr, parts = self.accepted.double(), self.settings["lr"], self.place.rows.split(p)
        decay = lr ** DECAY_POWERS[self.settings["weight_decay_method"]] * self.settings["weight_decay"] * flag
        with fp32_products(self.settings["fp32_matmul_prec"]):
            for part, matrix in enumerate(matrices):
                update = update_of(matrix, self.state[STEPS], self.accepted, self.settings, self.first)
                if update is not None:
                    kept = parts[part].to(update.dtype) * (1 - decay)
                    parts[part] = (kept - self._own(update, part) * (lr * flag)).to(p.dtype)
        merge = self.place.rows.merge
        p.copy_(merge(parts))
        momentum.copy_(merge([self._own(matrix.momentum, part) for part, matrix in enumerate(matrices)]))
        squares.copy_(merge([self._own(matrix.squares, part) for part, matrix in enumerate(matrices)]))

    def _own(self, x: Tensor, part: int) -> Tensor:
        """This rank's piece of what belongs to a matrix."""
        return cut_out(x, self.place.layouts[part].piece) if part in self.gathered else x


def take(tasks: Sequence[Task], most_bytes: int = MOST_BYTES) -> None:
    """Make the steps of parameters.

    Of those that are cut, gradient and moments of several at a time are gathered by every rank that shares them, which
    then computes the whole step: all make the same of the same numbers.

    Args:
        tasks: of those that are shared with other ranks all ranks name the same, in the same order.
        most_bytes: of whole tensors that are gathered at once, where a single parameter does not take more.
    """
    for task in tasks:
        if not task.gathered:
            task.step(task.pieces())
    for bucket, pending in one_ahead((bucket, _gather(bucket)) for bucket in buckets(tasks, most_bytes)):
        for task, matrices in zip(bucket, pending.wait(), strict=True):
            task.step(matrices)


def buckets(tasks: Sequence[Task], most_bytes: int) -> list[list[Task]]:
    """The parameters that are gathered at once: of one group of ranks, one dtype, and so many bytes at most."""
    found: dict[tuple[str, torch.dtype], list[list[Task]]] = {}
    for task in tasks:
        if not task.gathered:
            continue
        alike = found.setdefault((task.place.layouts[0].label, task.state[EXP_AVG].dtype), [[]])
        if alike[-1] and sum(each.bytes for each in alike[-1]) + task.bytes > most_bytes:
            alike.append([])
        alike[-1].append(task)
    return [bucket for alike in found.values() for bucket in alike]


def _gather(bucket: Sequence[Task]) -> Pending[list[list[Preconditioned]]]:
    """Start to gather the whole matrices of a bucket: one collective."""
    pieces = [task.pieces() for task in bucket]
    wanted = [(task, place, part) for place, task in enumerate(bucket) for part in task.gathered]
    layouts = [task.place.layouts[part] for task, _, part in wanted]
    own = [pieces[place][part] for _, place, part in wanted]
    pending = gather([torch.stack([each.gradient, each.momentum, each.squares]) for each in own], layouts)

    def finish() -> list[list[Preconditioned]]:
        for (_, place, part), stack in zip(wanted, pending.wait(), strict=True):
            gradient, momentum, squares = stack
            pieces[place][part] = replace(pieces[place][part], gradient=gradient, momentum=momentum, squares=squares)
        return pieces

    return Pending(None, finish)


def gather(pieces: Sequence[Tensor], layouts: Sequence[Layout]) -> Pending[list[Tensor]]:
    """Start to gather matrices of which each rank of a group has a piece, by one all-gather, padded where they differ.

    Args:
        pieces: this rank's, (n x rows x cols) for ``n`` matrices that lie alike; some may be empty.
        layouts: one for each, of one group and without a side of length 0.

    Returns:
        For each the whole matrices, (n x rows x cols), in memory of their own.
    """
    group = layouts[0].group
    assert group is not None, "matrices that are cut have a group"
    counts = [
        [len(stack) * layout.pieces[rank].numel for stack, layout in zip(pieces, layouts, strict=True)]
        for rank in range(group.size())
    ]
    own = torch.cat([stack.reshape(-1) for stack in pieces])
    longest = max(sum(of_rank) for of_rank in counts)
    pending = all_gather(torch.nn.functional.pad(own, (0, longest - own.numel())), group)

    def finish() -> list[Tensor]:
        rows = [row[: sum(each)].split(each) for row, each in zip(pending.wait(), counts, strict=True)]
        return [
            assemble(of_ranks, layout.pieces, layout.shape) for *of_ranks, layout in zip(*rows, layouts, strict=True)
        ]

    return Pending(None, finish)


def one_ahead[Item](items: Iterable[Item]) -> Iterator[Item]:
    """Items one after another, each when the next one is there already."""
    waiting: list[Item] = []
    for item in items:
        waiting.append(item)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def _here(x: Tensor) -> Tensor:
    """This rank's part, sharing its memory; a scalar as a vector, for only that can be split."""
    return torch.atleast_1d(local(x))
