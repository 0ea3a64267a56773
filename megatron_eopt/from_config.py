"""Arguments of constructors from Megatron's config."""

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import Any

from megatron_eopt.optimizer_spec import OptimizerSpec
from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.settings.execution import Execution
from megatron_eopt.settings.groups import DECOUPLED
from megatron_eopt.settings.of_class import arguments_of
from megatron_eopt.settings.records import MOMENTUM_DTYPES


def config_to_kwargs(
    row: OptimizerSpec, config: Any, model_chunks: Sequence[Any], pg_collection: Any
) -> dict[str, Any]:
    """Arguments of an optimizer of the table.

    ``use_decoupled_weight_decay=False`` is a ``ValueError``, unless the optimizer has Muon's setting for it. Megatron's
    own field ``decoupled_weight_decay`` is Adam's alone, as in Megatron.
    """
    if DECOUPLED not in row.of_muon:
        for field in (f"{row.name}_{DECOUPLED}", DECOUPLED):
            if not getattr(config, field, True):
                raise ValueError(f"{row.name} has decoupled weight decay only: leave {field} at True")
    of_muon = kwargs_from_config(row.cls, "muon", config)
    kwargs = {setting: value for setting, value in of_muon.items() if setting in row.of_muon}
    kwargs |= kwargs_from_config(row.cls, row.name, config)
    if row.takes("execution"):
        kwargs["execution"] = execution_from(config, pg_collection)
    elif row.takes("symmetric_products"):
        kwargs |= symmetric_products_from(config)
    if not row.cls.decays_weights:
        kwargs["weight_decay"] = 0.0
    if row.betas and hasattr(config, f"{row.betas}_beta1"):
        kwargs["betas"] = (getattr(config, f"{row.betas}_beta1"), getattr(config, f"{row.betas}_beta2"))
    if row.betas and hasattr(config, f"{row.betas}_eps"):
        kwargs["eps"] = getattr(config, f"{row.betas}_eps")
    if row.owns == "matrices":
        model = model_chunks[0].config
        if kwargs.setdefault("split_qkv", False):  # without a flag only declared parameters are split
            kwargs["is_qkv_fn"] = lambda param: getattr(param, "is_qkv", False)
            kwargs["qkv_split_shapes"] = None
            if model.num_attention_heads and model.num_query_groups and model.kv_channels:
                kwargs["qkv_split_shapes"] = get_qkv_split_shapes(model)
        kwargs["pg_collection"] = pg_collection
    return kwargs


def kwargs_from_config(optimizer_cls: Callable[..., Any], prefix: str, config: Any) -> dict[str, Any]:
    """Arguments of an optimizer: ``config.{prefix}_{name}``, else ``config.{name}``."""
    kwargs = {}
    for argument in constructor_arguments(optimizer_cls):
        name = argument.name
        fields = [field for field in (f"{prefix}_{name}", name) if hasattr(config, field)]
        named = argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
        if fields and named and name not in ("params", *getattr(optimizer_cls, "keywords", ())):  # of a partial
            kwargs[name] = getattr(config, fields[0])
    return kwargs


def constructor_arguments(made_by: Callable[..., Any]) -> list[inspect.Parameter]:
    """Arguments of a class's ``__init__``, of a ``functools.partial``, or of a function.

    ``inspect.signature`` of a class shows its ``__new__`` where it has one, which may take anything.
    """
    if isinstance(made_by, functools.partial):
        left = constructor_arguments(made_by.func)[len(made_by.args) :]
        return [argument.replace(default=made_by.keywords.get(argument.name, argument.default)) for argument in left]
    if isinstance(made_by, type):
        return arguments_of(made_by.__init__)[1:]  # type: ignore[misc]
    return arguments_of(made_by)


def with_fields(config: Any, **values: Any) -> Any:
    """A copy of a config with other values."""
    copied = copy.copy(config)
    for name, value in values.items():
        setattr(copied, name, value)
    return copied


def execution_from(config: Any, pg_collection: Any) -> Execution:
    """The argument ``execution`` of Muon and its relatives."""
    given = symmetric_products_from(config) | workspace_from(config) | momentum_dtype_from(config)
    for name in ("symmetric_products", "step_kernels", "cuda_graphs"):
        value = getattr(config, f"muon_{name}", None)
        if value is not None:
            given.setdefault(name, value)
    if hasattr(config, "offload_fraction"):
        given["offload_fraction"] = config.offload_fraction
    if getattr(config, "muon_share_over_dp", False):
        given["data_parallel_group"] = pg_collection.dp_cp
    return Execution(**given)


def workspace_from(config: Any) -> dict[str, Any]:
    """The setting ``workspace``, in bytes; ``--optimizer-workspace`` is in GiB."""
    gib = getattr(config, "optimizer_workspace", None)
    if gib is not None and not 0 < gib < inf:
        raise ValueError(f"--optimizer-workspace must be a finite number of GiB above 0, got {gib}")
    return {} if gib is None else {"workspace": ceil(gib * 2**30)}


def momentum_dtype_from(config: Any) -> dict[str, Any]:
    """The setting ``momentum_dtype``; none for the default ``fp32``."""
    name = getattr(config, "optimizer_momentum_dtype", "fp32")
    check_choice("--optimizer-momentum-dtype", name, MOMENTUM_DTYPES)
    dtype = MOMENTUM_DTYPES[name]
    return {} if dtype is None else {"momentum_dtype": dtype}


def symmetric_products_from(config: Any) -> dict[str, Any]:
    """The setting ``symmetric_products``, of Megatron's ``--muon-use-syrk``."""
    if not getattr(config, "muon_use_syrk", False):
        return {}
    named = getattr(config, "muon_symmetric_products", None)
    if named not in (None, "triton"):
        raise ValueError(
            f"--muon-use-syrk asks for symmetric products by Triton, and --muon-symmetric-products for {named}: keep "
            f"one of the two"
        )
    return {"symmetric_products": "triton"}


def get_qkv_split_shapes(model_cfg: Any) -> list[int]:
    """Rows of q, (gate,) k, v in a query group."""
    query_rows = model_cfg.num_attention_heads // model_cfg.num_query_groups * model_cfg.kv_channels
    queries = [query_rows, query_rows] if getattr(model_cfg, "attention_output_gate", False) else [query_rows]
    return [*queries, model_cfg.kv_channels, model_cfg.kv_channels]
