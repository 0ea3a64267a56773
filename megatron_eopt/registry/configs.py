"""Arguments of each optimizer from Megatron's config, in the form that an entry of the registry has."""

from collections.abc import Sequence
from typing import Any

from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.hyperball import MuonHyperball
from megatron_eopt.optimizers.lion import Lion, Signum
from megatron_eopt.optimizers.muon import TensorParallelMuon, Transport
from megatron_eopt.optimizers.polar_grad import PolarGrad
from megatron_eopt.optimizers.schedule_free import ScheduleFreeAdamW
from megatron_eopt.optimizers.scion import Scion
from megatron_eopt.optimizers.soap import SOAP
from megatron_eopt.optimizers.spectron import Spectron
from megatron_eopt.registry.model import get_qkv_split_shapes
from megatron_eopt.registry.table import kwargs_from_config


def muon_config_to_kwargs(config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
    """Arguments of :class:`~megatron_eopt.optimizers.muon.TensorParallelMuon` from Megatron's config."""
    kwargs = kwargs_from_config(TensorParallelMuon, "muon", config)
    if hasattr(config, "muon_use_nesterov"):  # its name up to Megatron-Core 0.17
        kwargs["nesterov"] = config.muon_use_nesterov
    kwargs["use_decoupled_weight_decay"] = getattr(config, "decoupled_weight_decay", True)
    return kwargs | _of_matrices(model_chunks, pg_collection)


def adaptive_muon_config_to_kwargs(config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
    """Those of Muon, and what :class:`~megatron_eopt.optimizers.adaptive_muon.TensorParallelAdaptiveMuon` has more."""
    kwargs = muon_config_to_kwargs(config, model_chunks, pg_collection)
    kwargs.update(kwargs_from_config(TensorParallelAdaptiveMuon, "adaptive_muon", config))
    return kwargs


def lion_config_to_kwargs(config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
    """Arguments of :class:`~megatron_eopt.optimizers.lion.Lion` from Megatron's config, which has betas for it.

    Raises:
        ValueError: if the config asks for another weight decay than the decoupled one.
    """
    _refuse_l2("lion", config)
    kwargs = kwargs_from_config(Lion, "lion", config)
    if hasattr(config, "lion_beta1"):
        kwargs["betas"] = (config.lion_beta1, config.lion_beta2)
    return kwargs


def schedule_free_config_to_kwargs(config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
    """Arguments of :class:`~megatron_eopt.optimizers.schedule_free.ScheduleFreeAdamW`: Adam's, and its own flags.

    Raises:
        ValueError: if the config asks for another weight decay than the decoupled one.
    """
    _refuse_l2("schedule_free_adamw", config)
    kwargs = kwargs_from_config(ScheduleFreeAdamW, "schedule_free_adamw", config)
    return kwargs | {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}


def soap_config_to_kwargs(config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
    """Arguments of :class:`~megatron_eopt.optimizers.soap.SOAP`: Adam's, and Megatron's and our own flags for it.

    Raises:
        ValueError: if the config asks for another weight decay than the decoupled one.
    """
    _refuse_l2("soap", config)
    kwargs = kwargs_from_config(SOAP, "soap", config) | _of_matrices(model_chunks, pg_collection)
    return kwargs | {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}


def spectron_config_to_kwargs(config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
    """Arguments of :class:`~megatron_eopt.optimizers.spectron.Spectron`: Muon's iteration, and its own flags.

    Raises:
        ValueError: if the config asks for another weight decay than the decoupled one.
    """
    _refuse_l2("spectron", config)
    kwargs = kwargs_from_config(Spectron, "muon", config) | kwargs_from_config(Spectron, "spectron", config)
    return kwargs | _of_matrices(model_chunks, pg_collection)


def signum_config_to_kwargs(config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
    """Arguments of :class:`~megatron_eopt.optimizers.signum.Signum`, by its own flags.

    Raises:
        ValueError: if the config asks for another weight decay than the decoupled one.
    """
    _refuse_l2("signum", config)
    return kwargs_from_config(Signum, "signum", config)


def scion_config_to_kwargs(config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
    """Arguments of :class:`~megatron_eopt.optimizers.scion.Scion`: Muon's iteration, and its own flags."""
    return _ruled(Scion, "scion", config, model_chunks, pg_collection) | {"weight_decay": 0.0}


def polargrad_config_to_kwargs(config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
    """Arguments of :class:`~megatron_eopt.optimizers.polar_grad.PolarGrad`: Muon's iteration, and its own flags."""
    return _ruled(PolarGrad, "polargrad", config, model_chunks, pg_collection)


def hyperball_config_to_kwargs(config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
    """Arguments of :class:`~megatron_eopt.optimizers.hyperball.MuonHyperball`: Muon's iteration and momentum."""
    kwargs = _ruled(MuonHyperball, "muon_hyperball", config, model_chunks, pg_collection) | {"weight_decay": 0.0}
    return {"momentum": config.muon_momentum, "nesterov": config.muon_nesterov} | kwargs


def _ruled(
    optimizer_cls: type, name: str, config: Any, model_chunks: Sequence[Any], pg_collection: Any
) -> dict[str, Any]:
    """What relatives of Muon have of Muon's flags, those of the iteration and the transport, and of their own."""
    _refuse_l2(name, config)
    of_muon = kwargs_from_config(optimizer_cls, "muon", config)
    own = kwargs_from_config(optimizer_cls, name, config)
    shared = {key: value for key, value in of_muon.items() if key in Transport.__annotations__}
    return shared | own | _of_matrices(model_chunks, pg_collection)


def _of_matrices(model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
    """What every optimizer of matrices is told of the model and of the ranks."""
    return {
        "is_qkv_fn": lambda param: getattr(param, "is_qkv", False),
        "qkv_split_shapes": _query_group(model_chunks[0].config),
        "pg_collection": pg_collection,
    }


def _query_group(config: Any) -> list[int] | None:
    """Rows of each part of a query group; None for a model without attention, which has none to split."""
    sizes = (config.num_attention_heads, config.num_query_groups, config.kv_channels)
    return get_qkv_split_shapes(config) if all(sizes) else None


def _refuse_l2(name: str, config: Any) -> None:
    if not getattr(config, "decoupled_weight_decay", True):
        raise ValueError(f"{name} has decoupled weight decay only: leave decoupled_weight_decay at True")
