"""Arguments that relatives of Muon share with it, and how their constructors hand them on."""

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
    """How matrices are found, orthogonalized and exchanged: arguments of :class:`TensorParallelMuon`."""

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
    """Name what ``**transport: Unpack[Transport]`` takes in the signature of a constructor, with the defaults.

    So ``help`` shows it, whoever reads signatures finds it (as ``kwargs_from_config`` does), and a call with any other
    name is a ``TypeError``, though :class:`TensorParallelMuon` may know it.
    """
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
    """What the constructor of a relative hands to Muon's: of its ``locals()`` those that are arguments of Muon."""
    known = inspect.signature(TensorParallelMuon).parameters
    return {name: x for name, x in {**arguments, **arguments.get("transport", {})}.items() if name in known}
