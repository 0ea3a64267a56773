"""The manifest of Megatron's optimizer: what updates every parameter."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import Optimizer

from megatron_eopt.family import ADAMW_RMS, OPTIMIZERS
from megatron_eopt.matrices import warn_of_unmatched
from megatron_eopt.megatron.assignment import Assignment
from megatron_eopt.megatron.consensus import distinct, log_rank0
from megatron_eopt.megatron.overrides import DEFAULT
from megatron_eopt.megatron.support.facts import primary_of
from megatron_eopt.megatron.wrappers import OptimizerParameter, optimizer_parameters
from megatron_eopt.parallel.attributes import is_expert, is_sharded
from megatron_eopt.parallel.dtensor import tells_its_chunk
from megatron_eopt.registry import name_of, takes_matrices
from megatron_eopt.routing import (
    ManifestRow,
    ParameterInfo,
    ParamPattern,
    families,
    merged,
    problems,
    rows,
    table,
    warnings,
    write_json,
)
from megatron_eopt.routing.patterns import LogicalMatrix
from megatron_eopt.settings.presets import preset_line
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.parameters import GROUPS, DescribedMatrix

_TIED = {"output_layer.weight": "embedding.word_embeddings.weight"}
_RMS = {"adam": ADAMW_RMS} | {row.name: row.update_rms for row in OPTIMIZERS.values()}
FULL_TENSORS = {"adam": 2, "sgd": 1}  # in fp32, of each parameter
_SHOWN_ELSEWHERE = {"optimizer", "lr", "min_lr", "weight_decay", "exclude"}


def build_manifest(
    optimizer: Any, assigned: Sequence[Assignment], config: Any, groups: Any
) -> tuple[list[ParamPattern], int]:
    """Collect, check and print the manifest; all ranks together.

    Returned are the patterns of all ranks, and this rank's number of logical matrices. A ValueError is on all ranks.
    """
    updated = list(optimizer_parameters(optimizer))
    here = rows_here(updated, assigned, config, groups, settled=True)
    found = [row for row in here if row.optimizer is not None]
    of_ranks = distinct((families(found), _misplaced(found, assigned)))
    everywhere = merged(of_rank for of_rank, _ in of_ranks)
    names = {row.name for row in rows(everywhere)}
    # what one rank does not update, another may; with a distributed optimizer that is nearly all of what it has
    left = [row for row in here if row.optimizer is None and row.name not in names]
    everywhere += merged(distinct(families(left)))
    name = primary_of(config)
    wrong = problems(everywhere, name, takes_matrices(name))
    wrong += sorted({line for _, misplaced in of_ranks for line in misplaced})
    if wrong:
        raise ValueError("\n".join(["parameters are with the wrong optimizer:", *wrong]))
    warn_of_unmatched(sorted(names))
    if dist.get_rank() == 0:
        _report(everywhere, config)
    return everywhere, sum(len(row.matrices) for row in found)


def _misplaced(found: Iterable[ManifestRow], assigned: Iterable[Assignment]) -> list[str]:
    """Errors of parameters that another optimizer has than was assigned."""
    wanted = {each.name: each.optimizer or "nobody" for each in assigned}
    lines = []
    for row in found:
        if row.optimizer != wanted[row.name]:
            lines.append(f"{row.name} was given to {wanted[row.name]} ({row.reason}), and {row.optimizer} has it")
    return lines


def _report(families: list[ParamPattern], config: Any) -> None:
    preset = getattr(config, "muon_preset", None)
    if preset is not None:
        log_rank0(preset_line(preset, primary_of(config)))
    form = getattr(config, "optimizer_manifest", "short")
    if form != "none":
        listed = table(families, full=form == "full")
        log_rank0(f"the optimizer of every trainable parameter\n{listed}")
    for warning in warnings(families, config.muon_scale_mode):
        log_rank0(f"warning: {warning}")
    file = getattr(config, "optimizer_manifest_file", None)
    if file is not None:
        write_json(families, file)


def rows_here(
    updated: Iterable[OptimizerParameter], assigned: Sequence[Assignment], config: Any, groups: Any, settled: bool
) -> list[ManifestRow]:
    """Parameters that this rank updates, then those it does not."""
    updates: dict[int, list[OptimizerParameter]] = {}
    described: dict[Optimizer, dict[Tensor, list[DescribedMatrix]]] = {}
    for one in updated:
        updates.setdefault(id(one.model), []).append(one)
        if isinstance(one.optimizer, BaseOptimizer) and one.optimizer not in described:
            described[one.optimizer] = one.optimizer.described_matrices(settled)
    sizes = {}
    for name in (*GROUPS, "dp_cp"):
        group = getattr(groups, name, None)
        if group is not None:
            sizes[name] = group.size()
    found = []
    for each in assigned:
        layout = _layout(each.parameter.tensor, sizes)
        for own in updates.get(id(each.parameter.tensor), [None]):
            matrices = []
            if own is not None and own.main is not None:
                matrices = described.get(own.optimizer, {}).get(own.main, [])
            found.append(_row(each, own, matrices, config, layout))
    return sorted(found, key=lambda row: row.optimizer is None)


def _row(
    assigned: Assignment, updated: OptimizerParameter | None, matrices: list[DescribedMatrix], config: Any, layout: str
) -> ManifestRow:
    parameter = assigned.parameter.tensor
    info = assigned.parameter.info
    sources = {key: source for key, source in assigned.resolved.sources.items() if assigned.user_source(key)}
    overruled = [f"{each.key} {each.value} by {each.source}" for each in assigned.resolved.overruled]
    group = {}
    name = None
    state_bytes = 0
    if updated is not None:
        group = updated.group
        name = name_of(updated.optimizer)
        state_bytes = _state_bytes(info, updated, name)
    sizes = [each.rms for each in matrices if each.rms is not None]
    rate = group.get("max_lr", config.lr) or 0.0
    lowest = group.get("min_lr", config.min_lr) or 0.0
    if getattr(config, "lr_decay_style", None) == "constant":  # Megatron's other schedules end at min_lr
        source = sources.pop("min_lr", None)
        if source is not None:
            overruled.append(f"min_lr {lowest:g} by {source}, as the schedule is constant")
        lowest = rate
    return ManifestRow(
        name=info.name,
        shape=info.shape,
        dtype=str(parameter.dtype).removeprefix("torch."),
        optimizer=name,
        reason=_reason(assigned),
        layout=layout,
        matrices=tuple(LogicalMatrix(each.name, *each.shape, each.scheme, each.scale) for each in matrices),
        update_rms=max(sizes) if sizes else _RMS.get(name or ""),
        lr=rate,
        min_lr=lowest,
        weight_decay=group.get("end_wd", config.weight_decay) * group.get("wd_mult", 1.0),
        settings={key: value for key, value in assigned.settings.items() if key in sources.keys() - _SHOWN_ELSEWHERE},
        sources=sources,
        overruled=tuple(overruled),
        state_bytes=state_bytes,
        tied_to=_TIED.get(info.name) if getattr(parameter, "shared_embedding", False) else None,
        excluded=assigned.optimizer is None,
    )


def _reason(assigned: Assignment) -> str:
    info = assigned.parameter.info
    sources = assigned.resolved.sources
    if assigned.optimizer is None:
        return f"excluded by {sources['exclude']}"
    kind = {0: "scalar", 1: "vector", 2: "matrix"}.get(len(info.shape), "stack of matrices")
    if info.is_embedding:
        kind = "embedding or output"
    source = sources.get("optimizer")
    if source is None:
        return kind
    return f"{kind}, by default" if source.startswith(DEFAULT) else f"{kind}: {source}"


def _layout(parameter: Tensor, sizes: Mapping[str, int]) -> str:
    """Along what, and over which ranks, a parameter is cut; ``sizes`` of groups by name."""
    if isinstance(parameter, DTensor) and tells_its_chunk(parameter):  # Megatron-FSDP's, over all axes
        return _cuts_of_mesh(parameter) or "whole"
    prefix = "expt_" if is_expert(parameter) else ""
    cuts = []
    if is_sharded(parameter):
        dim = parameter.partition_dim - parameter.ndim  # type: ignore[attr-defined]
        cuts.append(("columns" if dim == -1 and parameter.ndim > 1 else "rows", f"{prefix}tp"))
    if isinstance(parameter, DTensor):  # torch FSDP2's
        cuts.append(("rows", "dp_cp"))
    listed = [f"{what} over {name} {sizes[name]}" for what, name in cuts if sizes.get(name, 1) > 1]
    return ", ".join(listed) or "whole"


def _cuts_of_mesh(parameter: DTensor) -> str:
    mesh = parameter.device_mesh
    cuts = []
    for placement, name, size in zip(parameter.placements, mesh.mesh_dim_names or (), mesh.shape, strict=True):
        if size > 1 and isinstance(placement, Shard):
            cuts.append(f"{'columns' if placement.dim else 'rows'} over {name}")
    return ", ".join(cuts)


def _state_bytes(info: ParameterInfo, updated: OptimizerParameter, name: str) -> int:
    elements = prod(info.shape)
    optimizer = updated.optimizer
    main = updated.main
    if not isinstance(optimizer, BaseOptimizer):
        return FULL_TENSORS.get(name, 0) * elements * 4
    if main is None:  # shards of Lion's momentum, which is in fp32 there
        return elements * 4
    total = 0
    for tensor in optimizer.state_tensors(main):
        entries = elements if tensor.dims is None else prod(tensor.global_shape(optimizer.matrix_layouts(main)))
        total += entries * (tensor.dtype or main.dtype).itemsize
    return total
