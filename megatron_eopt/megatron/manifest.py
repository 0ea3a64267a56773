"""The manifest of an optimizer that Megatron has built: who updates every parameter, whoever it was assigned to."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_eopt.family import FAMILY
from megatron_eopt.manifest import (
    Family,
    LogicalMatrix,
    ManifestRow,
    families,
    merged,
    problems,
    rows,
    table,
    to_json,
    warnings,
)
from megatron_eopt.megatron.agreement import gathered
from megatron_eopt.megatron.assignment import Assignment
from megatron_eopt.megatron.entries import DEFAULT
from megatron_eopt.megatron.parameters import OptimizerParameter, optimizer_name, optimizer_parameters
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.parameters import GROUPS, DescribedMatrix
from megatron_eopt.overrides import ParameterInfo
from megatron_eopt.parallel.layout import is_cut_again, is_expert, is_sharded
from megatron_eopt.registry import takes_matrices
from megatron_eopt.row import ADAMW_RMS

_TIED = {"output_layer.weight": "embedding.word_embeddings.weight"}
_RMS = {"adam": ADAMW_RMS} | {row.name: row.update_rms for row in FAMILY}
_FULL_TENSORS = {"adam": 2, "sgd": 1}
_SHOWN_ELSEWHERE = {"optimizer", "lr", "min_lr", "weight_decay", "exclude"}


@dataclass(frozen=True)
class Manifest:
    """What was collected.

    Attributes:
        families: of all ranks.
        matrices_here: how many logical matrices this rank has a shard of.
        misplaced: parameters of all ranks that another optimizer updates than they were assigned to, a line each.
    """

    families: list[Family]
    matrices_here: int
    misplaced: list[str]


def collect(optimizer: Any, assigned: Sequence[Assignment], config: Any, pg_collection: Any) -> Manifest:
    """All trainable parameters of all ranks, each with the optimizer that updates it; all ranks call it together.

    Under a distributed optimizer a rank updates some of its parameters only.

    Raises:
        ValueError: if ranks say different things of one parameter.
    """
    here = rows_here(optimizer_parameters(optimizer), assigned, config, pg_collection)
    found = [row for row in here if row.optimizer is not None]
    wanted = {each.name: each.optimizer for each in assigned}
    misplaced = [
        f"{row.name} was given to {wanted[row.name] or 'nobody'} ({row.reason}), and {row.optimizer} has it"
        for row in found
        if row.optimizer != wanted[row.name]
    ]
    everywhere = gathered((families(found), families(here[len(found) :]), misplaced))
    updated = merged([each for each, _, _ in everywhere])
    names = {row.name for row in rows(updated)}
    # what one rank does not update, another may
    missing = families(row for row in rows(merged([each for _, each, _ in everywhere])) if row.name not in names)
    return Manifest(
        [*updated, *missing],
        sum(len(each.matrices) for each in found),
        sorted({line for _, _, lines in everywhere for line in lines}),
    )


def declare(manifest: Manifest, name: str, config: Any) -> None:
    """Check a manifest; print and write it on rank 0, as the config says.

    Raises:
        ValueError: for all that a run must not start with, on every rank.
    """
    found = manifest.families
    wrong = [*problems(found, name, takes_matrices(name)), *manifest.misplaced]
    if wrong:
        raise ValueError("\n".join(["the optimizers do not have the parameters that they have to:", *wrong]))
    if dist.get_rank() != 0:
        return
    form = getattr(config, "optimizer_manifest", "short")
    if form != "none":
        print(
            f"megatron_eopt: the optimizer of every trainable parameter\n{table(found, full=form == 'full')}",
            flush=True,
        )
    for each in warnings(found, config.muon_scale_mode):
        print(f"megatron_eopt: warning: {each}", flush=True)
    file = getattr(config, "optimizer_manifest_file", None)
    if file is not None:
        Path(file).write_text(json.dumps(to_json(found), indent=1) + "\n")


def rows_here(
    updated: Iterable[OptimizerParameter],
    assigned: Sequence[Assignment],
    config: Any,
    pg_collection: Any,
    settled: bool = True,
) -> list[ManifestRow]:
    """The parameters that optimizers of this rank update; after them those of its model chunks that none does.

    Args:
        updated: the parameters as the optimizers have them.
        assigned: those of this rank.
        config: Megatron's ``OptimizerConfig``.
        pg_collection: Megatron's process groups.
        settled: whether other ranks are there to agree on plans.
    """
    updates: dict[int, list[OptimizerParameter]] = {}
    for one in updated:
        updates.setdefault(id(one.model), []).append(one)
    described = {
        id(parameter): matrices
        for optimizer in dict.fromkeys(one.optimizer for same in updates.values() for one in same)
        if isinstance(optimizer, BaseOptimizer)
        for parameter, matrices in optimizer.described_matrices(settled).items()
    }
    groups = {name: getattr(pg_collection, name, None) for name in GROUPS}
    sizes = {name: group.size() for name, group in groups.items() if group is not None}
    found, without = [], []
    for each in assigned:
        layout = _layout(each.parameter.tensor, sizes)
        same = updates.get(id(each.parameter.tensor), [])
        found += [_row(each, one, described.get(id(one.main), []), config, layout) for one in same]
        if not same:
            without.append(_row(each, None, [], config, layout))
    return found + without


def _row(
    assigned: Assignment,
    updated: OptimizerParameter | None,
    matrices: Sequence[DescribedMatrix],
    config: Any,
    layout: str,
) -> ManifestRow:
    parameter, info, resolved = assigned.parameter.tensor, assigned.parameter.info, assigned.resolved
    sources = {key: source for key, source in resolved.sources.items() if assigned.user_source(key)}
    group = {} if updated is None else updated.group
    name = None if updated is None else optimizer_name(updated.optimizer)
    return ManifestRow(
        name=info.name,
        shape=info.shape,
        dtype=str(parameter.dtype).removeprefix("torch."),
        optimizer=name,
        reason=_reason(assigned),
        layout=layout,
        matrices=tuple(LogicalMatrix(each.name, *each.shape, each.scheme, each.scale) for each in matrices),
        update_rms=_rms([each.rms for each in matrices], name),
        lr=group.get("max_lr", config.lr) or 0.0,
        min_lr=group.get("min_lr", config.min_lr) or 0.0,
        weight_decay=group.get("end_wd", config.weight_decay) * group.get("wd_mult", 1.0),
        settings={key: value for key, value in assigned.settings.items() if key in sources.keys() - _SHOWN_ELSEWHERE},
        sources=sources,
        overruled=tuple(f"{each.key} {each.value} by {each.source}" for each in resolved.overruled),
        state_bytes=_state_bytes(info, updated, name),
        tied_to=_TIED.get(info.name) if getattr(parameter, "shared_embedding", False) else None,
        excluded=assigned.optimizer is None,
    )


def _reason(assigned: Assignment) -> str:
    sources = assigned.resolved.sources
    if assigned.optimizer is None:
        return f"excluded by {sources['exclude']}"
    kind, source = _kind(assigned.parameter.info), sources.get("optimizer")
    if source is None:
        return kind
    return f"{kind}, by default" if source.startswith(DEFAULT) else f"{kind}: {source}"


def _kind(info: ParameterInfo) -> str:
    if info.is_embedding:
        return "embedding or output"
    return {0: "scalar", 1: "vector", 2: "matrix"}.get(len(info.shape), "stack of matrices")


def _layout(parameter: Tensor, sizes: Mapping[str, int]) -> str:
    prefix = "expt_" if is_expert(parameter) else ""
    found = []
    if is_sharded(parameter):
        dim = parameter.partition_dim - parameter.ndim  # type: ignore[attr-defined]
        found.append(("columns" if dim == -1 and parameter.ndim > 1 else "rows", f"{prefix}tp"))
    if is_cut_again(parameter):
        found.append(("rows", f"{prefix}gtp_remat"))
    cuts = [f"{what} over {name} {sizes[name]}" for what, name in found if sizes.get(name, 1) > 1]
    return ", ".join(cuts) or "whole"


def _rms(of_matrices: Sequence[float | None], name: str | None) -> float | None:
    """The largest of the logical matrices, which have one each; of what has none, that of its optimizer."""
    known = [size for size in of_matrices if size is not None]
    return max(known) if known else _RMS.get(name or "")


def _state_bytes(info: ParameterInfo, updated: OptimizerParameter | None, name: str | None) -> int:
    """Of the whole parameter's state."""
    if updated is None:
        return 0
    elements = prod(info.shape)
    optimizer, main = updated.optimizer, updated.main
    if not isinstance(optimizer, BaseOptimizer):
        return _FULL_TENSORS.get(name or "", 0) * elements * 4
    if main is None:  # shards of Lion's momentum, which is in fp32 there
        return elements * 4
    return sum(
        (elements if tensor.dims is None else prod(tensor.global_shape(optimizer.matrix_layouts(main))))
        * (tensor.dtype or main.dtype).itemsize
        for tensor in optimizer.state_tensors(main)
    )
