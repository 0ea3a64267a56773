"""Attributes on the model's parameters that say what an optimizer has to know, set before it is built."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from megatron_eopt.optimizers.parameters import GROUPS
from megatron_eopt.parallel.layout import layout_of
from megatron_eopt.registry import get_qkv_split_shapes


def tag_fused_projections(model_chunks: Sequence[Any], pg_collection: Any) -> None:
    """Mark every fused query, key and value projection with ``is_qkv`` and ``qkv_split_shapes``.

    Megatron marks those whose shard is a whole number of query groups; with more ranks than groups none is, and the
    projection would be orthogonalized as one matrix at that TP alone. The global matrix decides here, and the config of
    the attention that owns it, which need not be the model's (an encoder beside the language model).

    Raises:
        ValueError: if a projection has another number of rows than its config says; then none is marked.
    """
    found = list(_fused_projections(model_chunks))
    for name, parameter, config in found:
        shapes = get_qkv_split_shapes(config)
        rows = layout_of(parameter, *(getattr(pg_collection, group, None) for group in GROUPS)).shape[0]
        if rows != config.num_query_groups * sum(shapes):
            raise ValueError(
                f"{name} has {rows} rows over all ranks, but {config.num_query_groups} query groups of {shapes} rows "
                f"make {config.num_query_groups * sum(shapes)}: turn QKV splitting off with --muon-no-split-qkv"
            )
    for _, parameter, config in found:
        parameter.is_qkv = True  # type: ignore[attr-defined]
        parameter.qkv_split_shapes = get_qkv_split_shapes(config)  # type: ignore[attr-defined]


def _fused_projections(model_chunks: Sequence[Any]) -> Iterator[tuple[str, Tensor, Any]]:
    """Name, weight and config of every trainable fused projection."""
    for chunk in model_chunks:
        for name, module in chunk.named_modules():
            weight = getattr(getattr(module, "linear_qkv", None), "weight", None)
            if weight is not None and weight.ndim == 2 and weight.requires_grad:
                yield f"{name}.linear_qkv.weight", weight, module.config
