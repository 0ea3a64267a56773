"""Arguments that Muon's relatives share with it."""

import inspect
from collections.abc import Callable, Sequence
from typing import Literal, TypedDict

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.optimizers.parameters import TensorParallelGroups
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.precision import MatmulPrecision
from megatron_eopt.parallel.cost import Rates
from megatron_eopt.parallel.records import TpMode


class Execution(TypedDict, total=False):
    """Arguments of :class:`TensorParallelMuon` that say where and how steps are computed."""

    cuda_graphs: bool
    data_parallel_group: ProcessGroup | None
    plan_rates: Rates | Literal["measure"]
    symmetric_products: str | None
    workspace: int
    offload_fraction: float
    momentum_dtype: torch.dtype | None
    momentum_warmup: int


class Transport(Execution, total=False):
    """Also its arguments for finding, orthogonalizing and exchanging matrices."""

    split_qkv: bool
    is_qkv_fn: Callable[[Tensor], bool] | None
    qkv_split_shapes: Sequence[int] | None
    fp32_matmul_prec: MatmulPrecision
    coefficient_type: str | Sequence[Coefficients]
    num_ns_steps: int
    pg_collection: TensorParallelGroups | None
    tp_mode: TpMode


def spelled_out[**P](kind: type[Execution]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Show the arguments of ``**kind`` in a constructor's signature."""

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        signature, of_muon = inspect.signature(init), inspect.signature(TensorParallelMuon).parameters
        written = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        taken = [p.replace(kind=p.KEYWORD_ONLY) for name, p in of_muon.items() if name in kind.__annotations__]
        init.__signature__ = signature.replace(parameters=[*written, *taken])  # type: ignore[attr-defined]
        return init

    return decorate
