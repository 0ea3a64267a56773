"""Deal whole parameters to data-parallel ranks, by operations."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.megatron.consensus import log_rank0
from megatron_eopt.megatron.wrappers import torch_optimizers
from megatron_eopt.parallel.cost import Work
from megatron_eopt.parallel.deal import Item, deal
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.redirect import Original, Redirection, Redirections, around
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.parameters import parameters_in

HANDS = (("dp_cp_params_list", "dp_cp"), ("expt_dp_params_list", "expt_dp"))  # of each rank, and the ranks


def dealt_by_operations(config: Any, args: Any) -> Redirections:
    """Redirections that make Megatron's layer-wise optimizer deal by operations."""

    @around
    def shard_params(original: Original, self: Any, optimizers: Sequence[Optimizer], *layouts: Any) -> None:
        if any(layouts):
            original(self, optimizers, *layouts)
            return
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        whole = [list(group["params"]) for group in groups]
        items, works = items_of(optimizers)
        original(self, optimizers, *layouts)
        kept = set(parameters_in(groups))
        for name, ranks in HANDS:
            by_size = getattr(self, name)
            if by_size:
                rank = getattr(self.pg_collection, ranks).rank()
                hands = _by_operations(by_size, whole, items, works)
                setattr(self, name, hands)
                kept = kept.difference(*by_size).union(hands[rank])
        for group, params in zip(groups, whole, strict=True):
            group["params"] = [parameter for parameter in params if parameter in kept]

    reason = "in fp32 it takes what wraps a torch optimizer, and Megatron's builder wraps none"
    changes = [Redirection(LayerWiseDistributedOptimizer, "__init__", wrapped_in_fp32, reason)]
    if balances(config, args):
        reason = "whole parameters are dealt to data-parallel ranks by operations, not by size"
        changes.append(Redirection(LayerWiseDistributedOptimizer, "shard_params", shard_params, reason))
    return Redirections(changes)


def _by_operations(
    by_size: Sequence[Sequence[Tensor]],
    in_order: Sequence[Sequence[Tensor]],
    items: Mapping[Tensor, Item],
    works: Mapping[str, Work],
) -> list[list[Tensor]]:
    """What each rank gets by operations, in place of what it gets by size."""
    rank_of = {}
    for rank, hand in enumerate(by_size):
        for parameter in hand:
            rank_of[parameter] = rank
    parameters = [parameter for params in in_order for parameter in params if parameter in rank_of]
    dealt = deal([items[p] for p in parameters], [rank_of[p] for p in parameters], len(by_size), works)
    log_rank0(str(dealt))
    hands: list[list[Tensor]] = [[] for _ in by_size]
    for parameter, rank in zip(parameters, dealt.ranks, strict=True):
        hands[rank].append(parameter)
    return hands


@around
def wrapped_in_fp32(
    make: Original,
    self: Any,
    optimizers: Sequence[Any],
    config: Any,
    *args: Any,
    init_state_fn_list: Any,
    **kwargs: Any,
) -> None:
    """Wraps torch optimizers also in fp32 for Megatron's layer-wise one."""
    if not config.bf16:
        wrapped: list[Any] = []
        for optimizer, init_state in zip(optimizers, init_state_fn_list, strict=True):
            is_bare = isinstance(optimizer, Optimizer)
            wrapped.append(FP32Optimizer(optimizer, config, init_state) if is_bare else optimizer)
        optimizers = wrapped
    make(self, optimizers, config, *args, init_state_fn_list=init_state_fn_list, **kwargs)


def balances(config: Any, args: Any) -> bool:
    """Whether parameters are to be dealt by operations."""
    # files of the torch format do not name their parameters: dealt otherwise, others would take their state
    return getattr(config, "balanced_deal", True) and getattr(args, "ckpt_format", None) != "torch"


def items_of(optimizers: Sequence[Optimizer]) -> tuple[dict[Tensor, Item], dict[str, Work]]:
    """Items to deal, of optimizers with all parameters, and iterations."""
    items: dict[Tensor, Item] = {}
    works: dict[str, Work] = {}
    for outer in optimizers:
        for optimizer in torch_optimizers(outer):
            parameters = parameters_in(optimizer.param_groups)
            matrices: list[tuple[Matrix, ...]] = [()] * len(parameters)
            if isinstance(optimizer, BaseOptimizer):
                engine = optimizer.proposed()
                if engine.works:
                    works |= engine.works
                    in_a_row = iter(engine.plan.matrices)  # as they are on all ranks, in any mode
                    matrices = [tuple(islice(in_a_row, len(of_parameter))) for of_parameter in engine.matrices]
            for parameter, of_parameter in zip(parameters, matrices, strict=True):
                items[parameter] = Item(of_parameter, parameter.numel())
    return items, works
