"""Sizes of models and numbers of ranks that can be described.

A description makes every module of a rank once, without memory for it. What no model has would take hours, or end in an
error that names nothing.
"""

from collections.abc import Mapping
from typing import Any

# By Megatron's name: least and most. Each most is far above any model that was trained.
_WIDTH = (1, 2**22)
_HEADS = (1, 2**16)
_RANKS = (1, 2**17)  # for each of more, process groups would be listed
_RANGES = {
    "num_layers": (1, 10_000),
    "num_experts": (0, 10_000),
    "hidden_size": _WIDTH,
    "ffn_hidden_size": _WIDTH,
    "moe_ffn_hidden_size": _WIDTH,
    "moe_shared_expert_intermediate_size": _WIDTH,
    "kv_channels": _WIDTH,
    "q_lora_rank": _WIDTH,
    "kv_lora_rank": _WIDTH,
    "qk_head_dim": _WIDTH,
    "qk_pos_emb_head_dim": _WIDTH,
    "v_head_dim": _WIDTH,
    "num_attention_heads": _HEADS,
    "num_query_groups": _HEADS,
    "seq_length": (1, 2**31),
    "vocab_size": (1, 2**31),
    "padded_vocab_size": (1, 2**31),
    "tensor_model_parallel_size": _RANKS,
    "pipeline_model_parallel_size": _RANKS,
    "expert_model_parallel_size": _RANKS,
    "expert_tensor_parallel_size": _RANKS,
    "context_parallel_size": _RANKS,
    "data_parallel_size": _RANKS,
    "world_size": _RANKS,
}
_MODULES = 50_000  # layers and experts of one rank: each takes some milliseconds


def check_sizes(sizes: Mapping[str, Any]) -> None:
    """Check sizes by Megatron's names; those that are None are not given.

    Raises:
        ValueError: for a size out of range, and for more modules on one rank than are described.
    """
    for name, (least, most) in _RANGES.items():
        size = sizes.get(name)
        if size is not None and not least <= size <= most:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {size} cannot be described: expected a number from {least:,} to {most:,}")
    layers = -(-(sizes.get("num_layers") or 1) // (sizes.get("pipeline_model_parallel_size") or 1))
    experts = (sizes.get("num_experts") or 0) // (sizes.get("expert_model_parallel_size") or 1)
    if layers * (1 + experts) > _MODULES:
        raise ValueError(
            f"--num-layers and --num-experts: a rank would have {layers:,} layers with {experts:,} experts each, and "
            f"{_MODULES:,} of both together are described at most: take a larger --expert-model-parallel-size or "
            f"--pipeline-model-parallel-size"
        )
