"""The logical matrices of parameters: what says which there are, where they lie, and checks before the first step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.matrices import WHOLE, Split, check_split_shapes, declared_split, query_key_value
from megatron_eopt.optimizers.state import DescribedState
from megatron_eopt.parallel.layout import Layout, on_one_rank, split_layout
from megatron_eopt.parallel.pieces import Shape


@dataclass(frozen=True)
class DescribedMatrix:
    """What an optimizer says of one logical matrix.

    Attributes:
        name: within its parameter, empty where that is one matrix.
        shape: of the global matrix.
        scheme: how the ranks that have it compute its update.
        scale: what multiplies the orthogonal factor, or whatever stands in its place.
        rms: of the entries of the first update, before the learning rate; None where it is not known before.
    """

    name: str
    shape: Shape
    scheme: str
    scale: float
    rms: float | None


class LogicalMatrices(DescribedState):
    """An optimizer whose parameters are matrices, or are made of several.

    Attributes:
        split_qkv: whether fused query, key and value projections are split.
        is_qkv_fn: tells which parameters are such.
        qkv_split_shapes: rows of each part in one query group.
    """

    split_qkv: bool
    is_qkv_fn: Callable[[Tensor], bool] | None
    qkv_split_shapes: tuple[int, ...] | None

    split_lengths: tuple[int, ...] = (3,)
    """How many parts a fused projection may have."""

    pairs_rows: bool = False
    """Whether the state pairs rows with rows, so that their order, which may follow the ranks, is a part of it."""

    @property
    def matrices_updated(self) -> int:
        """How many of the :meth:`described_matrices` the steps have updated since the optimizer was made."""
        return 0

    def described_matrices(self, settled: bool = True) -> dict[Tensor, list[DescribedMatrix]]:
        """The logical matrices of each parameter; none of an optimizer that does not count what it updates.

        Args:
            settled: whether other ranks are there to agree on plans.
        """
        return {}

    def explain_proposed(self) -> str | None:
        """The plan of a step as a table, before ranks agree on it; None for an optimizer that has none."""
        return None

    def layout(self, parameter: Tensor) -> Layout:
        """Where a parameter lies; of a stack, where each of its matrices does."""
        return on_one_rank((parameter.shape[-2], parameter.shape[-1]))

    def split_shapes(self, parameter: Tensor) -> tuple[int, ...] | None:
        """Rows of each logical matrix in one query group of a fused parameter; None for any other."""
        return self.qkv_split_shapes if self._is_split(parameter) else None

    def split_of(self, parameter: Tensor) -> Split:
        """The logical matrices of a parameter: what its attribute declares, else what ``split_qkv`` makes of it."""
        declared, shapes = declared_split(parameter), self.split_shapes(parameter)
        return declared or (WHOLE if shapes is None else query_key_value(shapes))

    def matrix_layouts(self, parameter: Tensor) -> list[Layout]:
        """Where the logical matrices of a parameter lie."""
        return split_layout(self.layout(parameter), self.split_of(parameter))

    def _is_split(self, parameter: Tensor) -> bool:
        return self.split_qkv and self.is_qkv_fn is not None and self.is_qkv_fn(parameter)

    def _check_parameter(self, parameter: Tensor, place: str) -> None:
        declared = declared_split(parameter)
        check_dimensions(f"{type(self).__name__} orthogonalizes matrices, but {place}", parameter, declared)
        if declared is not None:
            self._check_declared(parameter)
        elif self._is_split(parameter):
            self._check_qkv(parameter)

    def _check_qkv(self, parameter: Tensor) -> None:
        assert self.qkv_split_shapes is not None  # checked at construction
        if parameter.size(0) != sum(self.qkv_split_shapes):
            raise ValueError(
                f"{type(self).__name__}: a fused projection of {parameter.size(0)} rows cannot be split into "
                f"{list(self.qkv_split_shapes)}, which are {sum(self.qkv_split_shapes)}"
            )

    def _check_declared(self, parameter: Tensor) -> None:
        check_declared(parameter.shape, self.split_of(parameter), self.layout(parameter))

    def _check_split(self, qkv_split_shapes: Sequence[int] | None) -> tuple[int, ...] | None:
        if self.is_qkv_fn is None:
            raise ValueError("split_qkv needs is_qkv_fn, which tells the fused parameters, got None")
        return check_split_shapes(qkv_split_shapes, self.split_lengths)


def check_dimensions(where: str, parameter: Tensor, split: Split | None) -> None:
    """Check that a parameter is a matrix, or is declared as a stack of matrices and has three dimensions.

    Args:
        where: what a message begins with.
        parameter: this rank's part.
        split: what its attribute declares.

    Raises:
        ValueError: if it is something else.
    """
    stacked = None if split is None else split.stacked
    shape = tuple(parameter.shape)
    if len(shape) != (2 if stacked is None else 3):
        raise ValueError(
            f"{where} has shape {shape}: give it to another optimizer (AdamW, say)"
            + (f", or declare a stack of {shape[0]} matrices" if len(shape) == 3 else "")
        )
    if stacked not in (None, shape[0]):
        raise ValueError(f"a parameter of shape {shape} is declared as a stack of {stacked} matrices")
    if stacked is not None and isinstance(parameter, DTensor):
        raise ValueError(f"stacked matrices cannot be DTensors yet, got one of shape {shape}: keep them apart")


def check_declared(shape: Sequence[int], split: Split, layout: Layout, blockwise: bool = False) -> None:
    """Check that the declared matrices are those of the parameter, and that its pieces can be split.

    Args:
        shape: of this rank's part, for messages.
        split: what is declared.
        layout: where the parameter lies.
        blockwise: each piece of a logical matrix is taken for a matrix, so all ranks need the like of each.

    Raises:
        ValueError: saying what does not fit.
    """
    try:
        split_layout(layout, split)
    except ValueError as error:
        raise ValueError(f"a parameter of shape {tuple(shape)} is not what was declared of it: {error}") from error
    rows = sum(split.pattern(layout.shape[0]).sizes)
    if blockwise and split.parts and split.order != "per_shard" and cut_inside(layout, rows):
        raise ValueError(
            f"tp_mode blockwise cannot split a parameter of {layout.shape[0]} rows over {layout.ranks} ranks, whose "
            f"shards end inside the {rows} rows that hold all of its logical matrices: take duplicated or distributed"
        )


def check_query_groups(shapes: Sequence[int], layout: Layout, blockwise: bool = False) -> None:
    """The same for a fused query, key and value projection, with so many rows of each in a query group."""
    if layout.shape[0] % sum(shapes):
        raise ValueError(
            f"a fused projection of {layout.shape[0]} rows is not a whole number of query groups {list(shapes)}, "
            f"which have {sum(shapes)} rows"
        )
    if blockwise and cut_inside(layout, sum(shapes)):
        raise ValueError(
            f"tp_mode blockwise cannot split a fused projection of {layout.shape[0]} rows over {layout.ranks} "
            f"ranks, whose shards end inside a query group of {sum(shapes)} rows: take duplicated or distributed, "
            f"or turn split_qkv off"
        )


def cut_inside(layout: Layout, rows: int) -> bool:
    """Whether a piece begins or ends elsewhere than at a multiple of so many rows."""
    return any(edge % rows for piece in layout.pieces for edge in (piece.top, piece.bottom))
