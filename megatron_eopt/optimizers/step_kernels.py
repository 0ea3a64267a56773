"""The elementwise half of a step in two launches for many shards.

What :mod:`~megatron_eopt.optimizers.foreach` does in several passes over memory, two kernels of Triton do in one each:
from the gradient to the bucket, and from the orthogonal factor to the weight. torch's passes are the reference, and
what a CPU takes; the kernels round where these do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_eopt.matrices import LocalRows
from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.foreach import Tensors
from megatron_eopt.optimizers.step import Batch
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.scheduler import Rows
from megatron_eopt.settings.groups import MOMENTUM_STEPS
from megatron_eopt.settings.values import Scalar

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_MOST_TABLES = 512  # kept: two for each chunk
_TILE = 4096  # entries of a tile
_WIDEST = 1024  # its most columns
_SQUARE = 64  # a side of a square one
_ALIGNED = 16  # bytes, and entries of a row, with which a thread reads several entries at once
# whether entries of a row, or of a column, lie side by side
_BY_COLUMNS = 0
_BY_ROWS = 1
_SCATTERED = 2


class Piece(NamedTuple):
    """Rows of a shard, equally far apart; a row of a table, in int64.

    A tensor has an address in bytes, or an offset in entries, and its distances in entries.
    """

    rows: int
    cols: int
    parameter: int  # of the batch, whose flag says whether it steps
    gradient: int
    gradient_row: int
    gradient_col: int
    momentum: int
    momentum_row: int
    momentum_col: int
    weight: int
    weight_row: int
    weight_col: int
    other: int  # an offset: of the update in its bucket, or of the factor
    other_row: int
    other_col: int
    matrix: int  # of the chunk
    first_word: int  # of the seed of random bits
    second_word: int
    top: int  # of its first entry in the logical matrix
    left: int


@dataclass(frozen=True)
class Launch:
    """One kernel for alike pieces of one batch."""

    batch: int  # among those of the chunk
    table: Tensor  # of pieces, on the device
    pieces: list[Piece]
    first: int  # the matrix from whose memory offsets are counted
    scale: float  # of each factor
    constants: dict[str, Any]

    @cached_property
    def fixed(self) -> tuple[tuple[str, Any], ...]:
        """The constants, hashable."""
        return tuple(self.constants.items())

    @property
    def programs(self) -> int:
        """How many tiles there are."""
        return len(self.pieces) * self.tiles

    @cached_property
    def tiles(self) -> int:
        """How many tiles a piece has."""
        piece = self.pieces[0]
        return -(-piece.rows // self.constants["HEIGHT"]) * -(-piece.cols // self.constants["WIDTH"])


class StepKernels:
    """Runs both kernels for chunks of an engine's parameters.

    Tables of addresses are kept, and sent to the device anew only after an address has changed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[object, tuple[list[object], list[Launch]]] = {}

    def momentum(self, batches: Sequence[Batch], updates: Tensors, heavy: bool = False) -> None:
        """Update momenta, and write what is orthogonalized to ``updates``.

        These are this rank's shards of all logical matrices, in any dtype. ``heavy`` takes
        :func:`~megatron_eopt.optimizers.foreach.heavy_ball` in place of the average.
        """
        from megatron_eopt.optimizers.triton_step import momentum_kernel

        batches = [self._readable(batch) for batch in batches]
        for x in self._launches(batches, updates, momentum=True, HEAVY=heavy):
            batch = batches[x.batch]
            beta = float(batch.beta)
            decay = _float(batch.weight_decay)
            step = batch.settings[MOMENTUM_STEPS] % 2**31 if batch.rounded is not None else 0
            launch(momentum_kernel, x, _flags(x, batch), updates[x.first], beta, 1 - beta, decay, step)

    def subtract(self, batches: Sequence[Batch], factors: Tensors, scales: Sequence[float | Tensor]) -> None:
        """Decay weights, and subtract factors times scale and learning rate.

        ``scales`` are one for each logical matrix: numbers, or tensors on the device.
        """
        from megatron_eopt.optimizers.triton_step import subtract_kernel

        of_matrices = [scale for scale in scales if isinstance(scale, Tensor)]
        stacked = torch.stack(of_matrices).float() if of_matrices else None
        on_host = [scale for scale in scales if not isinstance(scale, Tensor)]
        constants = {"SCALES_ON_DEVICE": stacked is not None, "ON_SPHERE": False}
        for x in self._launches(batches, factors, scales=on_host, **constants):
            batch = batches[x.batch]
            scale = float(x.scale) if stacked is None else stacked
            launch(subtract_kernel, x, _flags(x, batch), factors[x.first], *_rates(batch), scale)

    def rotate(self, batches: Sequence[Batch], factors: Tensors, coefficients: Tensor) -> None:
        """Apply :func:`~megatron_eopt.optimizers.weight_step.move` with coefficients in fp32."""
        from megatron_eopt.optimizers.triton_step import subtract_kernel

        for x in self._launches(batches, factors, SCALES_ON_DEVICE=True, ON_SPHERE=True):
            launch(subtract_kernel, x, _flags(x, batches[x.batch]), factors[x.first], 0.0, 1.0, coefficients)

    def _readable(self, batch: Batch) -> Batch:
        """The batch with gradients of dtypes and strides that kernels read."""
        kinds = {(x.dtype, x.ndim) for x in batch.gradients}
        if all(dtype in DTYPES and ndim == 2 for dtype, ndim in kinds):
            return batch
        gradients = []
        for i, x in zip(batch.indices, batch.gradients, strict=True):
            x = x if x.dtype in DTYPES else x.float()
            read_as_matrix = x.ndim > 2 and not self._engine.rows(i).stacked
            gradients.append(x.contiguous() if read_as_matrix else x)
        return replace(batch, gradients=gradients)

    def _launches(
        self,
        batches: Sequence[Batch],
        others: Tensors,
        *,
        momentum: bool = False,
        scales: Sequence[float] = (),
        **constants: bool,
    ) -> list[Launch]:
        indices = tuple([i for batch in batches for i in batch.indices])
        seen: list[object] = [scales]
        for batch in batches:
            for tensors in (batch.weights, batch.momenta, batch.gradients) if momentum else (batch.weights,):
                seen += [*map(address, tensors)], [*map(Tensor.stride, tensors)], [x.dtype for x in tensors]
            seen.append([isinstance(x, Tensor) for x in (batch.accepted, batch.lr, batch.weight_decay)])
            seen.append((batch.nesterov, batch.decays, batch.decay_method))
        whole = others
        if isinstance(others, Rows):
            seen.append(others.rows)
            whole = []
            for stack in others.stacks:
                whole += [stack] if isinstance(stack, Tensor) else stack
        seen += stacks_of(whole), [(x.storage_offset(), x.stride(), x.dtype) for x in whole]
        key = (indices, momentum, *constants.items())
        known, launches = self._known.get(key, ([], []))
        if len(self._known) > _MOST_TABLES:  # where other parameters have gradients in each step
            self._known.clear()
        if known != seen:
            launches = self._made(batches, others, stacks_of(others), momentum, scales, constants)
            self._known[key] = seen, launches
        return launches

    def _made(
        self,
        batches: Sequence[Batch],
        others: Tensors,
        stacks: Sequence[int],
        momentum: bool,
        scales: Sequence[float],
        constants: dict[str, bool],
    ) -> list[Launch]:
        alike: dict[tuple[Any, ...], list[Piece]] = {}
        matrix = 0  # the first of the parameter
        for number, batch in enumerate(batches):
            for n, index in enumerate(batch.indices):
                rows = self._engine.rows(index)
                sides = [batch.weights[n]]
                words = None
                if momentum:
                    sides = [batch.gradients[n], batch.momenta[n], *sides]
                    words = None if batch.rounded is None else batch.rounded[n].words
                dtypes = [x.dtype for x in sides]
                for piece in _pieces(rows, n, sides, others, matrix, words):
                    other = others[piece.matrix].dtype, stacks[piece.matrix]
                    scale = scales[piece.matrix] if scales else 1.0
                    alike.setdefault((number, *dtypes, *other, scale, piece.rows, piece.cols), []).append(piece)
                matrix += len(rows.runs)
        launches = []
        for (number, *_), pieces in alike.items():
            scale = scales[pieces[0].matrix] if scales else 1.0
            launches.append(_compiled(batches[number], number, pieces, others, scale, momentum, constants))
        return launches


def _pieces(
    rows: LocalRows,
    parameter: int,
    sides: Sequence[Tensor],
    others: Tensors,
    first_matrix: int,
    words: Sequence[tuple[int, int, int, int]] | None,
) -> Iterator[Piece]:
    """Pieces of a parameter: ``sides`` are its tensors, the weight last."""
    for matrix, runs in enumerate(rows.runs, first_matrix):
        other = others[matrix]
        if not other.numel():
            continue
        start = int(other.storage_offset())
        of_row, of_col = map(int, other.stride())
        first_word, second_word, row, left = (0, 0, 0, 0) if words is None else words[matrix - first_matrix]
        top = 0
        for layer, first, count, step in runs:
            places = [(0, 0, 0)] * (3 - len(sides))
            places += [_place(x, rows.stacked, rows.transposed, layer, first, step) for x in sides]
            gradient, momentum, weight = places
            yield Piece(
                count,
                int(other.size(1)),
                parameter,
                *gradient,
                *momentum,
                *weight,
                start + top * of_row,
                of_row,
                of_col,
                matrix,
                first_word % 2**32,
                second_word % 2**32,
                row + top,
                left,
            )
            top += count


def _place(
    x: Tensor,
    stacked: bool,
    transposed: bool,
    layer: int,
    first: int,
    step: int,
) -> tuple[int, int, int]:
    """Address of a run's first entry, and distances of rows and columns."""
    if x.ndim > 2 and not stacked:  # read as a matrix
        if not x.is_contiguous():
            raise ValueError(f"a tensor that is read as a matrix must be contiguous, got strides {x.stride()}")
        of_layer = 0
        of_row = x.stride(0)
        of_col = 1
    else:
        of_layer = x.stride(0)
        of_row, of_col = x.stride()[-2:]
    if transposed:
        of_row, of_col = of_col, of_row
    return address(x) + x.itemsize * (layer * of_layer + first * of_row), step * of_row, of_col


def _compiled(
    batch: Batch,
    number: int,
    pieces: list[Piece],
    others: Tensors,
    scale: float,
    momentum: bool,
    constants: dict[str, bool],
) -> Launch:
    from megatron_eopt.optimizers.triton_step import INTERPRETED, triton_dtype

    first = pieces[0].matrix
    n = pieces[0].parameter
    start = int(others[first].storage_offset())
    pieces = [piece._replace(other=piece.other - start) for piece in pieces]
    sides = ("gradient", "momentum", "weight") if momentum else ("weight",)
    lie = _lies(pieces, sides)
    others_lie = _lies(pieces, ("other",))
    starts = [getattr(piece, name) for piece in pieces for name in (*sides, "other", "cols")]
    between = [_distance(piece, name, lie) for piece in pieces for name in sides]
    between += [_distance(piece, "other", others_lie) for piece in pieces]
    width = _SQUARE if lie != _BY_ROWS or others_lie == _BY_COLUMNS else min(_WIDEST, _power(pieces[0].cols))
    weight = batch.weights[n].dtype
    l2 = batch.decay_method == "l2"
    if momentum:
        average = torch.promote_types(batch.momenta[n].dtype, weight)
        of_kind = {
            "GRADIENT": triton_dtype(batch.gradients[n].dtype),
            "MOMENTUM": triton_dtype(batch.momenta[n].dtype),
            "AVERAGE": triton_dtype(average),
            "L2": batch.decays and l2,
            "DECAY_ON_DEVICE": isinstance(_float(batch.weight_decay), Tensor),
            "NESTEROV": batch.nesterov,
            "AT_RANDOM": batch.rounded is not None,
        }
    else:
        of_kind = {
            "DECAYS": batch.decays and not l2,
            "RATES_ON_DEVICE": any(isinstance(x, Tensor) for x in _rates(batch)),
            "SCALED": scale != 1 or constants["SCALES_ON_DEVICE"],
        }
    of_kind |= constants | {
        "HEIGHT": min(_TILE // width, _power(pieces[0].rows)),
        "WIDTH": width,
        "PARAMETER": triton_dtype(weight),
        "MASKED": batch.accepted is not None,
        "LIE": lie,
        "OTHERS_LIE": others_lie,
        "ALIGNED": all(number % _ALIGNED == 0 for number in (*starts, *between)),
        "INTERPRETED": INTERPRETED,
    }
    table = on_device(torch.tensor(pieces, dtype=torch.int64), others[first].device)
    return Launch(number, table, pieces, first, scale, of_kind)


def _lies(pieces: Sequence[Piece], names: Sequence[str]) -> int:
    """Whether entries of rows, or of columns, lie side by side."""
    for side, lie in (("col", _BY_ROWS), ("row", _BY_COLUMNS)):
        if all(getattr(piece, f"{name}_{side}") == 1 for piece in pieces for name in names):
            return lie
    return _SCATTERED


def _distance(piece: Piece, name: str, lie: int) -> int:
    """From one row or column to the next, whichever are apart."""
    if lie == _SCATTERED:
        return 1
    side = "col" if lie == _BY_COLUMNS else "row"
    return int(getattr(piece, f"{name}_{side}"))


def _power(number: int) -> int:
    """The next power of two, at least 16."""
    return max(16, 1 << (number - 1).bit_length())


def _float(x: Scalar) -> Scalar:
    """A number for a kernel: by value, or in fp32 on the device."""
    if not isinstance(x, Tensor):
        return float(x)  # for integers kernels would be compiled anew
    return x.item() if x.device.type == "cpu" and not x.requires_grad else x.float()


def _rates(batch: Batch) -> tuple[Scalar, Scalar]:
    """The learning rate, and what decay leaves of a weight."""
    lr = batch.lr
    kept = 1 - foreach.decay_power(batch.lr, batch.decay_method) * batch.weight_decay
    tensors = [x for x in (lr, kept) if isinstance(x, Tensor) and x.device.type != "cpu"]
    if not tensors:
        return _float(lr), _float(kept)
    both = [x if isinstance(x, Tensor) else torch.full_like(tensors[0], x) for x in (lr, kept)]
    return both[0].float(), both[1].float()


def _flags(x: Launch, batch: Batch) -> Tensor:
    return x.table if batch.accepted is None else batch.accepted


address = Tensor.data_ptr
"""Where a tensor lies."""


def stacks_of(tensors: Tensors) -> list[int]:
    """Equal numbers for tensors that are views of one memory."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(storage(x), len(numbers)) for x in tensors]


def storage(x: Tensor) -> int:
    """Where the memory begins that a tensor is a view of."""
    return x.untyped_storage().data_ptr()


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """Send a table without waiting."""
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def launch(kernel: Any, x: Launch, flags: Tensor, other: Tensor, *numbers: Any) -> None:
    """Start a kernel on the device of its tensors."""
    from megatron_eopt.optimizers.triton_step import OPTIONS, launchers

    if any(isinstance(number, Tensor) for number in numbers):
        with torch.cuda.device_of(other):  # triton takes the current one
            kernel[(x.programs,)](x.table, flags, other, *numbers, x.tiles, **x.constants, **OPTIONS)
    else:
        launchers[kernel]((x.table, flags, other), (*numbers, x.tiles), x.programs, x.fixed)
