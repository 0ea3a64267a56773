"""The manifest of an optimizer that Megatron has built: what it holds, not what it was asked to hold."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.manifest import Family, LogicalMatrix, ManifestRow, families, merged, rows
from megatron_eopt.manifest.checks import ADAMW_RMS
from megatron_eopt.megatron.entries import DEFAULT
from megatron_eopt.megatron.held import Held, held, owner_name
from megatron_eopt.megatron.overriding import Owned
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.parameters import GROUPS, DescribedMatrix
from megatron_eopt.overrides import ParameterInfo
from megatron_eopt.overrides.conditions import is_embedding
from megatron_eopt.parallel.layout import is_cut_again, is_expert, is_sharded

_TIED = {"output_layer.weight": "embedding.word_embeddings.weight"}
_RMS = {"adam": ADAMW_RMS, "soap": ADAMW_RMS, "schedule_free_adamw": ADAMW_RMS, "lion": 1.0, "signum": 1.0}
_FULL_TENSORS = {"adam": 2, "sgd": 1}
_SHOWN_ELSEWHERE = {"optimizer", "lr", "min_lr", "weight_decay", "exclude"}


@dataclass(frozen=True)
class Manifest:
    """What was collected.

    Attributes:
        families: of all ranks.
        matrices_here: how many logical matrices this rank has a part of.
        misplaced: parameters of all ranks that another optimizer holds than was asked for, a line each.
    """

    families: list[Family]
    matrices_here: int
    misplaced: list[str]


def collect(optimizer: Any, owned: Sequence[Owned], config: Any, pg_collection: Any) -> Manifest:
    """All trainable parameters of all ranks, each with the optimizer that holds it; all ranks call it together.

    Under a distributed optimizer a rank holds a part of the parameters only. One that no rank holds has no owner.

    Args:
        optimizer: Megatron's.
        owned: of this rank.
        config: Megatron's ``OptimizerConfig``.
        pg_collection: Megatron's process groups.

    Raises:
        ValueError: if ranks say different things of one parameter.
    """
    found, without = rows_here(held(optimizer), owned, config, pg_collection)
    asked = {each.described.info.name: each.owner for each in owned}
    misplaced = [
        f"{row.name} was given to {asked[row.name] or 'nobody'} ({row.reason}), and {row.optimizer} holds it"
        for row in found
        if row.optimizer != asked[row.name]
    ]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (families(found), families(without), misplaced))
    return Manifest(
        _together([each for each, _, _ in everywhere], [each for _, each, _ in everywhere]),
        sum(len(each.matrices) for each in found),
        sorted({line for _, _, lines in everywhere for line in lines}),
    )


def rows_here(
    holders: Iterable[Held], owned: Sequence[Owned], config: Any, pg_collection: Any, settled: bool = True
) -> tuple[list[ManifestRow], list[ManifestRow]]:
    """What is held on this rank, and what is in its part of the model and is not.

    Args:
        holders: the parameters that optimizers hold on this rank.
        owned: as for :func:`collect`.
        config: likewise.
        pg_collection: likewise.
        settled: whether other ranks are there to agree on plans.
    """
    of_parameter: dict[int, list[Held]] = {}
    for each in holders:
        of_parameter.setdefault(id(each.parameter), []).append(each)
    described = _described_matrices(
        {id(each.optimizer): each.optimizer for by in of_parameter.values() for each in by}, settled
    )
    groups = {name: getattr(pg_collection, name, None) for name in GROUPS}
    sizes = {name: group.size() for name, group in groups.items() if group is not None}

    def row(each: Owned, holder: Held | None) -> ManifestRow:
        matrices = [] if holder is None or holder.own is None else described.get(id(holder.own), [])
        return _row(each, holder, matrices, config, _layout(each.described.parameter, sizes))

    by = [(each, of_parameter.get(id(each.described.parameter), [])) for each in owned]
    found = [row(each, holder) for each, holders_of in by for holder in holders_of]
    return found, [row(each, None) for each, holders_of in by if not holders_of]


def _described_matrices(optimizers: Mapping[int, Optimizer], settled: bool) -> dict[int, list[DescribedMatrix]]:
    """What the optimizers say of the logical matrices of each parameter (by its id)."""
    return {
        id(parameter): matrices
        for optimizer in optimizers.values()
        if isinstance(optimizer, BaseOptimizer)
        for parameter, matrices in optimizer.described_matrices(settled).items()
    }


def _together(held_by_ranks: Sequence[list[Family]], without: Sequence[list[Family]]) -> list[Family]:
    """Those of all ranks: what one rank does not hold, another may."""
    found = merged(held_by_ranks)
    names = {row.name for row in rows(found)}
    return [*found, *families(row for row in rows(merged(without)) if row.name not in names)]


def _row(
    owned: Owned, holder: Held | None, matrices: Sequence[DescribedMatrix], config: Any, layout: str
) -> ManifestRow:
    parameter, info, resolved = owned.described.parameter, owned.described.info, owned.resolved
    sources = {key: place for key, place in resolved.sources.items() if not place.startswith(DEFAULT)}
    group = {} if holder is None else holder.group
    name = None if holder is None else owner_name(holder.optimizer)
    return ManifestRow(
        name=info.name,
        shape=info.shape,
        dtype=str(parameter.dtype).removeprefix("torch."),
        optimizer=name,
        reason=_reason(owned),
        layout=layout,
        matrices=tuple(LogicalMatrix(each.name, *each.shape, each.scheme, each.scale) for each in matrices),
        update_rms=_rms([each.rms for each in matrices], name),
        lr=group.get("max_lr", config.lr) or 0.0,
        min_lr=group.get("min_lr", config.min_lr) or 0.0,
        weight_decay=group.get("end_wd", config.weight_decay) * group.get("wd_mult", 1.0),
        settings={key: value for key, value in resolved.settings.items() if key in sources.keys() - _SHOWN_ELSEWHERE},
        sources=sources,
        overruled=tuple(f"{each.key} {each.value} by {each.source}" for each in resolved.overruled),
        state_bytes=_state_bytes(info, holder, name),
        tied_to=_TIED.get(info.name) if getattr(parameter, "shared_embedding", False) else None,
        excluded=owned.owner is None,
    )


def _reason(owned: Owned) -> str:
    if owned.owner is None:
        return f"excluded by {owned.resolved.sources['exclude']}"
    kind, source = _kind(owned.described.info), owned.resolved.sources.get("optimizer")
    if source is None:
        return kind
    return f"{kind}, by default" if source.startswith(DEFAULT) else f"{kind}: {source}"


def _kind(info: ParameterInfo) -> str:
    if is_embedding(info):
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


def _state_bytes(info: ParameterInfo, holder: Held | None, name: str | None) -> int:
    """Of the whole parameter's state."""
    if holder is None:
        return 0
    elements = prod(info.shape)
    optimizer, own = holder.optimizer, holder.own
    if not isinstance(optimizer, BaseOptimizer):
        return _FULL_TENSORS.get(name or "", 0) * elements * 4
    if own is None:  # shards of Lion's momentum, which is in fp32 there
        return elements * 4
    return sum(
        (elements if tensor.dims is None else prod(tensor.global_shape(optimizer.matrix_layouts(own))))
        * (tensor.dtype or own.dtype).itemsize
        for tensor in optimizer.state_tensors(own)
    )
