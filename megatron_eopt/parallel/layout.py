"""Where a matrix lies: its global shape, the sharded dimension, and the group of ranks that hold the shards."""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Layout:
    """Where a matrix lies.

    Attributes:
        shape: rows and columns of the global matrix.
        dim: the dimension that is cut into equal shards in the order of the ranks (0 or 1), None where every rank has
            the whole matrix.
        group: the ranks that hold the shards, None where there is one.
    """

    shape: tuple[int, int]
    dim: int | None = None
    group: ProcessGroup | None = None

    @property
    def ranks(self) -> int:
        """Number of shards."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """Which shard is this rank's."""
        return 0 if self.group is None else self.group.rank()

    @property
    def sharded(self) -> bool:
        """True where this rank holds a part only."""
        return self.dim is not None and self.ranks > 1

    @property
    def shard_shape(self) -> tuple[int, int]:
        """Rows and columns that this rank holds."""
        rows, cols = self.shape
        if self.dim == 0:
            rows //= self.ranks
        elif self.dim == 1:
            cols //= self.ranks
        return rows, cols

    def with_shard_rows(self, rows: int) -> "Layout":
        """The layout of a logical matrix that has ``rows`` rows on this rank and is cut as this one is."""
        return replace(self, shape=(rows * self.ranks if self.dim == 0 else rows, self.shape[1]))


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
    """The layout of a two-dimensional parameter, from the attributes that Megatron sets.

    Args:
        parameter: this rank's part, (rows x cols).
        tp_group: the tensor-parallel group, None for one rank.
        expert_tp_group: that of experts.

    Raises:
        ValueError: if ``partition_dim`` is not a dimension of a matrix.
    """
    rows, cols = parameter.shape
    group = expert_tp_group if is_expert(parameter) else tp_group
    if not is_sharded(parameter) or group is None or group.size() == 1:
        return Layout((rows, cols))
    dim: int = parameter.partition_dim  # type: ignore[attr-defined]
    if dim not in (0, 1):
        raise ValueError(f"partition_dim of a matrix is 0 or 1, got {dim} on a parameter of shape {(rows, cols)}")
    scale = group.size()
    return Layout((rows * scale, cols) if dim == 0 else (rows, cols * scale), dim, group)
