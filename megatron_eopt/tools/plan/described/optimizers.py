"""The optimizers of a described run, on the meta device."""

from collections.abc import Sequence
from math import prod
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.megatron.assignment import Assignment, assignments, group_settings, matches
from megatron_eopt.megatron.dealing import balances, items_of
from megatron_eopt.megatron.entries import all_entries
from megatron_eopt.megatron.factory import OptimizerOfRun
from megatron_eopt.megatron.fused import tag
from megatron_eopt.megatron.manifest import rows_here
from megatron_eopt.megatron.support.rules import refuse_unsupported
from megatron_eopt.megatron.wrappers import OptimizerParameter
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.parameters import local
from megatron_eopt.parallel.attributes import is_expert
from megatron_eopt.parallel.deal import deal, to_and_fro
from megatron_eopt.registry import EMERGING_OPTIMIZERS, create_emerging_optimizer
from megatron_eopt.routing import ManifestRow
from megatron_eopt.screen import megabytes
from megatron_eopt.tools.plan.described.model import DescribedRun

_OTHERS: dict[str, type[Optimizer]] = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}


class PlannedStage(NamedTuple):
    """What the first rank of a pipeline stage would do."""

    matches: list[int]  # how many parameters each override selects, up to this stage
    rows: list[ManifestRow]
    scale_mode: str
    text: str  # its state, and its plans


def planned_stage(run: DescribedRun, before: Sequence[int] = (), refuse_unmatched: bool = False) -> PlannedStage:
    """Make a rank's optimizers as the run would; plan them.

    ``before`` are the matches of earlier stages. An override that selects nothing in any of them is refused on request.
    """
    if run.args.optimizer in _OTHERS:
        raise ValueError(
            f"--optimizer {run.args.optimizer} is built by Megatron alone (adam where there is no --optimizer), and "
            f"there is no plan: take an optimizer of this package, such as muon"
        )
    planned = OptimizerOfRun(run.optimizer_config, run.model_chunks, run.pg_collection)
    refuse_unsupported(planned.facts)
    planned.describe()
    config = planned.config
    entries = all_entries(config, run.config_overrides)
    counts = matches(planned.parameters, config, entries)
    if before:
        counts = list(map(add, counts, before))
    known = counts if refuse_unmatched else [1] * len(entries)
    planned.assigned = assignments(planned.parameters, config, entries, known)
    tag(planned.check()[0])
    built = _built(planned, run)
    rows = rows_here(built, planned.assigned, config, run.pg_collection, settled=False)
    others = _dealt_to_others(built, planned, run)
    here = [each for each in built if each.main not in others]
    state = _state_bytes(here, rows, planned, run)
    texts = [f"State, with fp32 copies of parameters: {megabytes(state)} MB.", *_plans(here, config.muon_tp_mode)]
    return PlannedStage(counts, rows, config.muon_scale_mode, "\n\n".join(texts))


def _built(planned: OptimizerOfRun, run: DescribedRun) -> list[OptimizerParameter]:
    """Optimizers of the assigned parameters, with main copies as in the run."""
    config = planned.config
    members_of: dict[str, list[Assignment]] = {}
    for each in planned.assigned:
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


def _dealt_to_others(built: Sequence[OptimizerParameter], planned: OptimizerOfRun, run: DescribedRun) -> set[Tensor]:
    """Parameters that a layer-wise optimizer deals to other data-parallel ranks."""
    others = set[Tensor]()
    if not planned.facts.layer_wise:
        return others
    items, works = items_of(list(dict.fromkeys(each.optimizer for each in built)))
    by_buffers = getattr(run.args, "use_layer_wise_param_layout", False)
    for group, of_experts in ((run.pg_collection.dp_cp, False), (run.pg_collection.expt_dp, True)):
        dealt = [parameter for parameter in items if is_expert(parameter) == of_experts]
        if not dealt:
            continue
        ranks: Sequence[int] = to_and_fro([parameter.numel() for parameter in dealt], group.size())
        if balances(planned.config, run.args) and not by_buffers:
            ranks = deal([items[parameter] for parameter in dealt], ranks, group.size(), works).ranks
        others.update(parameter for parameter, rank in zip(dealt, ranks, strict=True) if rank != group.rank())
    return others


def _state_bytes(
    here: Sequence[OptimizerParameter], rows: Sequence[ManifestRow], planned: OptimizerOfRun, run: DescribedRun
) -> float:
    """Bytes of this rank; Megatron's distributed optimizer cuts them evenly."""
    row_of = {row.name: row for row in rows}
    name_of = {each.parameter.tensor: each.name for each in planned.assigned}
    cut = run.args.use_distributed_optimizer and not planned.facts.layer_wise
    found = 0.0
    for each in here:
        row = row_of[name_of[each.model]]
        entries = local(each.model).numel()
        state = row.state_bytes * entries / max(1, prod(row.shape))
        if each.model.element_size() < 4:
            state += 4 * entries
        ranks = run.pg_collection.expt_dp if is_expert(each.model) else run.pg_collection.dp_cp
        found += state / ranks.size() if cut else state
    return found


def _plans(here: Sequence[OptimizerParameter], tp_mode: str) -> list[str]:
    """The plan of each optimizer, which is left with the parameters of this rank."""
    texts = []
    mains = {each.main for each in here}
    for optimizer in dict.fromkeys(each.optimizer for each in here):
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in mains]
        if not isinstance(optimizer, BaseOptimizer):
            continue
        name = type(optimizer).__name__
        engine = optimizer.engine_to_explain()
        if engine is None:
            texts.append(f"{name}: there is no plan, and its work and temporaries are not counted.")
        else:
            texts.append(f"{name}, tp_mode {tp_mode}\n{engine.explain()}")
    return texts
