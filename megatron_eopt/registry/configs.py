"""From a run's model and config to an optimizer: its arguments, and which parameters are for Adam."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron_eopt.family import ROWS
from megatron_eopt.matrices import declared_split


def is_nonlinear_or_embedding(param: Tensor) -> bool:
    """True for a parameter that a matrix optimizer should leave to Adam: an embedding, an output layer, no matrix.

    A parameter of three dimensions is a stack of matrices where it is declared as one.
    """
    split = declared_split(param)
    matrices = param.ndim == 2 or (param.ndim == 3 and split is not None and split.stacked is not None)
    return bool(getattr(param, "is_embedding_or_output_parameter", False)) or not matrices


def is_muon_excluded(param: Tensor) -> bool:
    """True for what :func:`is_nonlinear_or_embedding` leaves to Adam, and where the attribute ``use_muon`` is False.

    Megatron-Core after 0.19 sets that attribute.
    """
    return not getattr(param, "use_muon", True) or is_nonlinear_or_embedding(param)


def get_qkv_split_shapes(model_cfg: Any) -> list[int]:
    """Rows of ``[q, k, v]`` in one query group of a fused projection, ``[q, gate, k, v]`` with an output gate.

    Args:
        model_cfg: Megatron's ``TransformerConfig``.
    """
    query_rows = model_cfg.num_attention_heads // model_cfg.num_query_groups * model_cfg.kv_channels
    queries = [query_rows, query_rows] if getattr(model_cfg, "attention_output_gate", False) else [query_rows]
    return [*queries, model_cfg.kv_channels, model_cfg.kv_channels]


def kwargs_from_config(optimizer_cls: type, prefix: str, config: Any) -> dict[str, Any]:
    """Arguments of an optimizer that a config has values for.

    For every named parameter of ``__init__`` but self and params: ``config.{prefix}_{name}``, else ``config.{name}``.
    """
    kwargs = {}
    for name, parameter in inspect.signature(optimizer_cls.__init__).parameters.items():  # type: ignore[misc]
        if name in ("self", "params") or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        for attribute in (f"{prefix}_{name}", name):
            if hasattr(config, attribute):
                kwargs[name] = getattr(config, attribute)
                break
    return kwargs


def config_to_kwargs(name: str, config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
    """Arguments of an optimizer of the table from Megatron's config: from its own flags, and those that it shares.

    Args:
        name: of the optimizer.
        config: Megatron's ``OptimizerConfig``.
        model_chunks: the model, one module per virtual pipeline stage.
        pg_collection: Megatron's ``ProcessGroupCollection``.

    Raises:
        ValueError: if the config asks for weight decay that is not decoupled, which the optimizer does not have.
    """
    row = ROWS[name]
    decoupled = getattr(config, "decoupled_weight_decay", True)
    if not decoupled and not row.takes_l2_decay:
        raise ValueError(f"{name} has decoupled weight decay only: leave decoupled_weight_decay at True")
    of_muon = kwargs_from_config(row.cls, "muon", config)
    if hasattr(config, "muon_use_nesterov"):  # its name up to Megatron-Core 0.17
        of_muon["nesterov"] = config.muon_use_nesterov
    kwargs = {setting: value for setting, value in of_muon.items() if setting in row.of_muon}
    kwargs |= kwargs_from_config(row.cls, name, config)
    if row.takes_l2_decay:
        kwargs["use_decoupled_weight_decay"] = decoupled
    if not row.cls.decays_weights:
        kwargs["weight_decay"] = 0.0
    if row.betas and hasattr(config, f"{row.betas}_beta1"):
        kwargs["betas"] = (getattr(config, f"{row.betas}_beta1"), getattr(config, f"{row.betas}_beta2"))
    if row.betas and hasattr(config, f"{row.betas}_eps"):
        kwargs["eps"] = getattr(config, f"{row.betas}_eps")
    if row.owns == "matrices":
        kwargs["is_qkv_fn"] = lambda param: getattr(param, "is_qkv", False)
        kwargs["qkv_split_shapes"] = _query_group(model_chunks[0].config)
        kwargs["pg_collection"] = pg_collection
    return kwargs


def muon_config_to_kwargs(config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
    """Arguments of :class:`~megatron_eopt.optimizers.muon.TensorParallelMuon` from Megatron's config."""
    return config_to_kwargs("muon", config, model_chunks, pg_collection)


def adaptive_muon_config_to_kwargs(config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
    """Arguments of :class:`~megatron_eopt.optimizers.adaptive_muon.TensorParallelAdaptiveMuon`: Muon's, and its own."""
    return config_to_kwargs("adaptive_muon", config, model_chunks, pg_collection)


def _query_group(config: Any) -> list[int] | None:
    """Rows of each part of a query group; None for a model without attention, which has none to split."""
    sizes = (config.num_attention_heads, config.num_query_groups, config.kv_channels)
    return get_qkv_split_shapes(config) if all(sizes) else None
