"""What attributes that Megatron sets say of where a parameter lies."""

from dataclasses import replace
from itertools import chain

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.parallel.layout import Layout, cut_over, over_both
from megatron_eopt.parallel.rectangles import cut_twice


def is_expert(parameter: Tensor) -> bool:
    """Whether a parameter belongs to an expert."""
    return bool(getattr(parameter, "expert_tp", False)) or not getattr(parameter, "allreduce", True)


def is_sharded(parameter: Tensor) -> bool:
    """Whether Megatron's attributes say that a parameter is cut."""
    # Transformer Engine gives replicated weights a partition_dim, on which Megatron sets tensor_model_parallel = False
    return getattr(parameter, "partition_dim", -1) >= 0 and (
        bool(getattr(parameter, "tensor_model_parallel", True)) or is_expert(parameter)
    )


def is_cut_again(parameter: Tensor) -> bool:
    """Whether Megatron (0.19) cuts a shard's rows a second time."""
    return bool(getattr(parameter, "is_gtp_weight_remat", False))


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
        group, rectangles = over_both(tp, gtp, list(chain(*grid)))
        label = f"{prefix}tp x gtp_remat"
    layout = Layout(shape, rectangles, group, label, shards=ranks if dim == 0 else 1)
    return replace(layout, padding=rows - layout.rectangle.shape[0])
