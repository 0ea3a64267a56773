"""The optimizers of a described run, on the meta device: state and plans."""

from collections.abc import Sequence
from inspect import unwrap
from math import prod
from typing import Any

import megatron.core.optimizer as core_optimizer
from torch import Tensor

from megatron_eopt.megatron.assignment import assignments
from megatron_eopt.megatron.dealing import balances, items_of
from megatron_eopt.megatron.factory import OptimizerOfRun
from megatron_eopt.megatron.fused import tag
from megatron_eopt.megatron.manifest import FULL_TENSORS, rows_here
from megatron_eopt.megatron.overrides import Overrides, all_entries
from megatron_eopt.megatron.releases import lays_out_containers
from megatron_eopt.megatron.wrappers import OptimizerParameter, optimizer_parameters
from megatron_eopt.parallel.attributes import is_expert
from megatron_eopt.parallel.deal import deal, snake_order
from megatron_eopt.registry import name_of
from megatron_eopt.routing import ManifestRow
from megatron_eopt.screen import megabytes
from megatron_eopt.settings.of_class import settings_of
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.parameters import local
from megatron_eopt.step.state import expected_shape


def planned_stage(run: OptimizerOfRun, overrides: Overrides) -> tuple[list[ManifestRow], str]:
    """Make a rank's optimizers as the run would; their parameters, state and plans.

    Overrides that select nothing here pass: they may be for another stage, or for experts of another rank.
    """
    run.describe()
    entries = all_entries(run.config, overrides)
    run.assigned = assignments(run.parameters, run.config, entries, [1] * len(entries))
    matrices, of_groups = run.check()
    tag(matrices)
    built = _build(run, of_groups)
    rows = rows_here(built, run.assigned, run.config, run.groups, settled=False)
    others = _dealt_to_others(built, run)
    here = [each for each in built if each.main not in others]
    plans = _plans(here)
    state = megabytes(_state_bytes(here))
    return rows, "\n\n".join([f"State, with fp32 copies of parameters: {state} MB.", *plans])


def _build(run: OptimizerOfRun, overrides: dict[Any, Any]) -> list[OptimizerParameter]:
    """Let Megatron build the optimizer of all data-parallel ranks together."""
    builder = unwrap(core_optimizer._get_megatron_emerging_optimizer)  # Megatron's own, behind ours
    run.build(lambda config, given: builder(config, run.model_chunks, given, pg_collection=run.groups), overrides)
    return list(optimizer_parameters(run.optimizer))


def _dealt_to_others(built: Sequence[OptimizerParameter], run: OptimizerOfRun) -> set[Tensor]:
    """Parameters that a layer-wise optimizer deals to other data-parallel ranks."""
    others = set[Tensor]()
    if not run.facts.layer_wise:
        return others
    items, works = items_of(list(dict.fromkeys(each.optimizer for each in built)))
    laid_out = run.facts.args.use_layer_wise_param_layout and lays_out_containers(run.facts.release)
    for group, of_experts in ((run.groups.dp_cp, False), (run.groups.expt_dp, True)):
        dealt = [parameter for parameter in items if is_expert(parameter) == of_experts]
        ranks: Sequence[int] = snake_order([parameter.numel() for parameter in dealt], group.size())
        if balances(run.config, run.facts.args) and not laid_out:
            ranks = deal([items[parameter] for parameter in dealt], ranks, group.size(), works).ranks
        others.update(parameter for parameter, rank in zip(dealt, ranks, strict=True) if rank != group.rank())
    return others


def _state_bytes(here: Sequence[OptimizerParameter]) -> int:
    """Bytes of this rank, of parameters dealt to it."""
    found = 0
    for each in here:
        entries = local(each.model).numel()
        if each.model.element_size() < 4:
            found += 4 * entries
        if not isinstance(each.optimizer, BaseOptimizer):  # others make their state in the first step
            found += 4 * entries * FULL_TENSORS.get(name_of(each.optimizer), 0)
            continue
        assert each.main is not None, "a plan has no shards of buffers"
        for tensor in each.optimizer.state_tensors(each.main):
            shape = expected_shape(each.main, tensor, each.optimizer.matrix_layouts).on_this_rank
            found += prod(shape) * (tensor.dtype or each.main.dtype).itemsize
    return found


def _plans(here: Sequence[OptimizerParameter]) -> list[str]:
    """The plan of each optimizer, which is left with the parameters of this rank."""
    texts = []
    mains = {each.main for each in here}
    for optimizer in dict.fromkeys(each.optimizer for each in here):
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in mains]
        if isinstance(optimizer, BaseOptimizer):
            name = type(optimizer).__name__
            if "tp_mode" in settings_of(type(optimizer)):
                name += f", tp_mode {optimizer.tp_mode}"
            texts.append(f"{name}\n{optimizer.plan()}")
    return texts
