"""The elementwise half of a step in two launches for many shards.

What :mod:`~megatron_eopt.step.foreach` does in several passes over memory, two kernels of Triton do in one each:
from the gradient to the bucket, and from the orthogonal factor to the weight. A second moment is a third pass between
them. torch's passes are the reference, and what a CPU takes; the kernels round where these do.

Some leave norms of tiles in fp64: (rows x tiles), (tiles x columns) or (tiles,) of a matrix. These have the norms of
its rows, its columns or of itself, and so statistics take them in place of the matrix. An inner product is left as two
norms: a tile's are the roots of its sums of positive and of negative products.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_eopt.matrices import LocalRows
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.scheduler import Rows
from megatron_eopt.settings.groups import MOMENTUM_STEPS
from megatron_eopt.settings.values import Scalar
from megatron_eopt.step import foreach
from megatron_eopt.step.foreach import Tensors
from megatron_eopt.step.modifiers import MOMENT2_BUFFER
from megatron_eopt.step.state import PREVIOUS_GRADIENT
from megatron_eopt.step.step import Batch

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
# what of a matrix has a scale of its own
_WHOLE = 0
_ROWS = 1
_COLUMNS = 2


class Piece(NamedTuple):
    """Rows of a shard, equally far apart; a row of a table, in int64.

    A tensor has an address in bytes, or an offset in entries, and its distances in entries.
    """

    rows: int
    cols: int
    parameter: int  # of the batch
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
    moment: int
    moment_row: int
    moment_col: int
    previous: int  # the gradient of the last step
    previous_row: int
    previous_col: int
    matrix: int  # of the chunk
    scale: int  # an offset: of its first scale among all


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
        down, across = self.grid
        return down * across

    @property
    def grid(self) -> tuple[int, int]:
        """How many tiles of a piece lie below and beside each other."""
        piece = self.pieces[0]
        return -(-piece.rows // self.constants["HEIGHT"]), -(-piece.cols // self.constants["WIDTH"])


class StepKernels:
    """Runs kernels for chunks of an engine's parameters.

    Tables of addresses are kept, and sent to the device anew only after an address has changed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[object, tuple[list[object], list[Launch]]] = {}

    def momentum(
        self,
        batches: Sequence[Batch],
        updates: Tensors,
        heavy: bool = False,
        measured: bool = False,
        corrections: Tensor | None = None,
    ) -> tuple[list[Tensor], ...]:
        """Update momenta, and write what is orthogonalized to ``updates``.

        These are this rank's shards of all logical matrices, in any dtype. ``heavy`` takes
        :func:`~megatron_eopt.step.foreach.heavy_ball` in place of the average. Returns norms of gradients' and of
        updates' tiles, if measured. With ``corrections`` gradients are MARS's, and are kept: see :meth:`corrected`.
        """
        constants = {"HEAVY": heavy, "MEASURED": measured, "AVERAGED": False}
        return self._momentum(batches, updates, constants, corrections)

    def corrected(self, batches: Sequence[Batch], updates: Tensors, corrections: Tensor) -> list[Tensor]:
        """Norms of tiles of corrected gradients, ``(g_prev + weight (g - g_prev)) factor``.

        ``corrections``, (matrices, 2) in fp32, have weight and factor of each matrix.
        """
        from megatron_eopt.kernels.triton_step import corrections_kernel

        batches = [self._readable(batch) for batch in batches]
        launches = self._launches(corrections_kernel, batches, updates, ("gradient", "previous"), {})
        norms = [_room(x, updates, 1) for x in launches]
        for x, out in zip(launches, norms, strict=True):
            launch(corrections_kernel, x, x.table, corrections, out)
        [of_matrices] = _by_matrix(launches, norms, updates, 1)
        return of_matrices

    def products_of_updates(self, batches: Sequence[Batch], factors: Tensors) -> tuple[list[Tensor], ...]:
        """Norms of the positive, and of the negative, products of updates and their factors.

        Updates are those that :meth:`momentum` wrote in this step, of momenta as they are kept.
        """
        return self._momentum(batches, factors, {"HEAVY": False, "MEASURED": False, "AVERAGED": True})

    def _momentum(
        self,
        batches: Sequence[Batch],
        others: Tensors,
        constants: dict[str, bool],
        corrections: Tensor | None = None,
    ) -> tuple[list[Tensor], ...]:
        from megatron_eopt.kernels.triton_step import momentum_kernel

        batches = [self._readable(batch) for batch in batches]
        sides = ["gradient", "momentum", "weight"]
        if corrections is not None:
            sides.append("previous")
        launches = self._launches(momentum_kernel, batches, others, sides, constants)
        wanted = 2 if constants["MEASURED"] or constants["AVERAGED"] else 0
        norms = [_room(x, others, wanted) for x in launches]
        for x, out in zip(launches, norms, strict=True):
            batch = batches[x.batch]
            beta = float(batch.beta)
            decay = _float(batch.weight_decay)
            step = batch.group[MOMENTUM_STEPS] % 2**31 if batch.rounded else 0
            numbers = (beta, 1 - beta, decay, step)
            of_matrices = x.table if corrections is None else corrections
            launch(momentum_kernel, x, _flag(batch), others[x.first], out, of_matrices, *numbers)
        return _by_matrix(launches, norms, others, wanted)

    def moments(self, batches: Sequence[Batch], factors: Tensors, measured: bool) -> tuple[list[Tensor], ...]:
        """``v <- EMA(O^2)``; norms of tiles of ``O``, and of ``O / (sqrt(v) + eps)``, if measured."""
        from megatron_eopt.kernels.triton_step import moment_kernel

        launches = self._launches(moment_kernel, batches, factors, ("moment",), {"MEASURED": measured})
        wanted = 2 if measured else 0
        norms = [_room(x, factors, wanted) for x in launches]
        for x, out in zip(launches, norms, strict=True):
            batch = batches[x.batch]
            numbers = (_float(1 - batch.group["beta2"]), _float(batch.group["eps"]))
            launch(moment_kernel, x, _flag(batch), factors[x.first], out, *numbers)
        return _by_matrix(launches, norms, factors, wanted)

    def products_of_weights(self, batches: Sequence[Batch], factors: Tensors) -> tuple[list[Tensor], ...]:
        """Norms of weights, of factors, and of the positive and the negative products of both."""
        from megatron_eopt.kernels.triton_step import products_kernel

        launches = self._launches(products_kernel, batches, factors, ("weight",), {})
        norms = [_room(x, factors, 4) for x in launches]
        for x, out in zip(launches, norms, strict=True):
            launch(products_kernel, x, x.table, factors[x.first], out)
        return _by_matrix(launches, norms, factors, 4)

    def norms_of_lines(self, batches: Sequence[Batch], factors: Tensors, by_rows: Sequence[bool]) -> list[Tensor]:
        """Norms of parts of rows, (rows x tiles), or of columns, (tiles x columns)."""
        from megatron_eopt.kernels.triton_step import lines_kernel

        lines = [_ROWS if of_rows else _COLUMNS for of_rows in by_rows]
        norms = [x.new_empty(x.shape if x.numel() == 0 else (0, 0), dtype=torch.float64) for x in factors]
        for x in self._launches(lines_kernel, batches, factors, (), {}, lines=lines):
            piece = x.pieces[0]
            down, across = x.grid
            shape = (piece.rows, across) if x.constants["LINES"] == _ROWS else (down, piece.cols)
            out = norms[x.first].new_empty(len(x.pieces), *shape)
            launch(lines_kernel, x, x.table, factors[x.first], out)
            for of_matrix, some in zip(x.pieces, out.unbind(), strict=True):
                norms[of_matrix.matrix] = some
        return norms

    def subtract(
        self, batches: Sequence[Batch], factors: Tensors, scales: Sequence[float | Tensor], divided: bool = False
    ) -> None:
        """Decay weights, and subtract factors times scale and learning rate.

        ``scales`` are one for each logical matrix: numbers, or tensors on the device, () or for its rows, (rows x 1),
        or columns, (1 x columns). ``divided`` divides factors by ``sqrt(v) + eps`` of second moments before.
        """
        from megatron_eopt.kernels.triton_step import subtract_kernel

        of_matrices = [scale for scale in scales if isinstance(scale, Tensor)]
        joined = torch.cat([scale.view(-1) for scale in of_matrices]).float() if of_matrices else None
        on_host = [scale for scale in scales if not isinstance(scale, Tensor)]
        sides = ("moment", "weight") if divided else ("weight",)
        constants = {"SCALES_ON_DEVICE": joined is not None, "DIVIDED": divided, "ON_SPHERE": False}
        lines = list(map(_lines, scales))
        for x in self._launches(subtract_kernel, batches, factors, sides, constants, on_host, lines):
            batch = batches[x.batch]
            scale = float(x.scale) if joined is None else joined
            eps = _float(batch.group["eps"]) if divided else 0.0
            launch(subtract_kernel, x, _flag(batch), factors[x.first], *_rates(batch), scale, eps)

    def rotate(self, batches: Sequence[Batch], factors: Tensors, coefficients: Tensor) -> None:
        """Apply :func:`~megatron_eopt.step.weight_step.move` with coefficients in fp32."""
        from megatron_eopt.kernels.triton_step import subtract_kernel

        constants = {"SCALES_ON_DEVICE": True, "DIVIDED": False, "ON_SPHERE": True}
        for x in self._launches(subtract_kernel, batches, factors, ("weight",), constants):
            launch(subtract_kernel, x, _flag(batches[x.batch]), factors[x.first], 0.0, 1.0, coefficients, 0.0)

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
        kernel: Any,
        batches: Sequence[Batch],
        others: Tensors,
        sides: Sequence[str],
        constants: dict[str, bool],
        scales: Sequence[float] = (),
        lines: Sequence[int] = (),
    ) -> list[Launch]:
        """Launches for tensors called ``sides``, and for ``others``; without sides for whole matrices of these.

        ``lines`` say what of each matrix has a scale on the device, or a norm.
        """
        indices = tuple([i for batch in batches for i in batch.indices])
        seen: list[object] = [scales, lines]
        for batch in batches:
            tensors = list(chain(*(_tensors(batch, side) for side in sides)))
            seen += [*map(address, tensors)], [*map(Tensor.stride, tensors)], [x.dtype for x in tensors]
            seen.append([isinstance(x, Tensor) for x in (batch.lr, batch.weight_decay)])
            seen.append((batch.nesterov, batch.decays, batch.modified))
        whole = others
        if isinstance(others, Rows):
            seen.append(others.rows)
            whole = []
            for stack in others.stacks:
                whole += [stack] if isinstance(stack, Tensor) else stack
        seen += stacks_of(whole), [(x.storage_offset(), x.stride(), x.dtype) for x in whole]
        key = (kernel, indices, *sides, *constants.items())
        known, launches = self._known.get(key, ([], []))
        if len(self._known) > _MOST_TABLES:  # where other parameters have gradients in each step
            self._known.clear()
        if known != seen:
            launches = self._made(kernel, batches, others, stacks_of(others), sides, scales, lines, constants)
            self._known[key] = seen, launches
        return launches

    def _made(
        self,
        kernel: Any,
        batches: Sequence[Batch],
        others: Tensors,
        stacks: Sequence[int],
        sides: Sequence[str],
        scales: Sequence[float],
        lines: Sequence[int],
        constants: dict[str, bool],
    ) -> list[Launch]:
        of_device = list(map(_scales_of, others, lines)) if lines else [1] * len(others)
        firsts = list(accumulate(of_device, initial=0))
        alike: dict[tuple[Any, ...], list[Piece]] = {}
        matrix = 0  # the first of the parameter
        for number, batch in enumerate(batches):
            for n, index in enumerate(batch.indices):
                rows = self._engine.rows(index)
                tensors = {side: _tensors(batch, side)[n] for side in sides}
                dtypes = [batch.weights[n].dtype, *(x.dtype for x in tensors.values())]
                for piece in _pieces(rows, n, tensors, others, matrix, firsts, lines):
                    other = others[piece.matrix].dtype, stacks[piece.matrix]
                    scale = scales[piece.matrix] if scales else 1.0
                    of_lines = lines[piece.matrix] if lines else _WHOLE
                    kind = (number, of_lines, scale, *dtypes, *other, piece.rows, piece.cols)
                    alike.setdefault(kind, []).append(piece)
                matrix += len(rows.runs)
        launches = []
        for (number, of_lines, scale, *_), pieces in alike.items():
            batch = batches[number]
            launches.append(_compiled(kernel, batch, number, pieces, others, sides, scale, of_lines, constants))
        return launches


def _tensors(batch: Batch, side: str) -> list[Tensor]:
    """One tensor of each parameter, by what it is."""
    if side == "gradient":
        return batch.gradients
    if side == "momentum":
        return batch.momenta
    if side == "moment":
        return batch.states(MOMENT2_BUFFER)
    if side == "previous":
        return batch.states(PREVIOUS_GRADIENT)
    return batch.weights


def _lines(scale: float | Tensor) -> int:
    """What of a matrix has a scale of its own."""
    if not isinstance(scale, Tensor) or scale.ndim == 0:
        return _WHOLE
    return _ROWS if scale.size(1) == 1 else _COLUMNS


def _scales_of(other: Tensor, lines: int) -> int:
    """How many scales a matrix has."""
    return 1 if lines == _WHOLE else other.size(lines - 1)


def _room(x: Launch, others: Tensors, wanted: int) -> Tensor:
    """Memory for so many norms of each tile; for none, what a kernel does not write to."""
    return others[x.first].new_empty(wanted, x.programs, dtype=torch.float64) if wanted else x.table


def _by_matrix(
    launches: Sequence[Launch], norms: Sequence[Tensor], others: Tensors, wanted: int
) -> tuple[list[Tensor], ...]:
    """Each of the norms that were wanted, of the tiles of each matrix."""
    if not wanted:
        return ()
    found: list[list[list[Tensor]]] = [[[] for _ in others] for _ in range(wanted)]
    for x, out in zip(launches, norms, strict=True):
        tiles_of = Counter(piece.matrix for piece in x.pieces)  # in their order: those of a matrix are neighbours
        sizes = [count * x.tiles for count in tiles_of.values()]
        for of_matrices, of_launch in zip(found, out.unbind(), strict=True):
            for matrix, some in zip(tiles_of, of_launch.split(sizes), strict=True):
                of_matrices[matrix].append(some)
    return tuple([_joined(some, other) for some, other in zip(each, others, strict=True)] for each in found)


def _joined(norms: list[Tensor], other: Tensor) -> Tensor:
    """The norms that launches left of one matrix, perhaps none."""
    if not norms:
        return other.new_empty(0, dtype=torch.float64)
    return norms[0] if len(norms) == 1 else torch.cat(norms)


def _pieces(
    rows: LocalRows,
    parameter: int,
    sides: Mapping[str, Tensor],
    others: Tensors,
    first_matrix: int,
    firsts: Sequence[int],
    lines: Sequence[int],
) -> Iterator[Piece]:
    """Pieces of a parameter, whose tensors are ``sides``; without, its matrices of ``others``."""
    for matrix, runs in enumerate(rows.runs, first_matrix):
        other = others[matrix]
        if not other.numel():
            continue
        start = int(other.storage_offset())
        of_row, of_col = map(int, other.stride())
        top = 0
        for layer, first, count, step in runs if sides else [(0, 0, int(other.size(0)), 1)]:
            places = dict.fromkeys(("gradient", "momentum", "weight", "moment", "previous"), (0, 0, 0))
            for side, x in sides.items():
                places[side] = _place(x, rows.stacked, rows.transposed, layer, first, step)
            yield Piece(
                count,
                int(other.size(1)),
                parameter,
                *places["gradient"],
                *places["momentum"],
                *places["weight"],
                start + top * of_row,
                of_row,
                of_col,
                *places["moment"],
                *places["previous"],
                matrix,
                firsts[matrix] + (top if lines and lines[matrix] == _ROWS else 0),
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
    kernel: Any,
    batch: Batch,
    number: int,
    pieces: list[Piece],
    others: Tensors,
    sides: Sequence[str],
    scale: float,
    lines: int,
    constants: dict[str, bool],
) -> Launch:
    from megatron_eopt.kernels.triton_step import INTERPRETED, triton_dtype

    first = pieces[0].matrix
    n = pieces[0].parameter
    start = int(others[first].storage_offset())
    pieces = [piece._replace(other=piece.other - start) for piece in pieces]
    lie = _lies(pieces, sides)
    others_lie = _lies(pieces, ("other",))
    starts = [getattr(piece, name) for piece in pieces for name in (*sides, "other", "cols")]
    between = [_distance(piece, name, lie) for piece in pieces for name in sides]
    between += [_distance(piece, "other", others_lie) for piece in pieces]
    # norms of lines have as many tiles however a matrix lies, which statistics stack
    square = lie != _BY_ROWS or others_lie == _BY_COLUMNS or not sides
    width = _SQUARE if square else min(_WIDEST, _power(pieces[0].cols))
    weight = batch.weights[n].dtype
    l2 = batch.modified.decay_method == "l2"
    known: dict[str, Any] = constants | {
        "HEIGHT": min(_TILE // width, _power(pieces[0].rows)),
        "WIDTH": width,
        "PARAMETER": triton_dtype(weight),
        "AVERAGE": triton_dtype(torch.promote_types(batch.momenta[n].dtype, weight)),
        "L2": batch.decays and l2,
        "DECAY_ON_DEVICE": isinstance(_float(batch.weight_decay), Tensor),
        "NESTEROV": batch.nesterov,
        "AT_RANDOM": batch.rounded,
        "DECAYS": batch.decays and not l2,
        "CAUTIOUS": batch.modified.cautious,
        "RATES_ON_DEVICE": any(isinstance(x, Tensor) for x in _rates(batch)),
        "SCALED": scale != 1 or constants.get("SCALES_ON_DEVICE", False),
        "LINES": lines,
        "PREVIOUS": None,
        "LIE": lie,
        "OTHERS_LIE": others_lie,
        "ALIGNED": all(number % _ALIGNED == 0 for number in (*starts, *between)),
        "INTERPRETED": INTERPRETED,
    }
    for side in sides:
        known[side.upper()] = triton_dtype(_tensors(batch, side)[n].dtype)
    of_kernel = {name: known[name] for name in kernel.arg_names if name in known}
    table = on_device(torch.tensor(pieces, dtype=torch.int64), others[first].device)
    return Launch(number, table, pieces, first, scale, of_kernel)


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
        return float(x)  # an integer of 1 would be compiled into the kernel, which serves other numbers, too
    return x.item() if x.device.type == "cpu" and not x.requires_grad else x.float()


def _rates(batch: Batch) -> tuple[Scalar, Scalar]:
    """The learning rate, and what decay leaves of a weight."""
    lr = batch.lr
    kept = 1 - foreach.decay_power(batch.lr, batch.modified.decay_method) * batch.weight_decay
    tensors = [x for x in (lr, kept) if isinstance(x, Tensor) and x.device.type != "cpu"]
    if not tensors:
        return _float(lr), _float(kept)
    both = [x if isinstance(x, Tensor) else torch.full_like(tensors[0], x) for x in (lr, kept)]
    return both[0].float(), both[1].float()


def _flag(batch: Batch) -> Tensor:
    return torch.ones((), dtype=torch.bool, device=batch.weights[0].device) if batch.ok is None else batch.ok


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


def launch(kernel: Any, x: Launch, flag: Tensor, *numbers: Any) -> None:
    """Start a kernel on the device of its tensors, which come before its numbers."""
    from megatron_eopt.kernels.triton_step import OPTIONS, launchers

    tensors = [x.table, flag, *takewhile(lambda y: isinstance(y, Tensor), numbers)]
    rest = (*numbers[len(tensors) - 2 :], x.tiles)
    if any(isinstance(number, Tensor) for number in rest):
        with torch.cuda.device_of(x.table):  # triton takes the current one
            kernel[(x.programs,)](*tensors, *rest, **x.constants, **OPTIONS)
    else:
        launchers[kernel](tensors, rest, x.programs, x.fixed)
