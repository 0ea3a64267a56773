"""QK-clip: after a step, the queries and keys of heads whose attention logits have grown too large are scaled down.

A head whose largest logit ``S`` of the step is above the threshold ``t`` gets ``c = t / S`` times the logits that it
would have had: the rows of its queries are multiplied by ``c^alpha``, and those of its keys by ``c^(1 - alpha)`` (Kimi
Team, Kimi K2, 2025, arXiv 2507.20534, section 2.1). Heads that share keys are scaled together, by their largest logit.
Of latent attention, where all heads share the part of the keys that has positions, the queries of that part get ``c``.
The momentum stays as it is.

Megatron-Core's own visits the layers of a decoder alone, fails on those without attention and on gated attention,
leaves biases as they are, and makes weights of a head whose largest logit is negative no numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_eopt.megatron import releases
from megatron_eopt.megatron.arguments import builds
from megatron_eopt.redirect import around
from megatron_eopt.registry import get_qkv_split_shapes

MAXIMA = "current_max_attn_logits"
"""Attribute of an attention's core: the largest logit of each of its heads here since it was None, 1-D."""

# Optimizers that keep weights in another form, from which they would come back unclipped.
_KEEPS_WEIGHTS = {
    "muon_hyperball": "keeps every matrix at the norm that it had at start",
    "spectron": "makes weights of factors that it keeps",
    "schedule_free_adamw": "makes weights of two points that it keeps",
}


def attentions(model_chunks: Sequence[nn.Module]) -> Iterator[Any]:
    """The attention modules whose core records the largest logits, in every kind of layer."""
    for module in (module for chunk in model_chunks for module in chunk.modules()):
        if hasattr(getattr(module, "core_attention", None), MAXIMA):
            yield module


def refuse_unclipped(model_chunks: Sequence[nn.Module], optimizers: frozenset[str], tensor_parallel: int) -> None:
    """Refuse, by a ``ValueError``, a model with ``--qk-clip`` that could not be clipped.

    ``optimizers`` are those of the run. All that is wrong is in one message.
    """
    wrong = [f"{name} {_KEEPS_WEIGHTS[name]}" for name in sorted(optimizers & _KEEPS_WEIGHTS.keys())]
    own = [(name, module) for chunk in model_chunks for name, module in chunk.named_modules()]
    own = [(name, module) for name, module in own if hasattr(module, "core_attention")]
    for name, module in own:
        core, config = module.core_attention, module.config
        if not hasattr(core, MAXIMA):
            wrong.append(f"{name}: {type(core).__name__} records no largest logits, as Transformer Engine's does")
        elif not (hasattr(module, "linear_qkv") or hasattr(module, "linear_kv_up_proj")):
            wrong.append(f"{name}: the queries and keys of {type(module).__name__} are not known")
        elif hasattr(module, "linear_qkv") and any(_normalizes(module, which) for which in ("q", "k")):
            wrong.append(f"{name}: queries or keys are normalized (--qk-layernorm), which undoes what scales them")
        elif config.num_query_groups < tensor_parallel and hasattr(module, "linear_qkv"):
            wrong.append(f"{name}: {config.num_query_groups} query groups are cut over {tensor_parallel} ranks")
        elif any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            wrong.append(f"{name}: its weights are shards of an FSDP")
    if wrong:
        more = f"\n(and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise ValueError("\n".join(["--qk-clip cannot work here; leave it away:", *wrong[:5]]) + more)


def _normalizes(module: Any, which: str) -> bool:
    norm = getattr(module, f"{which}_layernorm", None)
    return norm is not None and any(True for _ in norm.parameters())


@around
def clip(original: Callable[..., float], model: Sequence[nn.Module], log_max_only: bool = False) -> float:
    """Around Megatron's ``clip_qk``: scale weights, and return the largest logit of all heads here.

    Megatron calls it after every step, with the chunks of the model on this rank. Runs with adam and sgd keep its own.
    """
    if not builds(releases.training_args()):
        return original(model, log_max_only=log_max_only)
    largest = 0.0
    with torch.no_grad():
        for module in attentions(model):
            if (maxima := getattr(module.core_attention, MAXIMA)) is None:
                continue
            maxima = maxima.detach().clone()
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group(True))
            largest = max(largest, maxima.max().item())
            if not log_max_only:
                scale_heads(module, maxima, module.config.qk_clip_threshold, module.config.qk_clip_alpha)
            setattr(module.core_attention, MAXIMA, None)
    return largest


def scale_heads(module: Any, maxima: Tensor, threshold: float, alpha: float) -> None:
    """Scale the queries and keys of an attention's heads on this rank, whose largest logits are ``maxima`` (heads)."""
    config = module.config
    if hasattr(module, "linear_qkv"):
        groups = module.num_query_groups_per_partition
        c = _share(maxima.view(groups, -1).amax(1), threshold)
        queries, *gate, keys, values = get_qkv_split_shapes(config)
        parts = [(queries, c**alpha), *((rows, torch.ones_like(c)) for rows in gate)]
        _scale(module.linear_qkv, [*parts, (keys, c ** (1 - alpha)), (values, torch.ones_like(c))])
        return
    c = _share(maxima, threshold)
    projection = module.linear_q_proj if config.q_lora_rank is None else module.linear_q_up_proj
    _scale(projection, [(config.qk_head_dim, c**alpha), (config.qk_pos_emb_head_dim, c)])
    _scale(module.linear_kv_up_proj, [(config.qk_head_dim, c ** (1 - alpha)), (config.v_head_dim, torch.ones_like(c))])


def _share(maxima: Tensor, threshold: float) -> Tensor:
    """What logits are multiplied by: 1 where they are small enough, or negative."""
    above = maxima.float() > threshold
    return torch.where(above, threshold / torch.where(above, maxima.float(), 1.0), 1.0)


def _scale(linear: Any, parts: Sequence[tuple[int, Tensor]]) -> None:
    """Multiply rows of a linear layer's weight and bias: of each head or group so many by its factor, then the next."""
    factors = torch.cat([factor[:, None].expand(-1, rows) for rows, factor in parts], 1).flatten()
    if bool((factors == 1).all()):
        return
    for parameter in (linear.weight, getattr(linear, "bias", None)):
        for tensor in (parameter, getattr(parameter, "main_param", None)):
            if tensor is not None:
                own = factors.view(-1, *[1] * (tensor.ndim - 1))
                tensor.data.copy_(tensor.data.float() * own.to(tensor.device))
