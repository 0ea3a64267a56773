"""What is read off a model: which parameters are for Adam, and how a fused projection is made."""

from typing import Any

from torch import Tensor

from megatron_eopt.matrices import declared_split


def is_nonlinear_or_embedding(param: Tensor) -> bool:
    """True for a parameter that a matrix optimizer should leave to Adam: an embedding, an output layer, no matrix.

    A parameter of three dimensions is a stack of matrices where it is declared as one.
    """
    split = declared_split(param)
    matrices = param.ndim == 2 or (param.ndim == 3 and split is not None and split.stacked is not None)
    return bool(getattr(param, "is_embedding_or_output_parameter", False)) or not matrices


def is_muon_excluded(param: Tensor) -> bool:
    """The same, and True for a parameter whose attribute ``use_muon`` is False (Megatron-Core after 0.19)."""
    return not getattr(param, "use_muon", True) or is_nonlinear_or_embedding(param)


def get_qkv_split_shapes(model_cfg: Any) -> list[int]:
    """Rows of ``[q, k, v]`` in one query group of a fused projection, ``[q, gate, k, v]`` with an output gate.

    Args:
        model_cfg: Megatron's ``TransformerConfig``.
    """
    query_rows = model_cfg.num_attention_heads // model_cfg.num_query_groups * model_cfg.kv_channels
    queries = [query_rows, query_rows] if getattr(model_cfg, "attention_output_gate", False) else [query_rows]
    return [*queries, model_cfg.kv_channels, model_cfg.kv_channels]
