"""Optimizer state of Megatron-FSDP in ``fsdp_dtensor`` checkpoints.

Megatron's own way knows Adam's state only, lacks that of parameters of which a rank holds no entries, and lets what a
checkpoint lacks keep its value. Here each rank describes its chunk of every tensor, and what is missing is an error.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW
from torch.optim.optimizer import Optimizer

from megatron_eopt.checkpoints.contents import CheckpointError, read_layout
from megatron_eopt.checkpoints.states import BLOCK, BLOCK_FORMAT, StateDict
from megatron_eopt.matrices import WHOLE, Split
from megatron_eopt.megatron.checkpoints.changes import report_changes, report_converted, report_settings
from megatron_eopt.megatron.checkpoints.group_settings import groups_after_load, saved_settings
from megatron_eopt.megatron.checkpoints.integrity import resumed
from megatron_eopt.megatron.checkpoints.refusals import OF_ANOTHER, other_states, taken_for_its_own, too_new
from megatron_eopt.megatron.checkpoints.shards import along, sides_of
from megatron_eopt.megatron.consensus import from_rank_0, union
from megatron_eopt.megatron.fused import in_shards
from megatron_eopt.megatron.model_parameters import ModelParameter
from megatron_eopt.megatron.wrappers import torch_optimizers
from megatron_eopt.parallel.dtensor import layout_of_dtensor
from megatron_eopt.parallel.layout import split_layout
from megatron_eopt.redirect import Original, around
from megatron_eopt.registry import list_optimizers
from megatron_eopt.routing import to_json
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.parameters import local
from megatron_eopt.step.state import SIDES, Dim, StateTensor

_TO_LOAD = ""  # what a checkpoint fills in


class SavedShards:
    """Saves and loads optimizer state of a Megatron-FSDP run."""

    def __init__(self, optimizer: Any, run: Any) -> None:
        self._megatron = optimizer
        self._run = run
        self._optimizers: list[Optimizer] = list(torch_optimizers(optimizer))
        self._splits = {each.tensor: _split_of(each) for each in run.parameters}
        optimizer.sharded_state_dict = self.sharded_state_dict
        optimizer.load_state_dict = self.load_state_dict

    def sharded_state_dict(self, model: Any, is_loading: bool = False, **kwargs: Any) -> StateDict:
        """State and settings by parameters; the settings are empty where to be loaded."""
        self._megatron.init_state_fn(self._megatron.optimizer, self._megatron.config)
        state: dict[str, dict[str, Tensor]] = {}
        settings: dict[str, str] = {}  # in JSON, which torch's checkpoints do not take apart
        for optimizer in self._optimizers:
            if isinstance(optimizer, Adam | AdamW):
                for values in optimizer.state.values():
                    values.setdefault("step", torch.zeros(()))  # which Megatron leaves to the first step
            for group in optimizer.param_groups:
                written = _TO_LOAD if is_loading else json.dumps([type(optimizer).__name__, saved_settings(group)])
                for parameter in group["params"]:
                    name = self._megatron._param_name(parameter)
                    settings[name] = written
                    for suffix, key, x in self._saved(optimizer, parameter):
                        state.setdefault(f"{name}{suffix}", {})[key] = x
        ours = [each for each in self._optimizers if isinstance(each, BaseOptimizer)]
        run = {
            "format": BLOCK_FORMAT,
            "manifest": to_json(self._run.families),
            "settings": {type(each).__name__: each.settings() for each in ours},
        }
        return {"state": state, "settings": settings, BLOCK: {"run": _TO_LOAD if is_loading else json.dumps(run)}}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Go on with the loaded state; all ranks together."""
        run = json.loads(state_dict[BLOCK]["run"])
        _refuse(too_new(run["format"]))
        report_changes(run["manifest"], self._run.families)
        written = state_dict["settings"]
        for problem in union(self._problems(written)):
            _refuse(problem)
        for optimizer in self._optimizers:
            if isinstance(optimizer, BaseOptimizer):
                name = type(optimizer).__name__
                report_settings(name, run["settings"][name], optimizer.settings())
            of_groups = []
            for group in optimizer.param_groups:
                different = {written[self._megatron._param_name(parameter)]: None for parameter in group["params"]}
                of_groups.append([json.loads(each)[1] for each in different])
            groups = groups_after_load(optimizer, of_groups)
            optimizer.load_state_dict(optimizer.state_dict() | {"param_groups": groups})

    def _problems(self, written: dict[str, str]) -> Iterator[str]:
        for optimizer in self._optimizers:
            ours = type(optimizer).__name__
            for parameter in optimizer.state:
                name = self._megatron._param_name(parameter)
                wrote, _ = json.loads(written[name])
                if wrote != ours:
                    yield taken_for_its_own(wrote, name, ours)

    def _saved(self, optimizer: Optimizer, parameter: Tensor) -> Iterator[tuple[str, str, Tensor]]:
        """Views of a parameter's state as saved: suffix of the name, key, view."""
        described = {}
        if isinstance(optimizer, BaseOptimizer):
            described = {tensor.key: tensor for tensor in optimizer.state_tensors(parameter)}
        for key, data in optimizer.state[parameter].items():
            if not isinstance(data, DTensor):
                yield "", key, data
                continue
            tensor = described.get(key, StateTensor(key))
            for suffix, view in self._views(optimizer, parameter, tensor, data):
                yield suffix, key, view

    def _views(
        self, optimizer: Any, parameter: Any, tensor: StateTensor, data: DTensor
    ) -> Iterator[tuple[str, DTensor]]:
        layout = layout_of_dtensor(parameter)
        split = self._splits[parameter]
        dims: tuple[Dim, ...] = SIDES[: data.ndim]
        if tensor.dims is not None:
            dims = tensor.dims
            layouts = optimizer.matrix_layouts(parameter)
            if len(layouts) > 1:
                split = WHOLE
                layout = layouts[tensor.matrix]
        if "rows" not in dims:
            split = WHOLE
        parts = split_layout(layout, split)
        views = [local(data)]
        if not split.is_whole:  # the order of the rows depends on the number of shards
            views = list(local(data).split([part.rectangle.shape[0] for part in parts]))
        for name, part, view in zip(split.names(layout.shape[0]), parts, views, strict=True):
            extents = along(dims, sides_of(part))
            shape = [extent.length for extent in extents]
            start = [extent.start for extent in extents]
            yield f"[{name}]" if name else "", with_chunk(view, data, shape, start)


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise CheckpointError(f"the checkpoint cannot serve this run: {problem}")


def with_chunk(shard: Tensor, like: DTensor, shape: Sequence[int], start: Sequence[int]) -> DTensor:
    """A DTensor of global ``shape`` with a shard at ``start`` here."""
    stride = torch.empty(*shape, device="meta").stride()
    mesh = like.device_mesh
    whole = DTensor.from_local(shard, mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride)
    held: Any = whole._local_tensor
    chunk = metadata.ChunkStorageMetadata(offsets=torch.Size(start), sizes=held.shape)

    def write_items(name: str, x: DTensor) -> list[WriteItem]:
        if not held.numel():
            return []
        data = TensorWriteData(chunk, metadata.TensorProperties.create_from_tensor(held), x.size())
        return [WriteItem(metadata.MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    held.__create_chunk_list__ = lambda: [chunk]
    held.__create_write_items__ = write_items
    return whole


def _split_of(parameter: ModelParameter) -> Split:
    if parameter.tensor.ndim < 2:  # a bias, whose rows are those of its weight
        parameter = replace(parameter, tensor=torch.empty(1, 1))
    return in_shards(parameter) or WHOLE


class _Model:
    """A model whose parameters are found without wrappers' prefixes."""

    def __init__(self, model: Any) -> None:
        while hasattr(model, "module"):
            model = model.module
        self._model = model
        self.config = model.config
        self.named_modules = model.named_modules

    def get_parameter(self, name: str) -> Tensor:
        return self._model.get_parameter(re.sub(r"^(module\.)+", "", name))


@around
def prepared(prepare: Original, args: Any, state_dict: StateDict, model: Any) -> Any:
    """Replaces ``preprocess_fsdp_dtensor_state_dict``, which knows Adam's state only."""
    if args.optimizer not in list_optimizers():
        return prepare(args, state_dict, model)
    rest = dict(state_dict)
    ours = rest.pop("optimizer", None)
    if ours is not None and ours[BLOCK]["run"] == _TO_LOAD:
        _refuse_missing(args, ours["state"])
    result = prepare(args, rest, _Model(model))
    return result if ours is None else result | {"optimizer": ours}


def _refuse_missing(args: Any, wanted: dict[str, dict[str, Tensor]]) -> None:
    """Refuse a checkpoint without some state; all ranks together. Say which is converted."""
    stored = from_rank_0(lambda: _stored_dtypes(Path(args.load), getattr(args, "ckpt_step", None)))
    held: dict[str, list[str]] = {}
    for full_key in sorted(stored):
        name, _, key = full_key.rpartition(".")
        held.setdefault(name, []).append(key)
    lacking = []
    dtypes = []
    for name, state in wanted.items():
        has = held.get(f"optimizer.state.{name}", [])
        if not state.keys() <= set(has):
            lacking.append(other_states(name, has, "this run", state, OF_ANOTHER))
            continue
        for key, x in state.items():
            dtypes.append((key, stored[f"optimizer.state.{name}.{key}"], x.dtype))
    for problem in union(lacking):
        _refuse(problem)
    report_converted(dtypes)


def _stored_dtypes(folder: Path, step: int | None) -> dict[str, torch.dtype]:
    """Dtypes of the tensors that Megatron will load, by key."""
    path = resumed(folder, step)
    assert path is not None, "Megatron loads it"
    return {key: tensor.dtype for key, tensor in read_layout(path).tensors.items()}
