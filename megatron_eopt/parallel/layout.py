"""Where a matrix lies: global shape, shards, and group."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.matrices import LocalRows, Split
from megatron_eopt.parallel.collectives import joint_group
from megatron_eopt.parallel.records import Rectangle, Shape, cut, cut_dimension, cut_twice, shapes, whole


@dataclass(frozen=True)
class Layout:
    """Where a matrix lies."""

    shape: Shape  # of the global matrix
    rectangles: tuple[Rectangle, ...]  # what each rank of the group holds, in the order of its ranks
    group: ProcessGroup | None = None  # of the ranks; None for one
    label: str = ""  # of the group, the same on every rank
    # Shards of a fused parameter's rows that each have a part of every matrix; None: one for each rank, or one where
    # ranks do not cut the rows in their order.
    shards: int | None = None
    padding: int = 0  # rows of this rank's tensor behind its shard, no part of the matrix

    @property
    def ranks(self) -> int:
        """Number of shards, of all copies of the matrix."""
        return len(self.rectangles)

    @property
    def rank(self) -> int:
        """Index of this rank's shard."""
        return 0 if self.group is None else self.group.rank()

    @property
    def rectangle(self) -> Rectangle:
        """What this rank holds."""
        return self.rectangles[self.rank]

    @property
    def sharded(self) -> bool:
        """Whether a rank holds a part only."""
        return bool(self.cut_dims)

    @property
    def dim(self) -> int | None:
        """The one dimension cut in the order of the ranks."""
        return cut_dimension(self.shape, self.rectangles)

    @property
    def transposed(self) -> "Layout":
        """The layout of the transposed matrix."""
        turned = tuple(Rectangle(r.left, r.right, r.top, r.bottom) for r in self.rectangles)
        return replace(self, shape=self.shape[::-1], rectangles=turned)

    @property
    def cut_dims(self) -> frozenset[int]:
        """The dimensions that are cut, in whatever order."""
        held = shapes(self.rectangles)
        return frozenset(dim for dim in (0, 1) if any(shape[dim] != self.shape[dim] for shape in held))


def on_one_rank(shape: Shape) -> Layout:
    """The layout of a matrix that each rank has whole."""
    return Layout(shape, (whole(shape),))


def shared_out(
    layout: Layout,
    group: ProcessGroup,
    joint: ProcessGroup | None = None,
    label: str = "dp",
) -> Layout:
    """The layout that shares out work on data-parallel copies.

    A cut matrix keeps its layout unless ``joint`` has the ranks of both groups, copy by copy, as Megatron numbers them.
    """
    if group.size() == 1:
        return layout
    if layout.group is None:
        return Layout(layout.shape, (whole(layout.shape),) * group.size(), group, label)
    if joint is None or dist.get_process_group_ranks(joint) != _grid_ranks(group, layout.group):
        return layout
    shards = layout.shards or (layout.ranks if layout.dim == 0 else 1)
    rectangles = layout.rectangles * group.size()
    return replace(
        layout,
        rectangles=rectangles,
        group=joint,
        label=f"{layout.label} x {label}",
        shards=shards,
    )


def _grid_ranks(first: ProcessGroup, second: ProcessGroup) -> list[int]:
    """The ranks of a grid of two axes that cross in this one, row by row.

    Megatron numbers them so: a step along one axis is as far from every rank.
    """
    here = dist.get_rank()
    ranks = []
    for start in dist.get_process_group_ranks(first):
        ranks += [start + rank - here for rank in dist.get_process_group_ranks(second)]
    return ranks


def is_expert(parameter: Tensor) -> bool:
    """Whether a parameter belongs to an expert."""
    return bool(getattr(parameter, "expert_tp", False)) or not getattr(parameter, "allreduce", True)


def is_sharded(parameter: Tensor) -> bool:
    """Whether Megatron's attributes say that a parameter is cut."""
    # partition_dim alone is no proof: Transformer Engine sets it to 0 on replicated weights
    return getattr(parameter, "partition_dim", -1) >= 0 and (
        bool(getattr(parameter, "tensor_model_parallel", False)) or is_expert(parameter)
    )


def is_unmarked(parameter: Tensor) -> bool:
    """Whether attributes do not say if a parameter is cut."""
    return getattr(parameter, "partition_dim", -1) >= 0 and not hasattr(parameter, "tensor_model_parallel")


def is_cut_again(parameter: Tensor) -> bool:
    """Whether Megatron (0.19) cuts a shard's rows a second time."""
    return bool(getattr(parameter, "is_gtp_weight_remat", False))


def is_replicated(parameter: Tensor) -> bool:
    """Whether every tensor-parallel rank has all of a parameter."""
    # vectors of a gated delta product are marked as cut, without a partition_dim
    marked = is_unmarked(parameter) or bool(getattr(parameter, "tensor_model_parallel", False))
    return not (marked or is_sharded(parameter) or is_cut_again(parameter))


def padding_of(parameter: Tensor) -> int:
    """Rows of padding, where :func:`is_cut_again`."""
    return getattr(parameter, "pad_length", None) or 0


def layout_of(
    parameter: Tensor,
    tp_group: ProcessGroup | None,
    expert_tp_group: ProcessGroup | None = None,
    gtp_group: ProcessGroup | None = None,
    expert_gtp_group: ProcessGroup | None = None,
) -> Layout:
    """The layout of a matrix or stack, from Megatron's attributes.

    ``tp_group`` is None for one rank; ``gtp_group`` is Megatron's ``gtp_remat``, over which a shard that
    :func:`is_cut_again` is cut, with ``pad_length`` rows at the end. Raises ``ValueError`` for a ``partition_dim`` or
    ``pad_length`` that does not fit, a stack that is cut twice, and a group that cannot be made.
    """
    rows, cols = parameter.shape[-2:]
    prefix = ""
    if is_expert(parameter):
        tp_group = expert_tp_group
        gtp_group = expert_gtp_group
        prefix = "expt_"
    tp = tp_group if is_sharded(parameter) and tp_group is not None and tp_group.size() > 1 else None
    gtp = gtp_group if is_cut_again(parameter) and gtp_group is not None and gtp_group.size() > 1 else None
    ahead = parameter.ndim - 2
    dim: int = 0 if tp is None else parameter.partition_dim - ahead  # type: ignore[attr-defined]
    if dim not in (0, 1):
        kind = f"a stack of matrices is {ahead} or {ahead + 1}" if ahead else "a matrix is 0 or 1"
        given = f"{dim + ahead} on a parameter of shape {tuple(parameter.shape)}"
        raise ValueError(f"partition_dim of {kind}, got {given}")
    if gtp is not None:
        return _cut_again(parameter, dim, tp, gtp, prefix)
    return cut_over((rows, cols), None if tp is None else dim, tp, f"{prefix}tp")


def cut_over(
    held: Shape,
    dim: int | None,
    group: ProcessGroup | None,
    label: str = "tp",
) -> Layout:
    """The layout of equal shards; a whole matrix without ``dim``."""
    rows, cols = held
    if dim is None or group is None or group.size() == 1:
        return on_one_rank((rows, cols))
    shape = (rows * group.size(), cols) if dim == 0 else (rows, cols * group.size())
    return Layout(shape, cut(shape, dim, group.size()), group, label)


def _cut_again(
    parameter: Tensor,
    dim: int,
    tp: ProcessGroup | None,
    gtp: ProcessGroup,
    prefix: str,
) -> Layout:
    """The layout cut by ``tp``, then along rows by ``gtp``."""
    if parameter.ndim != 2:
        raise ValueError(f"a stack of matrices {tuple(parameter.shape)} cannot be cut a second time: keep them apart")
    rows, cols = parameter.shape
    ranks = 1 if tp is None else tp.size()
    shape, grid = cut_twice((rows, cols), dim, ranks, gtp.size(), padding_of(parameter))
    if tp is None:
        group = gtp
        rectangles = grid[0]
        label = f"{prefix}gtp_remat"
    else:
        group, rectangles = _over_both(tp, gtp, list(chain(*grid)))
        label = f"{prefix}tp x gtp_remat"
    layout = Layout(shape, rectangles, group, label, shards=ranks if dim == 0 else 1)
    return replace(layout, padding=rows - layout.rectangle.shape[0])


def within(layout: Layout, dim: int, tp: ProcessGroup | None) -> Layout:
    """Tensor-parallel shards, each cut like ``layout``; all ranks call together."""
    if tp is None or tp.size() == 1:
        return layout
    rows, cols = layout.shape
    cut = replace(cut_over(layout.shape, dim, tp), shards=tp.size() if dim == 0 else 1)
    if layout.group is None:
        return cut
    grid = []
    for i in range(tp.size()):
        down, right = (i * rows, 0) if dim == 0 else (0, i * cols)
        for r in layout.rectangles:
            grid.append(Rectangle(r.top + down, r.bottom + down, r.left + right, r.right + right))
    group, rectangles = _over_both(tp, layout.group, grid)
    return replace(
        cut,
        rectangles=rectangles,
        group=group,
        label=f"tp x {layout.label}",
    )


def _over_both(
    tp: ProcessGroup,
    other: ProcessGroup,
    grid: Sequence[Rectangle],
) -> tuple[ProcessGroup, tuple[Rectangle, ...]]:
    """The group of two axes, and its ranks' shards, from those of the grid row by row."""
    held = dict(zip(_grid_ranks(tp, other), grid, strict=True))
    members = tuple(sorted(held))
    group = joint_group((members,), members)
    return group, tuple(held[rank] for rank in dist.get_process_group_ranks(group))


def split_layout(layout: Layout, split: Split) -> list[Layout]:
    """The layouts of a parameter's logical matrices.

    A shard holds consecutive rows of each, perhaps none. Raises ``ValueError`` where the declaration does not fit.
    """
    matrix = replace(layout, shards=None, padding=0)  # which are of the parameter
    if split.is_whole:
        return [matrix]
    pattern = split.pattern(layout.shape[0], _shards(layout, split))
    layouts = []
    for i, block in enumerate(pattern.blocks):
        rectangles = []
        for r in layout.rectangles:
            top, bottom = pattern.held(r.top, r.bottom)[i]
            rectangles.append(Rectangle(top, bottom, r.left, r.right))
        layouts.append(replace(matrix, shape=(block.rows, layout.shape[1]), rectangles=tuple(rectangles)))
    return layouts * (split.stacked or 1)


def local_rows(layout: Layout, split: Split) -> LocalRows:
    """What splits and merges this rank's part of a parameter."""
    rectangle = layout.rectangle
    return split.local(layout.shape[0], rectangle.top, rectangle.bottom, _shards(layout, split), layout.padding)


def _shards(layout: Layout, split: Split) -> int:
    """Number of shards that each have part of every matrix."""
    if layout.shards is not None:
        return layout.shards
    shards = layout.ranks if layout.dim == 0 else 1
    rows = sorted({rows for rows, _ in shapes(layout.rectangles)})
    if split.order == "per_shard" and len(rows) > 1:
        raise ValueError(f"shards that each have a part of every matrix are equal, got {rows} rows on several ranks")
    return shards
