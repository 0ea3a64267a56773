"""Arguments that Muon's relatives share with it."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.optimizers.parameters import TensorParallelGroups
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.precision import MatmulPrecision
from megatron_eopt.parallel.cost import Rates
from megatron_eopt.parallel.records import TpMode


class Transport(TypedDict, total=False):
    """Arguments of :class:`TensorParallelMuon` for finding, orthogonalizing and exchanging matrices."""

    split_qkv: bool
    is_qkv_fn: Callable[[Tensor], bool] | None
    qkv_split_shapes: Sequence[int] | None
    fp32_matmul_prec: MatmulPrecision
    coefficient_type: str | Sequence[Coefficients]
    num_ns_steps: int
    pg_collection: TensorParallelGroups | None
    tp_mode: TpMode
    cuda_graphs: bool
    data_parallel_group: ProcessGroup | None
    plan_rates: Rates | Literal["measure"]
    symmetric_products: str | None
    workspace: int
    offload_fraction: float
    momentum_dtype: torch.dtype | None
    momentum_warmup: int


def spelled_out[**P](init: Callable[P, None]) -> Callable[P, None]:
    """Spell out ``**transport`` in the signature, for ``help`` and configs."""
    signature = inspect.signature(init)
    of_muon = inspect.signature(TensorParallelMuon).parameters
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    taken = [of_muon[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in Transport.__annotations__]
    spelled = signature.replace(parameters=[*own, *taken])

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        spelled.bind(*args, **kwargs)
        init(*args, **kwargs)

    checked.__signature__ = spelled  # type: ignore[attr-defined]
    return checked


def passed_on(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Muon among a relative constructor's ``locals()``."""
    known = inspect.signature(TensorParallelMuon).parameters
    return {name: x for name, x in {**arguments, **arguments.get("transport", {})}.items() if name in known}
