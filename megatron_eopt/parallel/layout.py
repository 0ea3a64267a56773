"""Where a matrix lies: global shape, shards, and group."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_eopt.matrices import LocalRows, Split
from megatron_eopt.parallel.collectives import joint_group
from megatron_eopt.parallel.rectangles import Rectangle, Shape, cut, cut_dimension, shapes, whole


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
    # Of a stack whose matrices ranks share out: the first that each rank has, and the one behind its last. All of them
    # lie as the rectangles say.
    layers: tuple[tuple[int, int], ...] = ()

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
    def held(self) -> tuple[Rectangle, tuple[tuple[int, int], ...]]:
        """This rank's rectangle, and which matrices of a stack it has."""
        return self.rectangle, self.layers[self.rank : self.rank + 1]

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


def of_stack(layout: Layout, shape: Shape) -> Layout:
    """The layout of the matrices of a stack, from that of (matrices x entries)."""
    if layout.group is None:
        return on_one_rank(shape)
    layers = tuple((r.top, r.bottom) for r in layout.rectangles)
    return replace(layout, shape=shape, rectangles=(whole(shape),) * layout.ranks, layers=layers)


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
    group, rectangles = over_both(tp, layout.group, grid)
    return replace(
        cut,
        rectangles=rectangles,
        group=group,
        label=f"tp x {layout.label}",
    )


def over_both(
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
    matrix = replace(layout, shards=None, layers=())  # which are of the parameter
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
    if not layout.layers:
        return layouts * (split.stacked or 1)
    holders: list[list[int]] = [[] for _ in range(split.stacked or 1)]
    for rank, (first, end) in enumerate(layout.layers):
        for layer in range(first, end):
            holders[layer].append(rank)
    # made once: of many ranks and experts that is most of the work
    nothing = [[Rectangle(r.bottom, r.bottom, r.left, r.right) for r in each.rectangles] for each in layouts]
    of_layers = []
    for ranks in holders:
        for each, empty in zip(layouts, nothing, strict=True):
            rectangles = list(empty)
            for rank in ranks:
                rectangles[rank] = each.rectangles[rank]
            of_layers.append(replace(each, rectangles=tuple(rectangles)))
    return of_layers


def local_rows(layout: Layout, split: Split) -> LocalRows:
    """What splits and merges this rank's part of a parameter."""
    rectangle = layout.rectangle
    return split.local(
        layout.shape[0],
        rectangle.top,
        rectangle.bottom,
        _shards(layout, split),
        layout.layers[layout.rank] if layout.layers else None,
    )


def _shards(layout: Layout, split: Split) -> int:
    """Number of shards that each have part of every matrix."""
    if layout.shards is not None:
        return layout.shards
    shards = layout.ranks if layout.dim == 0 else 1
    rows = sorted({rows for rows, _ in shapes(layout.rectangles)})
    if split.order == "per_shard" and len(rows) > 1:
        raise ValueError(f"shards that each have a part of every matrix are equal, got {rows} rows on several ranks")
    return shards
