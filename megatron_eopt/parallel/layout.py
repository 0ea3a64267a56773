"""Where a matrix lies: its global shape, the piece of every rank, and the group of ranks that hold them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.matrices import LocalRows, Split, query_key_value
from megatron_eopt.parallel.pieces import Piece, Shape, cut, cut_dimension, whole


@dataclass(frozen=True)
class Layout:
    """Where a matrix lies.

    Attributes:
        shape: rows and columns of the global matrix.
        pieces: what each rank of the group holds, in the order of its ranks.
        group: the ranks that hold the pieces, None where there is one.
        label: name of the group in plans, the same on every rank.
    """

    shape: Shape
    pieces: tuple[Piece, ...]
    group: ProcessGroup | None = None
    label: str = ""

    @property
    def ranks(self) -> int:
        """Number of pieces."""
        return len(self.pieces)

    @property
    def rank(self) -> int:
        """Which piece is this rank's."""
        return 0 if self.group is None else self.group.rank()

    @property
    def piece(self) -> Piece:
        """What this rank holds."""
        return self.pieces[self.rank]

    @property
    def sharded(self) -> bool:
        """True where a rank holds a part only."""
        return any(piece.shape != self.shape for piece in self.pieces)

    @property
    def dim(self) -> int | None:
        """The dimension that is cut in the order of the ranks; None where none is, or both are."""
        return cut_dimension(self.shape, self.pieces)

    @property
    def cut_dims(self) -> frozenset[int]:
        """The dimensions of which some rank holds a part only, in whatever order."""
        return frozenset(i for i in (0, 1) if any(piece.shape[i] != self.shape[i] for piece in self.pieces))


def on_one_rank(shape: Shape) -> Layout:
    """The layout of a matrix that each rank has whole, and treats as its own."""
    return Layout(shape, (whole(shape),))


def shared_out(layout: Layout, group: ProcessGroup) -> Layout:
    """The layout of a matrix that all ranks of a data-parallel group have whole, to share the work on it."""
    if group.size() == 1:
        return layout
    return Layout(layout.shape, (whole(layout.shape),) * group.size(), group, "dp")


def is_expert(parameter: Tensor) -> bool:
    """True for a parameter of an expert, whose shards lie in the expert tensor-parallel group."""
    return bool(getattr(parameter, "expert_tp", False)) or not getattr(parameter, "allreduce", True)


def is_sharded(parameter: Tensor) -> bool:
    """True if Megatron's attributes say that a parameter is cut over its group (which may have one rank).

    ``partition_dim`` alone is no proof: Transformer Engine sets it to 0 on replicated weights. It counts where
    ``tensor_model_parallel`` is set, or for an expert.
    """
    return getattr(parameter, "partition_dim", -1) >= 0 and (
        bool(getattr(parameter, "tensor_model_parallel", False)) or is_expert(parameter)
    )


def layout_of(parameter: Tensor, tp_group: ProcessGroup | None, expert_tp_group: ProcessGroup | None = None) -> Layout:
    """The layout of a two-dimensional parameter, or of each matrix of a stack, from the attributes that Megatron sets.

    Args:
        parameter: this rank's part, (rows x cols) or (matrices x rows x cols).
        tp_group: the tensor-parallel group, None for one rank.
        expert_tp_group: that of experts.

    Raises:
        ValueError: if ``partition_dim`` is not a dimension of a matrix.
    """
    rows, cols = parameter.shape[-2:]
    ahead = parameter.ndim - 2
    expert = is_expert(parameter)
    group = expert_tp_group if expert else tp_group
    if not is_sharded(parameter) or group is None or group.size() == 1:
        return on_one_rank((rows, cols))
    dim: int = parameter.partition_dim  # type: ignore[attr-defined]
    if dim - ahead not in (0, 1):
        kind = f"a stack of matrices is {ahead} or {ahead + 1}" if ahead else "a matrix is 0 or 1"
        raise ValueError(f"partition_dim of {kind}, got {dim} on a parameter of shape {tuple(parameter.shape)}")
    dim -= ahead
    shape = (rows * group.size(), cols) if dim == 0 else (rows, cols * group.size())
    return Layout(shape, cut(shape, dim, group.size()), group, "expt_tp" if expert else "tp")


def split_layout(layout: Layout, split: Split | Sequence[int]) -> list[Layout]:
    """The layouts of the logical matrices of a parameter, in the order of their names.

    A piece of a fused parameter may begin and end anywhere: it holds consecutive rows of every logical matrix, of some
    perhaps none.

    Args:
        layout: of the parameter, cut along rows, columns, both or not at all; where it is a stack, of each matrix.
        split: what is declared of it, or the rows of each part in one group of a fused query, key and value projection.

    Raises:
        ValueError: if the global matrix, or how it is cut, does not fit the declaration.
    """
    split = split if isinstance(split, Split) else query_key_value(split)
    if split.is_whole:
        return [layout]
    pattern = split.pattern(layout.shape[0], _shards(layout, split))
    held = [pattern.held(piece.top, piece.bottom) for piece in layout.pieces]
    layouts = [
        replace(
            layout,
            shape=(block.rows, layout.shape[1]),
            pieces=tuple(
                Piece(*rows[place], piece.left, piece.right) for rows, piece in zip(held, layout.pieces, strict=True)
            ),
        )
        for place, block in enumerate(pattern.blocks)
    ]
    return layouts * (1 if split.stacked is None else split.stacked)


def local_rows(layout: Layout, split: Split) -> LocalRows:
    """What splits this rank's part of a parameter into its pieces of the logical matrices, and merges them.

    Raises:
        ValueError: as :func:`split_layout`.
    """
    piece = layout.piece
    return split.local(layout.shape[0], piece.top, piece.bottom, _shards(layout, split))


def _shards(layout: Layout, split: Split) -> int:
    """Into how many shards the rows are cut, each with its part of every matrix."""
    shards = layout.ranks if layout.dim == 0 else 1
    rows = sorted({piece.shape[0] for piece in layout.pieces})
    if split.order == "per_shard" and len(rows) > 1:
        raise ValueError(f"shards that each have a part of every matrix are equal, got {rows} rows on several ranks")
    return shards
