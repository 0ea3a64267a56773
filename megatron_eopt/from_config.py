"""Arguments of constructors from Megatron's config."""

import copy
import functools
import inspect
from collections.abc import Callable
from math import ceil, inf
from typing import Any

from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.settings.execution import Execution
from megatron_eopt.settings.of_class import arguments_of
from megatron_eopt.settings.records import MOMENTUM_DTYPES


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
