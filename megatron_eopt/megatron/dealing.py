"""Deal whole parameters to data-parallel ranks, by predicted time."""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.megatron.agreement import say
from megatron_eopt.megatron.parameters import torch_optimizers
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.lent import Team
from megatron_eopt.optimizers.orthogonalized import OF_PARAMETERS
from megatron_eopt.optimizers.parameters import NAME
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.parallel.collectives import joint_group, lowest
from megatron_eopt.parallel.cost import Work
from megatron_eopt.parallel.deal import Deal, Item, deal
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.records import Matrix, TpMode
from megatron_eopt.parallel.teams import GPUS_OF_NODE, MODES, run_length, team_sizes
from megatron_eopt.redirect import Redirection, Redirections, around

DENSE = "dp_cp"  # whose matrices teams may work on; experts are many and small
UNKNOWN_NODE = "LOCAL_WORLD_SIZE does not say how many ranks every node has; --matrix-ranks can"
HANDS = (("dp_cp_params_list", DENSE), ("expt_dp_params_list", "expt_dp"))  # of each rank, and the ranks


def dealt_by_time(config: Any, args: Any, mode: TpMode, layer_wise: bool) -> Redirections:
    """Redirections that make Megatron's layer-wise optimizer deal by time; all ranks call it."""
    by_time = layer_wise and balances(config, args)
    # where nothing else says it, as many as may work on a matrix are on one node
    node = (ranks_of_node() or most_of_team(config) or 0) if by_time else 0

    @around
    def shard_params(original: Any, self: Any, optimizers: Sequence[Optimizer], *layouts: Any) -> None:
        if any(layouts):
            original(self, optimizers, *layouts)
            return
        groups = [group for each in optimizers for group in each.param_groups]
        whole = [list(group["params"]) for group in groups]
        items, works = items_of(optimizers, mode, "" if node else UNKNOWN_NODE)
        inner = [each for outer in optimizers for each in torch_optimizers(outer)]
        optimizer_of = {p: each for each in inner for group in each.param_groups for p in group["params"]}
        original(self, optimizers, *layouts)
        kept = {parameter for group in groups for parameter in group["params"]}
        for name, ranks in HANDS:
            if not (by_size := getattr(self, name)):
                continue
            rank_of = {parameter: rank for rank, hand in enumerate(by_size) for parameter in hand}
            parameters = [parameter for params in whole for parameter in params if parameter in rank_of]
            ranks_of, of_all = getattr(self.pg_collection, ranks), [items[p] for p in parameters]
            members = dist.get_process_group_ranks(ranks_of)
            teams = sizes_of_teams(config, members, node or GPUS_OF_NODE) if ranks == DENSE else []
            dealt = deal(of_all, [rank_of[p] for p in parameters], len(by_size), works, mode, teams=teams)
            hands: list[list[Tensor]] = [[] for _ in by_size]
            for parameter, rank in zip(parameters, dealt.ranks, strict=True):
                hands[rank].append(parameter)
            setattr(self, name, hands)
            kept = kept.difference(*by_size).union(hands[ranks_of.rank()])
            say(str(dealt))
            form_team(optimizer_of, parameters, dealt, ranks_of)
        for group, params in zip(groups, whole, strict=True):
            group["params"] = [parameter for parameter in params if parameter in kept]

    reason = "in fp32 it takes what wraps a torch optimizer, and Megatron's builder wraps none"
    changes = [Redirection(LayerWiseDistributedOptimizer, "__init__", wrapped_in_fp32, reason)]
    if by_time:
        reason = "whole parameters are dealt to data-parallel ranks by predicted time, not by size"
        changes.append(Redirection(LayerWiseDistributedOptimizer, "shard_params", shard_params, reason))
    return Redirections(changes)


def dealt_parameters(optimizer: Any) -> Iterator[tuple[Any, int, Tensor]]:
    """Ranks, owner and parameter, in one order on all ranks."""
    for name, ranks in HANDS:
        for owner, hand in enumerate(getattr(optimizer, name, None) or ()):
            for parameter in hand:
                yield getattr(optimizer.pg_collection, ranks), owner, parameter


def share_dealt(optimizer: Any) -> None:
    """Let all ranks have what the owners of dealt parameters have."""
    for group, owner, parameter in dealt_parameters(optimizer):
        dist.broadcast(parameter.detach(), dist.get_global_rank(group, owner), group)


@around
def wrapped_in_fp32(
    make: Any, self: Any, optimizers: Sequence[Any], config: Any, *args: Any, init_state_fn_list: Any, **kwargs: Any
) -> None:
    """Wraps torch optimizers also in fp32 for Megatron's layer-wise one."""
    if not config.bf16:
        pairs = zip(optimizers, init_state_fn_list, strict=True)
        optimizers = [FP32Optimizer(o, config, init) if isinstance(o, Optimizer) else o for o, init in pairs]
    make(self, optimizers, config, *args, init_state_fn_list=init_state_fn_list, **kwargs)


def balances(config: Any, args: Any) -> bool:
    """Whether parameters are to be dealt by predicted time."""
    # files of the torch format do not name their parameters: dealt otherwise, others would take their state
    return getattr(config, "balanced_deal", True) and getattr(args, "ckpt_format", None) != "torch"


def items_of(
    optimizers: Sequence[Optimizer], mode: TpMode, against: str = ""
) -> tuple[dict[Tensor, Item], dict[str, Work]]:
    """Items to deal, of optimizers with all parameters, and iterations; ``against`` is a reason against teams."""
    items: dict[Tensor, Item] = {}
    works: dict[str, Work] = {}
    for optimizer in (inner for outer in optimizers for inner in torch_optimizers(outer)):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kept, matrices = against, list[tuple[Matrix, ...]]([()] * len(parameters))
        if isinstance(optimizer, BaseOptimizer) and (engine := optimizer.proposed()).works:
            flat, works = iter(engine.plan.matrices), works | engine.works  # as they are on all ranks, in any mode
            matrices = [tuple(islice(flat, len(parts))) for parts in engine.matrices]
            kept = kept or reason_against_teams(optimizer, engine, mode)
        items |= {p: Item(parts, p.numel(), kept) for p, parts in zip(parameters, matrices, strict=True)}
    return items, works


# Teams, which orthogonalize a matrix of one rank together.


def ranks_of_node() -> int:
    """Ranks of each node, as torchrun says on all; 0 where it does not, or nodes differ."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "0")
    here = int(said) if said.isdecimal() else -1
    least, most = lowest(torch.tensor([here, -here]), dist.group.WORLD).tolist()  # type: ignore[arg-type]
    if least < 0:
        raise ValueError(f"LOCAL_WORLD_SIZE is no number of ranks on some rank (here it is {said!r}): torchrun sets it")
    return int(least) if least == -most else 0


def most_of_team(config: Any) -> int | None:
    """Most ranks that may work on one matrix; None for all of a node."""
    most: int | None = getattr(config, "matrix_ranks", None)
    if most is not None and most < 1:
        raise ValueError(f"--matrix-ranks must be at least 1, with which no matrix is shared, got {most}")
    return most


def check_team(config: Any, args: Any, layer_wise: bool) -> None:
    """Refuse ``--matrix-ranks`` that are none; warn of those without effect."""
    most = most_of_team(config)
    if most is not None and most > 1 and not (layer_wise and balances(config, args)):
        say(
            "warning: --matrix-ranks without effect: ranks share matrices that --use-distributed-optimizer deals by "
            "predicted time, which --no-balanced-deal and --ckpt-format torch forbid"
        )


def sizes_of_teams(config: Any, ranks: Sequence[int], of_node: int) -> list[int]:
    """Sizes that teams of a group's ranks may have; none with ``--matrix-ranks 1``.

    ``ranks`` are global, of consecutive nodes of ``of_node``.
    """
    most = most_of_team(config)
    return team_sizes(run_length(ranks, of_node), of_node if most is None else most)


def reason_against_teams(optimizer: BaseOptimizer, engine: Engine, mode: TpMode) -> str:
    """Why no team may orthogonalize the matrices of an optimizer; empty if one may."""
    if not isinstance(optimizer, TensorParallelMuon):
        return f"{type(optimizer).__name__} does more with a matrix than to orthogonalize it"
    reasons = {
        "some matrices are cut, or shared by ranks": bool(engine.groups),
        f"tp_mode is {mode}, not {' or '.join(MODES)}": mode not in MODES,
        "CUDA graphs capture the step": optimizer.cuda_graphs,
        "state is in host memory": optimizer.offload_fraction > 0,
        "a function of yours takes the step": bool(optimizer._of_user(*OF_PARAMETERS, "_take", "_run")),
        "init_process_group was given a device_id": getattr(dist.group.WORLD, "bound_device_id", None) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def form_team(optimizer_of: Mapping[Tensor, Any], parameters: Sequence[Tensor], dealt: Deal, group: Any) -> None:
    """Tell optimizers which parameters this rank's team works on; all ranks call it."""
    rank, ranks = group.rank(), dist.get_process_group_ranks(group)
    lent, first = [parameters[i] for i in dealt.of_team(rank)], rank - rank % dealt.team
    members = tuple(ranks[first : first + dealt.team])
    for optimizer in dict.fromkeys(optimizer_of[p] for p in lent):
        here = [p for p in lent if optimizer_of[p] is optimizer]
        names = frozenset(getattr(p, NAME) for p in here)
        optimizer._session.team = Team(joint_group((members,), members), names, here[0].device)
