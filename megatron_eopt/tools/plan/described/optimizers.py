"""The optimizers of a described run, on the meta device."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.megatron import releases
from megatron_eopt.megatron.assignment import Assignment, assignments, group_settings, matches
from megatron_eopt.megatron.dealing import balances, items_of
from megatron_eopt.megatron.entries import all_entries
from megatron_eopt.megatron.factory import OptimizerOfRun
from megatron_eopt.megatron.fused import tag
from megatron_eopt.megatron.manifest import rows_here
from megatron_eopt.megatron.parameters import ModelParameter, mark, tag_as_megatron, trainable
from megatron_eopt.megatron.support.rules import refuse_unsupported
from megatron_eopt.megatron.wrappers import OptimizerParameter
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.parameters import local
from megatron_eopt.parallel.cost import plan_cost, step_bytes
from megatron_eopt.parallel.deal import OF_ENTRY, deal, to_and_fro
from megatron_eopt.registry import EMERGING_OPTIMIZERS, create_emerging_optimizer
from megatron_eopt.routing import ManifestRow
from megatron_eopt.tools.plan.described.model import DescribedRun, Memory, PlannedStage

_OTHERS: dict[str, type[Optimizer]] = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}


def refuse_unmatched(run: DescribedRun, stages: Sequence[PlannedStage]) -> None:
    """Refuse overrides that select nothing in any stage; ``run`` is of one."""
    entries = all_entries(run.optimizer_config, run.config_overrides)
    counts = [sum(each) for each in zip(*(stage.matches for stage in stages), strict=True)]
    assignments(_of_ranks(run)[0], run.optimizer_config, entries, counts)


def planned_stage(run: DescribedRun) -> PlannedStage:
    """Make a stage's optimizers as the run would; plan them.

    Each override is taken to select something in one of the stages. Experts of other ranks are those of the first with
    other numbers, and so are their rows, where overrides say the same of them.
    """
    if run.args.optimizer in _OTHERS:
        raise ValueError(
            f"--optimizer {run.args.optimizer} is built by Megatron alone (adam where there is no --optimizer), and "
            f"there is no plan: take an optimizer of this package, such as muon"
        )
    planned = OptimizerOfRun(run.optimizer_config, run.model_chunks, run.pg_collection)
    refuse_unsupported(planned.facts)
    config = planned.config
    entries = all_entries(config, run.config_overrides)
    counts = [0] * len(entries)
    known: dict[str, list[tuple[int, ManifestRow]]] = {}  # what overrides say of experts -> rows, by number
    rows: list[list[ManifestRow]] = []
    builds: list[tuple[list[Assignment], list[OptimizerParameter]]] = []
    for parameters in _of_ranks(run):
        mark(parameters)
        counts = list(map(add, counts, matches(parameters, config, entries)))
        assigned = assignments(parameters, config, entries, [1] * len(entries))
        experts = [each for each in assigned if _is_of_one_rank(each.parameter.tensor)]
        overrides = repr([(each.optimizer, each.resolved) for each in experts])
        if overrides in known:
            rows.append([replace(row, name=experts[number].name) for number, row in known[overrides]])
            continue
        built = _built(planned, run, assigned)
        builds.append((assigned, built))
        here = rows_here(built, assigned, config, run.pg_collection, settled=False)
        rows.append(here)
        number_of = {each.name: number for number, each in enumerate(experts)}
        known[overrides] = [(number_of[row.name], row) for row in here if row.name in number_of]
    assigned, built = builds[0]
    deals = _deals(built, planned, run)
    explained, uncounted, operations, temporaries = _step(built, planned, deals)
    return PlannedStage(
        matches=counts,
        rows=rows,
        explained=explained,
        operations=operations,
        uncounted=uncounted,
        scale_mode=config.muon_scale_mode,
        memory=_memory(run, assigned, built, rows[0], deals.rank_of, temporaries),
    )


def _of_ranks(run: DescribedRun) -> list[list[ModelParameter]]:
    """Parameters of each rank of expert parallelism, the shared ones once."""
    groups = run.pg_collection
    tag_as_megatron(run.model_chunks, groups)
    first = trainable(run.model_chunks, groups)
    of_ranks = [first]
    for rank in range(1, groups.ep.size()):
        ahead = rank * (run.args.num_experts // groups.ep.size())
        renamed = []
        for parameter in first:
            if _is_of_one_rank(parameter.tensor):
                start, expert, end = re.split(r"(?<=\.local_experts\.)(\d+)", parameter.name)
                info = replace(parameter.info, name=f"{start}{int(expert) + ahead}{end}")
                renamed.append(replace(parameter, info=info))
        of_ranks.append(renamed)
    return of_ranks


def _is_of_one_rank(parameter: Tensor) -> bool:
    """Whether other ranks of expert parallelism have other parameters in its place."""
    return not getattr(parameter, "allreduce", True)


def _built(planned: OptimizerOfRun, run: DescribedRun, assigned: list[Assignment]) -> list[OptimizerParameter]:
    """Optimizers of the assigned parameters, with main copies as in the run."""
    config = planned.config
    planned.assigned = assigned
    tag(planned.check()[0])
    members_of: dict[str, list[Assignment]] = {}
    for each in assigned:
        if each.optimizer is not None:
            members_of.setdefault(each.optimizer, []).append(each)
    built = []
    for name, members in members_of.items():
        groups = []
        for each in members:
            tensor = each.parameter.tensor
            main = torch.nn.Parameter(torch.empty_like(tensor, dtype=torch.float32 if config.bf16 else tensor.dtype))
            main.__dict__.update(tensor.__dict__)
            groups.append({"params": [main], **group_settings(each, config)})
        if name in EMERGING_OPTIMIZERS:
            optimizer, _ = create_emerging_optimizer(config, groups, name, run.model_chunks, run.pg_collection)
        else:
            optimizer = _OTHERS[name](groups, lr=0.0)  # type: ignore[call-arg]
        for each, group in zip(members, optimizer.param_groups, strict=True):
            built.append(OptimizerParameter(each.parameter.tensor, optimizer, group, group["params"][0]))
    return built


def _step(
    built: Sequence[OptimizerParameter], planned: OptimizerOfRun, deals: "_Deals"
) -> tuple[list[str], set[str], float, int]:
    """Plans and deals, classes without a plan, operations, and bytes of temporaries, of the busiest rank."""
    explained = []
    uncounted = set[str]()
    operations = 0.0
    temporaries = 0
    for optimizer in dict.fromkeys(each.optimizer for each in built):
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter not in deals.of_others]
            operations += OF_ENTRY * sum(parameter.numel() for parameter in group["params"])
        if not isinstance(optimizer, BaseOptimizer):
            continue
        engine = optimizer.engine_to_explain()
        if engine is None:
            uncounted.add(type(optimizer).__name__)
        else:
            mode = planned.config.muon_tp_mode
            explained.append(f"{type(optimizer).__name__}, tp_mode {mode}\n{engine.explain()}")
            operations += plan_cost(engine.plan, engine.works).flops
            temporaries = max(temporaries, step_bytes(engine.plan, engine.works, engine.workspace))
    if explained:
        explained += deals.texts
    return explained, uncounted, operations, temporaries


def _memory(
    run: DescribedRun,
    assigned: Sequence[Assignment],
    built: Sequence[OptimizerParameter],
    rows: Sequence[ManifestRow],
    rank_of: dict[Tensor, int],
    temporaries: int,
) -> Memory:
    """What the fullest rank holds, where whole parameters are dealt to ranks, as by ``rank_of``."""
    args = run.args
    parameters = 0
    gradients = 0
    for chunk in run.model_chunks:
        for parameter in map(local, chunk.parameters()):
            parameters += parameter.nbytes
            if parameter.requires_grad:
                in_fp32 = args.accumulate_allreduce_grads_in_fp32
                gradients += parameter.numel() * (4 if in_fp32 else parameter.element_size())

    shared = args.use_distributed_optimizer or getattr(args, "use_layer_wise_distributed_optimizer", False)
    state_of = {row.name: row.state_bytes for row in rows}
    dealt = {each.model: rank_of[each.main] for each in built if each.main in rank_of}
    everywhere = 0.0
    of_ranks = {True: Counter[int](), False: Counter[int]()}  # of dense parameters, and of experts
    for each in assigned:
        tensor = each.parameter.tensor
        entries = local(tensor).numel()
        dense = not _is_of_one_rank(tensor)
        state = state_of.get(each.name, 0) * entries / max(1, prod(each.parameter.info.shape))
        if tensor.element_size() < 4:
            state += 4 * entries
        if tensor in dealt:
            of_ranks[dense][dealt[tensor]] += round(state)
        elif shared:
            ranks = run.pg_collection.dp_cp if dense else run.pg_collection.expt_dp
            everywhere += state / ranks.size()
        else:
            everywhere += state
    fullest = sum(max(counts.values(), default=0) for counts in of_ranks.values())
    return Memory(parameters, gradients, round(everywhere) + fullest, temporaries)


class _Deals(NamedTuple):
    """Which data-parallel rank each whole parameter is dealt to."""

    texts: list[str]  # what each deal gains
    rank_of: dict[Tensor, int]  # of those that are dealt
    of_others: set[Tensor]  # those of all but the busiest rank


def _deals(built: Sequence[OptimizerParameter], planned: OptimizerOfRun, run: DescribedRun) -> _Deals:
    """The deals of dense parameters and of experts."""
    deals = _Deals([], {}, set())
    if not planned.facts.layer_wise:
        return deals
    whole = releases.distributed_optimizer(planned.facts.release).get("whole_matrices", False)
    by_operations = balances(planned.config, run.args) and not (whole and run.args.use_layer_wise_param_layout)
    items, works = items_of(list(dict.fromkeys(each.optimizer for each in built)))
    for group, experts in ((run.pg_collection.dp_cp, False), (run.pg_collection.expt_dp, True)):
        parameters = [parameter for parameter in items if _is_of_one_rank(parameter) == experts]
        ranks = group.size()
        if ranks == 1 or not parameters:
            continue
        by_size = to_and_fro([parameter.numel() for parameter in parameters], ranks)
        dealt = deal([items[parameter] for parameter in parameters], by_size, ranks, works)
        if by_operations:
            text = f"{dealt}."
            operations = dealt.operations
            rank_of = dict(zip(parameters, dealt.ranks, strict=True))
        else:
            text = (
                f"{len(parameters)} parameters dealt to {ranks} data-parallel ranks by size, as with "
                "--no-balanced-deal, --ckpt-format torch and Megatron's layout of buffers."
            )
            operations = dealt.by_size
            rank_of = dict(zip(parameters, by_size, strict=True))
        busiest = operations.index(max(operations))
        deals.texts.append(text)
        deals.rank_of.update(rank_of)
        deals.of_others.update(parameter for parameter in parameters if rank_of[parameter] != busiest)
    return deals
