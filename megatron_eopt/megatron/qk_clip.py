"""QK-clip: scale down queries and keys with too large logits.

A head whose largest logit ``S`` of the step is above the threshold ``t`` gets ``c = t / S`` times its logits: the rows
of its queries are multiplied by ``c^alpha``, and those of its keys by ``c^(1 - alpha)`` (Kimi Team, Kimi K2, 2025,
arXiv 2507.20534, section 2.1). Heads that share keys are scaled together, by their largest logit. In latent attention
all heads share the keys' positional part, so the queries of that part get ``c``. Momenta stay as they are; state that
copies or factorizes weights is scaled with them.
"""

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.megatron.wrappers import optimizer_parameters, optimizers_of
from megatron_eopt.redirect import Original, around
from megatron_eopt.registry import get_qkv_split_shapes
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.parameters import scale_rows

FactorsOfRows = dict[Tensor, Tensor]  # parameter -> factors of its rows here, (rows,)
MAXIMA = "current_max_attn_logits"  # attribute of an attention's core: each head's largest logit here, (heads,)


def attentions(model_chunks: Sequence[nn.Module]) -> Iterator[Any]:
    """The attention modules whose core records its largest logits."""
    for chunk in model_chunks:
        for module in chunk.modules():
            if hasattr(getattr(module, "core_attention", None), MAXIMA):
                yield module


def refuse_unclipped(model_chunks: Sequence[nn.Module], tensor_parallel: int, biases_cut: bool = False) -> None:
    """Raise a ``ValueError`` that lists attentions which cannot be clipped.

    ``biases_cut``: Megatron's distributed optimizer has shards of what is no matrix.
    """
    wrong = []
    for chunk in model_chunks:
        for name, module in chunk.named_modules():
            if hasattr(module, "core_attention"):
                reason = _reason_against(module, tensor_parallel, biases_cut)
                if reason is not None:
                    wrong.append(f"{name}: {reason}")
    if wrong:
        more = f"\n(and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise ValueError("\n".join(["--qk-clip cannot work here; leave it away:", *wrong[:5]]) + more)


def _reason_against(module: Any, tensor_parallel: int, biases_cut: bool) -> str | None:
    core = module.core_attention
    if not hasattr(core, MAXIMA):
        return f"{type(core).__name__} records no largest logits, as Transformer Engine's does"
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return "its weights are shards of an FSDP"
    if hasattr(module, "linear_qkv"):
        for which in ("q", "k"):
            norm = getattr(module, f"{which}_layernorm", None)
            if norm is not None and list(norm.parameters()):
                return "queries or keys are normalized (--qk-layernorm), which undoes what scales them"
        if biases_cut and _bias_of(module.linear_qkv) is not None:
            return "its biases are cut by bytes, as they are not with --no-use-layer-wise-param-layout"
        groups = module.config.num_query_groups
        return f"{groups} query groups are cut over {tensor_parallel} ranks" if groups < tensor_parallel else None
    if not hasattr(module, "linear_kv_up_proj"):
        return f"the queries and keys of {type(module).__name__} are not known"
    return None


@around
def clip(original: Original, model: Sequence[nn.Module], log_max_only: bool = False) -> float:
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
        factors: FactorsOfRows = {}
        for module, own in zip(modules, maxima.split([len(each) for each in of_modules]), strict=True):
            setattr(module.core_attention, MAXIMA, None)
            if not log_max_only:
                factors |= factors_of_rows(module, own, module.config.qk_clip_threshold, module.config.qk_clip_alpha)
        if factors:
            scale(factors, optimizers, dealt=any(each.megatron_eopt.facts.layer_wise for each in optimizers))
    return max(0.0, maxima.max().item())


def factors_of_rows(module: Any, maxima: Tensor, threshold: float, alpha: float) -> FactorsOfRows:
    """Factors of query and key rows; ``maxima``: fp32, (heads,)."""
    config = module.config
    if hasattr(module, "linear_qkv"):
        of_groups = maxima.view(module.num_query_groups_per_partition, -1).amax(1)
        c = _factor_of_logits(of_groups, threshold)
        queries, *gate, keys, values = get_qkv_split_shapes(config)
        unscaled = [(rows, torch.ones_like(c)) for rows in gate]
        rows_of_group = [(queries, c**alpha), *unscaled, (keys, c ** (1 - alpha)), (values, torch.ones_like(c))]
        return _of_projection(module.linear_qkv, rows_of_group)
    c = _factor_of_logits(maxima, threshold)
    projection = module.linear_q_proj if config.q_lora_rank is None else module.linear_q_up_proj
    queries_of_head = [(config.qk_head_dim, c**alpha), (config.qk_pos_emb_head_dim, c)]
    keys_and_values_of_head = [(config.qk_head_dim, c ** (1 - alpha)), (config.v_head_dim, torch.ones_like(c))]
    factors = _of_projection(projection, queries_of_head)
    return factors | _of_projection(module.linear_kv_up_proj, keys_and_values_of_head)


def _factor_of_logits(maxima: Tensor, threshold: float) -> Tensor:
    """1 where they are small enough, or negative."""
    above = maxima > threshold
    return torch.where(above, threshold / torch.where(above, maxima, 1.0), 1.0)


def _bias_of(linear: Any) -> Tensor | None:
    """Its bias; where there is none, Transformer Engine has an empty tensor."""
    bias = getattr(linear, "bias", None)
    return None if bias is None or not len(bias) else bias


def _of_projection(linear: Any, rows_of_head: Sequence[tuple[int, Tensor]]) -> FactorsOfRows:
    """Factors of a weight and its bias, whose rows are those of one head after another.

    ``rows_of_head`` are numbers of rows that follow one another in each head, with their factor in every head.
    """
    expanded = [factor[:, None].expand(-1, rows) for rows, factor in rows_of_head]
    factors = torch.cat(expanded, 1).flatten()
    bias = _bias_of(linear)
    return {linear.weight: factors} if bias is None else {linear.weight: factors, bias: factors}


def scale(factors: FactorsOfRows, optimizers: Sequence[Any], dealt: bool) -> None:
    """Multiply rows of parameters, and of their optimizer state.

    All tensor-parallel ranks call it together. A parameter in half precision is rounded from its fp32 copy; where
    parameters are ``dealt``, not all ranks have the copy, and each scales its own.
    """
    changed = torch.stack([(factor != 1).any() for factor in factors.values()]).int()
    dist.all_reduce(changed, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    factors = dict(compress(factors.items(), changed.tolist()))
    mains: dict[Tensor, Tensor] = {}
    updated: dict[Optimizer, list[Tensor]] = {}  # optimizer -> the model's parameters
    for optimizer in optimizers:
        for each in optimizer_parameters(optimizer):
            if each.model in factors:
                assert each.main is not None  # of matrices, and of biases where refuse_unclipped lets them be
                mains[each.model] = each.main
                updated.setdefault(each.optimizer, []).append(each.model)
    for optimizer, parameters in updated.items():
        own = [mains[parameter] for parameter in parameters]
        of_rows = [factors[parameter] for parameter in parameters]
        if isinstance(optimizer, BaseOptimizer):
            optimizer.scale_rows(own, of_rows)
        else:
            for main, factor in zip(own, of_rows, strict=True):
                scale_rows(main, factor)
    for parameter, factor in factors.items():
        copy = mains.get(parameter)
        if copy is None or (dealt and copy is not parameter):
            scale_rows(parameter, factor)
        elif copy is not parameter:
            parameter.copy_(copy)
