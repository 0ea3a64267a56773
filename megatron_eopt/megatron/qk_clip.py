"""QK-clip: scale down queries and keys with too large logits.

A head whose largest logit ``S`` of the step is above the threshold ``t`` gets ``c = t / S`` times its logits: the rows
of its queries are multiplied by ``c^alpha``, and those of its keys by ``c^(1 - alpha)`` (Kimi Team, Kimi K2, 2025,
arXiv 2507.20534, section 2.1). Heads that share keys are scaled together, by their largest logit. In latent attention
all heads share the keys' positional part, so the queries of that part get ``c``. Momenta stay as they are; state that
copies or factorizes weights is scaled with them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.megatron.parameters import optimizer_parameters, optimizers_of
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.parameters import scale_rows
from megatron_eopt.redirect import around
from megatron_eopt.registry import get_qkv_split_shapes

FactorsOfRows = dict[Tensor, Tensor]  # parameter -> factors of its rows here, (rows,)
MAXIMA = "current_max_attn_logits"  # attribute of an attention's core: each head's largest logit here, (heads,)


def attentions(model_chunks: Sequence[nn.Module]) -> Iterator[Any]:
    """The attention modules whose core records its largest logits."""
    for module in (module for chunk in model_chunks for module in chunk.modules()):
        if hasattr(getattr(module, "core_attention", None), MAXIMA):
            yield module


def refuse_unclipped(model_chunks: Sequence[nn.Module], tensor_parallel: int) -> None:
    """Raise a ``ValueError`` that lists attentions which cannot be clipped."""
    wrong = []
    named = [x for chunk in model_chunks for x in chunk.named_modules() if hasattr(x[1], "core_attention")]
    for name, module in named:
        core = module.core_attention
        config = module.config
        norms = (getattr(module, f"{which}_layernorm", None) for which in ("q", "k"))
        normalized = any(list(norm.parameters()) for norm in norms if norm is not None)
        if not hasattr(core, MAXIMA):
            wrong.append(f"{name}: {type(core).__name__} records no largest logits, as Transformer Engine's does")
        elif not (hasattr(module, "linear_qkv") or hasattr(module, "linear_kv_up_proj")):
            wrong.append(f"{name}: the queries and keys of {type(module).__name__} are not known")
        elif hasattr(module, "linear_qkv") and normalized:
            wrong.append(f"{name}: queries or keys are normalized (--qk-layernorm), which undoes what scales them")
        elif config.num_query_groups < tensor_parallel and hasattr(module, "linear_qkv"):
            wrong.append(f"{name}: {config.num_query_groups} query groups are cut over {tensor_parallel} ranks")
        elif any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            wrong.append(f"{name}: its weights are shards of an FSDP")
    if wrong:
        more = f"\n(and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise ValueError("\n".join(["--qk-clip cannot work here; leave it away:", *wrong[:5]]) + more)


@around
def clip(original: Callable[..., float], model: Sequence[nn.Module], log_max_only: bool = False) -> float:
    """Replaces Megatron's ``clip_qk``; adam and sgd keep Megatron's."""
    optimizers = optimizers_of(model)
    if not optimizers:
        return original(model, log_max_only=log_max_only)
    modules = [module for module in attentions(model) if getattr(module.core_attention, MAXIMA) is not None]
    if not modules:
        return 0.0
    with torch.no_grad():
        of_modules = [getattr(module.core_attention, MAXIMA).detach().float() for module in modules]
        maxima = torch.cat(of_modules)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group(True))
        for module in modules:
            setattr(module.core_attention, MAXIMA, None)
        if not log_max_only:
            factors: FactorsOfRows = {}
            for module, own in zip(modules, maxima.split([len(each) for each in of_modules]), strict=True):
                factors |= factors_of_rows(module, own, module.config.qk_clip_threshold, module.config.qk_clip_alpha)
            scale(factors, optimizers, dealt=any(each.megatron_eopt.facts.layer_wise for each in optimizers))
    return max(0.0, maxima.max().item())


def factors_of_rows(module: Any, maxima: Tensor, threshold: float, alpha: float) -> FactorsOfRows:
    """Factors of query and key rows; ``maxima``: fp32, (heads,)."""
    config = module.config
    if hasattr(module, "linear_qkv"):
        c = _share(maxima.view(module.num_query_groups_per_partition, -1).amax(1), threshold)
        queries, *gate, keys, values = get_qkv_split_shapes(config)
        parts = [(queries, c**alpha), *((rows, torch.ones_like(c)) for rows in gate)]
        return _rows(module.linear_qkv, [*parts, (keys, c ** (1 - alpha)), (values, torch.ones_like(c))])
    c = _share(maxima, threshold)
    projection = module.linear_q_proj if config.q_lora_rank is None else module.linear_q_up_proj
    keys_and_values = [(config.qk_head_dim, c ** (1 - alpha)), (config.v_head_dim, torch.ones_like(c))]
    of_queries = [(config.qk_head_dim, c**alpha), (config.qk_pos_emb_head_dim, c)]
    return _rows(projection, of_queries) | _rows(module.linear_kv_up_proj, keys_and_values)


def _share(maxima: Tensor, threshold: float) -> Tensor:
    """Factor of the logits: 1 where small enough, or negative."""
    above = maxima > threshold
    return torch.where(above, threshold / torch.where(above, maxima, 1.0), 1.0)


def _rows(linear: Any, parts: Sequence[tuple[int, Tensor]]) -> FactorsOfRows:
    factors = torch.cat([factor[:, None].expand(-1, rows) for rows, factor in parts], 1).flatten()
    return {parameter: factors for parameter in (linear.weight, getattr(linear, "bias", None)) if parameter is not None}


def scale(factors: FactorsOfRows, optimizers: Sequence[Any], dealt: bool) -> None:
    """Multiply rows of parameters, and of their optimizer state.

    All tensor-parallel ranks call it together. A parameter in half precision is rounded from its fp32 copy; where
    parameters are ``dealt``, not all ranks have the copy, and each scales its own.
    """
    changed = torch.stack([(factor != 1).any() for factor in factors.values()]).int()
    dist.all_reduce(changed, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    factors = {p: factor for (p, factor), any_here in zip(factors.items(), changed.tolist(), strict=True) if any_here}
    kept: dict[Optimizer, list[tuple[Tensor, Tensor]]] = {}
    mains: dict[Tensor, Tensor] = {}
    for p in (p for optimizer in optimizers for p in optimizer_parameters(optimizer)):
        if p.model in factors:
            assert p.main is not None  # our optimizers get whole parameters only
            mains[p.model] = p.main
            kept.setdefault(p.optimizer, []).append((p.main, factors[p.model]))
    for optimizer, pairs in kept.items():
        if isinstance(optimizer, BaseOptimizer):
            optimizer.scale_rows([main for main, _ in pairs], [factor for _, factor in pairs])
        else:
            for main, factor in pairs:
                scale_rows(main, factor)
    for parameter, factor in factors.items():
        copy = mains.get(parameter)
        if copy is None or (dealt and copy is not parameter):
            scale_rows(parameter, factor)
        elif copy is not parameter:
            parameter.copy_(copy)
