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
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_eopt.matrices import LocalRows
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.scheduler import Rows
from megatron_eopt.settings.groups import MOMENTUM_STEPS
from megatron_eopt.settings.modifiers import MOMENT2_BUFFER
from megatron_eopt.settings.values import Scalar
from megatron_eopt.step.foreach import Tensors
from megatron_eopt.step.momenta.momentum_stack import MomentumStack
from megatron_eopt.step.stacks import GRADIENT, WEIGHT
from megatron_eopt.step.state import MOMENTUM_BUFFER, PREVIOUS_GRADIENT

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KEYS = {
    "gradient": GRADIENT,
    "momentum": MOMENTUM_BUFFER,
    "weight": WEIGHT,
    "moment": MOMENT2_BUFFER,
    "previous": PREVIOUS_GRADIENT,
}
"""What kernels call tensors of a stack's parameters, and their keys."""
READABLE = "gradients that kernels read"

_MOST_TABLES = 4096  # kept: two for each stack
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
    matrix: int  # of the stack
    scale: int  # an offset: of its first scale among all


@dataclass(frozen=True)
class Launch:
    """One kernel for alike pieces of one stack."""

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
    """Runs kernels for stacks of an engine's matrices.

    Tables of addresses are kept, and sent to the device anew only after an address has changed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[object, tuple[list[object], list[Launch]]] = {}

    def momentum(
        self,
        stack: MomentumStack,
        updates: Tensors,
        heavy: bool = False,
        measured: bool = False,
        corrections: Tensor | None = None,
    ) -> tuple[list[Tensor], ...]:
        """Update momenta, and write what is orthogonalized to ``updates``.

        These are this rank's shards of the stack, in any dtype. ``heavy`` takes
        :func:`~megatron_eopt.step.foreach.heavy_ball` in place of the average. Returns norms of gradients' and of
        updates' tiles, if measured. With ``corrections`` gradients are MARS's, and are kept: see :meth:`corrected`.
        """
        constants = {"HEAVY": heavy, "MEASURED": measured, "AVERAGED": False}
        return self._momentum(stack, updates, constants, corrections)

    def corrected(self, stack: MomentumStack, updates: Tensors, corrections: Tensor) -> list[Tensor]:
        """Norms of tiles of corrected gradients, ``(g_prev + weight (g - g_prev)) factor``.

        ``corrections``, (matrices, 2) in fp32, have weight and factor of each matrix.
        """
        from megatron_eopt.kernels.triton_step import corrections_kernel

        launches = self._launches(corrections_kernel, stack, updates, ("gradient", "previous"), {})
        norms = [_room(x, updates, 1) for x in launches]
        for x, out in zip(launches, norms, strict=True):
            launch(corrections_kernel, x, corrections, out)
        [of_matrices] = _by_matrix(launches, norms, updates, 1)
        return of_matrices

    def products_of_updates(self, stack: MomentumStack, factors: Tensors) -> tuple[list[Tensor], ...]:
        """Norms of the positive, and of the negative, products of updates and their factors.

        Updates are those that :meth:`momentum` wrote in this step, of momenta as they are kept.
        """
        return self._momentum(stack, factors, {"HEAVY": False, "MEASURED": False, "AVERAGED": True})

    def _momentum(
        self,
        stack: MomentumStack,
        others: Tensors,
        constants: dict[str, bool],
        corrections: Tensor | None = None,
    ) -> tuple[list[Tensor], ...]:
        from megatron_eopt.kernels.triton_step import momentum_kernel

        sides = ["gradient", "momentum", "weight"]
        if corrections is not None:
            sides.append("previous")
        launches = self._launches(momentum_kernel, stack, others, sides, constants)
        wanted = 2 if constants["MEASURED"] or constants["AVERAGED"] else 0
        norms = [_room(x, others, wanted) for x in launches]
        beta = float(stack.beta)
        step = stack.group[MOMENTUM_STEPS] % 2**31 if stack.rounded else 0
        numbers = (beta, 1 - beta, _float(stack.weight_decay), step)
        for x, out in zip(launches, norms, strict=True):
            of_matrices = x.table if corrections is None else corrections
            launch(momentum_kernel, x, _flag(stack), others[x.first], out, of_matrices, *numbers)
        return _by_matrix(launches, norms, others, wanted)

    def moments(self, stack: MomentumStack, factors: Tensors, measured: bool) -> tuple[list[Tensor], ...]:
        """``v <- EMA(O^2)``; norms of tiles of ``O``, and of ``O / (sqrt(v) + eps)``, if measured."""
        from megatron_eopt.kernels.triton_step import moment_kernel

        launches = self._launches(moment_kernel, stack, factors, ("moment",), {"MEASURED": measured})
        wanted = 2 if measured else 0
        norms = [_room(x, factors, wanted) for x in launches]
        numbers = (_float(1 - stack.group["beta2"]), _float(stack.group["eps"]))
        for x, out in zip(launches, norms, strict=True):
            launch(moment_kernel, x, _flag(stack), factors[x.first], out, *numbers)
        return _by_matrix(launches, norms, factors, wanted)

    def products_of_weights(self, stack: MomentumStack, factors: Tensors) -> tuple[list[Tensor], ...]:
        """Norms of weights, of factors, and of the positive and the negative products of both."""
        from megatron_eopt.kernels.triton_step import products_kernel

        launches = self._launches(products_kernel, stack, factors, ("weight",), {})
        norms = [_room(x, factors, 4) for x in launches]
        for x, out in zip(launches, norms, strict=True):
            launch(products_kernel, x, factors[x.first], out)
        return _by_matrix(launches, norms, factors, 4)

    def norms_of_lines(self, stack: MomentumStack, factors: Tensors, by_rows: bool) -> list[Tensor]:
        """Norms of parts of rows, (rows x tiles), or of columns, (tiles x columns)."""
        from megatron_eopt.kernels.triton_step import lines_kernel

        lines = _ROWS if by_rows else _COLUMNS
        norms = [x.new_empty(x.shape if x.numel() == 0 else (0, 0), dtype=torch.float64) for x in factors]
        for x in self._launches(lines_kernel, stack, factors, (), {}, lines=lines):
            piece = x.pieces[0]
            down, across = x.grid
            shape = (piece.rows, across) if by_rows else (down, piece.cols)
            out = norms[x.first].new_empty(len(x.pieces), *shape)
            launch(lines_kernel, x, factors[x.first], out)
            for of_matrix, some in zip(x.pieces, out.unbind(), strict=True):
                norms[of_matrix.matrix] = some
        return norms

    def subtract(self, stack: MomentumStack, factors: Tensors, scale: float | Tensor, divided: bool = False) -> None:
        """Decay weights, and subtract factors times scale and learning rate.

        ``scale`` is that of all, or of each: (n,), of its rows (n x rows x 1) or of its columns (n x 1 x columns).
        ``divided`` divides factors by ``sqrt(v) + eps`` of second moments before.
        """
        from megatron_eopt.kernels.triton_step import subtract_kernel

        on_host = 1.0
        lines = _WHOLE
        joined: Tensor | None = None
        if isinstance(scale, Tensor):
            joined = scale.reshape(-1).float()
            if scale.ndim > 1:
                lines = _ROWS if scale.size(2) == 1 else _COLUMNS
        else:
            on_host = scale
        sides = ("moment", "weight") if divided else ("weight",)
        constants = {"SCALES_ON_DEVICE": joined is not None, "DIVIDED": divided, "ON_SPHERE": False}
        eps = _float(stack.group["eps"]) if divided else 0.0
        of_factors = on_host if joined is None else joined
        for x in self._launches(subtract_kernel, stack, factors, sides, constants, on_host, lines):
            launch(subtract_kernel, x, _flag(stack), factors[x.first], *_rates(stack), of_factors, eps)

    def rotate(self, stack: MomentumStack, factors: Tensors, coefficients: Tensor) -> None:
        """Apply :func:`~megatron_eopt.step.weight_step.move` with coefficients in fp32."""
        from megatron_eopt.kernels.triton_step import subtract_kernel

        constants = {"SCALES_ON_DEVICE": True, "DIVIDED": False, "ON_SPHERE": True}
        for x in self._launches(subtract_kernel, stack, factors, ("weight",), constants):
            launch(subtract_kernel, x, _flag(stack), factors[x.first], 0.0, 1.0, coefficients, 0.0)

    def _launches(
        self,
        kernel: Any,
        stack: MomentumStack,
        others: Tensors,
        sides: Sequence[str],
        constants: dict[str, bool],
        scale: float = 1.0,
        lines: int = _WHOLE,
    ) -> list[Launch]:
        """Launches for tensors called ``sides``, and for ``others``; without sides for whole matrices of these.

        ``lines`` say what of each matrix has a scale on the device, or a norm.
        """
        tensors = {side: self._tensors(stack, side) for side in sides}
        seen: list[object] = [scale, lines, stack.nesterov, stack.decays, stack.modifiers]
        for some in tensors.values():
            seen += [*map(address, some)], [*map(Tensor.stride, some)], [x.dtype for x in some]
        seen.append([isinstance(x, Tensor) for x in (stack.group["lr"], stack.weight_decay)])
        whole = others
        if isinstance(others, Rows):
            seen.append(others.rows)
            whole = []
            for of_bucket in others.stacks:
                whole += [of_bucket] if isinstance(of_bucket, Tensor) else of_bucket
        seen += storage_numbers(whole), [(x.storage_offset(), x.stride(), x.dtype) for x in whole]
        key = (kernel, stack, *sides, *constants.items())
        known, launches = self._known.get(key, ([], []))
        if len(self._known) > _MOST_TABLES:  # where other parameters have gradients in each step
            self._known.clear()
        if known != seen:
            launches = self._made(kernel, stack, others, tensors, scale, lines, constants)
            self._known[key] = seen, launches
        return launches

    def _made(
        self,
        kernel: Any,
        stack: MomentumStack,
        others: Tensors,
        tensors: Mapping[str, Sequence[Tensor]],
        scale: float,
        lines: int,
        constants: dict[str, bool],
    ) -> list[Launch]:
        memories = storage_numbers(others)
        first_scale = 0  # of the matrix
        alike: dict[tuple[Any, ...], list[Piece]] = {}
        for n, member in enumerate(stack.members):
            sides = {side: of_side[n] for side, of_side in tensors.items()}
            other = others[n]
            rows = self._engine.rows(member.index)
            for piece in _pieces(rows, member.number, n, sides, other, first_scale, lines):
                dtypes = [x.dtype for x in (*sides.values(), other)]
                alike.setdefault((memories[n], *dtypes, piece.rows, piece.cols), []).append(piece)
            first_scale += 1 if lines == _WHOLE else other.size(lines - 1)
        return [_compiled(kernel, stack, some, others, tensors, scale, lines, constants) for some in alike.values()]

    def _tensors(self, stack: MomentumStack, side: str) -> list[Tensor]:
        """The tensor of each member's parameter, by what it is."""
        if side != "gradient":
            return stack.wholes(KEYS[side])
        if READABLE not in stack.tensors:  # copies have to be there until kernels have read them
            stack.tensors[READABLE] = []
            for member, x in zip(stack.members, stack.wholes(GRADIENT), strict=True):
                x = x if x.dtype in DTYPES else x.float()
                read_as_matrix = x.ndim > 2 and not self._engine.rows(member.index).stacked
                stack.tensors[READABLE].append(x.contiguous() if read_as_matrix else x)
        return stack.tensors[READABLE]


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
    number: int,
    matrix: int,
    sides: Mapping[str, Tensor],
    other: Tensor,
    first_scale: int,
    lines: int,
) -> Iterator[Piece]:
    """Pieces of a parameter's logical matrix, that with this number, and of the stack.

    ``sides`` are tensors of the parameter; without, the piece is the whole ``other``.
    """
    if not other.numel():
        return
    start = int(other.storage_offset())
    of_row, of_col = map(int, other.stride())
    top = 0
    for layer, first, count, step in rows.runs[number] if sides else [(0, 0, int(other.size(0)), 1)]:
        places = dict.fromkeys(KEYS, (0, 0, 0))
        for side, x in sides.items():
            places[side] = _place(x, rows.stacked, rows.transposed, layer, first, step)
        yield Piece(
            count,
            int(other.size(1)),
            *places["gradient"],
            *places["momentum"],
            *places["weight"],
            start + top * of_row,
            of_row,
            of_col,
            *places["moment"],
            *places["previous"],
            matrix,
            first_scale + (top if lines == _ROWS else 0),
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
    stack: MomentumStack,
    pieces: list[Piece],
    others: Tensors,
    tensors: Mapping[str, Sequence[Tensor]],
    scale: float,
    lines: int,
    constants: dict[str, bool],
) -> Launch:
    from megatron_eopt.kernels.triton_step import INTERPRETED, triton_dtype

    first = pieces[0].matrix
    start = int(others[first].storage_offset())
    pieces = [piece._replace(other=piece.other - start) for piece in pieces]
    sides = list(tensors)
    lie = _lies(pieces, sides)
    others_lie = _lies(pieces, ("other",))
    starts = [getattr(piece, name) for piece in pieces for name in (*sides, "other", "cols")]
    between = [_distance(piece, name, lie) for piece in pieces for name in sides]
    between += [_distance(piece, "other", others_lie) for piece in pieces]
    # norms of lines have as many tiles however a matrix lies, which statistics stack
    square = lie != _BY_ROWS or others_lie == _BY_COLUMNS or not sides
    width = _SQUARE if square else min(_WIDEST, _power(pieces[0].cols))
    weight = stack.wholes(WEIGHT)[first].dtype
    momentum = stack.wholes(MOMENTUM_BUFFER)[first].dtype
    l2 = stack.modifiers.decay_method == "l2"
    known: dict[str, Any] = constants | {
        "HEIGHT": min(_TILE // width, _power(pieces[0].rows)),
        "WIDTH": width,
        "PARAMETER": triton_dtype(weight),
        "AVERAGE": triton_dtype(torch.promote_types(momentum, weight)),
        "L2": stack.decays and l2,
        "DECAY_ON_DEVICE": isinstance(_float(stack.weight_decay), Tensor),
        "NESTEROV": stack.nesterov,
        "AT_RANDOM": stack.rounded,
        "DECAYS": stack.decays and not l2,
        "CAUTIOUS": stack.modifiers.cautious_weight_decay,
        "RATES_ON_DEVICE": any(isinstance(x, Tensor) for x in _rates(stack)),
        "SCALED": scale != 1 or constants.get("SCALES_ON_DEVICE", False),
        "LINES": lines,
        "PREVIOUS": None,
        "LIE": lie,
        "OTHERS_LIE": others_lie,
        "ALIGNED": all(number % _ALIGNED == 0 for number in (*starts, *between)),
        "INTERPRETED": INTERPRETED,
    }
    for side in sides:
        known[side.upper()] = triton_dtype(tensors[side][first].dtype)
    of_kernel = {name: known[name] for name in kernel.arg_names if name in known}
    table = on_device(torch.tensor(pieces, dtype=torch.int64), others[first].device)
    return Launch(table, pieces, first, scale, of_kernel)


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


def _rates(stack: MomentumStack) -> tuple[Scalar, Scalar]:
    """The learning rate, and what decay leaves of a weight."""
    lr = stack.group["lr"]
    kept = 1 - stack.decay
    tensors = [x for x in (lr, kept) if isinstance(x, Tensor) and x.device.type != "cpu"]
    if not tensors:
        return _float(lr), _float(kept)
    both = [x if isinstance(x, Tensor) else torch.full_like(tensors[0], x) for x in (lr, kept)]
    return both[0].float(), both[1].float()


def _flag(stack: MomentumStack) -> Tensor:
    if stack.ok is not None:
        return stack.ok
    return torch.ones((), dtype=torch.bool, device=stack.wholes(WEIGHT)[0].device)


address = Tensor.data_ptr
"""Where a tensor lies."""


def storage_numbers(tensors: Tensors) -> list[int]:
    """Equal numbers for tensors that are views of one memory."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(storage(x), len(numbers)) for x in tensors]


def storage(x: Tensor) -> int:
    """Where the memory begins that a tensor is a view of."""
    return x.untyped_storage().data_ptr()


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """Send a table without waiting."""
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def launch(kernel: Any, x: Launch, *given: Any) -> None:
    """Start a kernel on the device of its tensors, which come before its numbers."""
    from megatron_eopt.kernels.triton_step import OPTIONS, launchers

    of_launch = [*takewhile(lambda y: isinstance(y, Tensor), given)]
    numbers = (*given[len(of_launch) :], x.tiles)
    tensors = [x.table, *of_launch]
    if any(isinstance(number, Tensor) for number in numbers):
        with torch.cuda.device_of(x.table):  # triton takes the current one
            kernel[(x.programs,)](*tensors, *numbers, **x.constants, **OPTIONS)
    else:
        launchers[kernel](tensors, numbers, x.programs, x.fixed)
