"""What attributes that Megatron sets say of where a parameter lies."""

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.matrices import is_flattened
from megatron_eopt.parallel.layout import Layout, cut_over


def is_expert(parameter: Tensor) -> bool:
    """Whether a parameter belongs to an expert."""
    return bool(getattr(parameter, "expert_tp", False)) or not getattr(parameter, "allreduce", True)


def is_sharded(parameter: Tensor) -> bool:
    """Whether Megatron's attributes say that a parameter is cut."""
    # Transformer Engine gives replicated weights a partition_dim, on which Megatron sets tensor_model_parallel = False
    return getattr(parameter, "partition_dim", -1) >= 0 and (
        bool(getattr(parameter, "tensor_model_parallel", True)) or is_expert(parameter)
    )


def layout_of(
    parameter: Tensor,
    tp_group: ProcessGroup | None,
    expert_tp_group: ProcessGroup | None = None,
) -> Layout:
    """The layout of a matrix, filter or stack, from Megatron's attributes.

    ``tp_group`` is None for one rank. Raises ``ValueError`` for a ``partition_dim`` that does not fit.
    """
    rows, cols = parameter.shape[-2:]
    ahead = parameter.ndim - 2
    if is_flattened(parameter):
        rows = parameter.shape[0]
        cols = parameter.shape[1:].numel()
        ahead = 0
    prefix = ""
    if is_expert(parameter):
        tp_group = expert_tp_group
        prefix = "expt_"
    tp = tp_group if is_sharded(parameter) and tp_group is not None and tp_group.size() > 1 else None
    dim: int = 0 if tp is None else parameter.partition_dim - ahead  # type: ignore[attr-defined]
    if dim not in (0, 1):
        kind = f"a stack of matrices is {ahead} or {ahead + 1}" if ahead else "a matrix is 0 or 1"
        given = f"{dim + ahead} on a parameter of shape {tuple(parameter.shape)}"
        raise ValueError(f"partition_dim of {kind}, got {given}")
    return cut_over((rows, cols), None if tp is None else dim, tp, f"{prefix}tp")
