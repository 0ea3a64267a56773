"""Optimizer state of Megatron-FSDP in ``fsdp_dtensor`` checkpoints.

Megatron's own way knows Adam's state only, lacks that of parameters of which a rank holds no entries, and lets what a
checkpoint lacks keep its value. Here each rank describes its chunk of every tensor, and what is missing is an error.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW
from torch.optim.optimizer import Optimizer

from megatron_eopt.checkpoints.contents import CheckpointError
from megatron_eopt.checkpoints.states import BLOCK
from megatron_eopt.matrices import WHOLE, Split
from megatron_eopt.megatron.agreement import from_rank_0, union
from megatron_eopt.megatron.checkpoints.loading import FORMAT, FRESH, report_changes, report_converted, too_new
from megatron_eopt.megatron.checkpoints.matching import settings_of_group
from megatron_eopt.megatron.checkpoints.whole import resumed
from megatron_eopt.megatron.fused import fused
from megatron_eopt.megatron.parameters import ModelParameter, torch_optimizers
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.parameters import local
from megatron_eopt.optimizers.state import NO_SETTINGS, SIDES, Dim, StateTensor
from megatron_eopt.parallel.dtensor import layout_of_dtensor
from megatron_eopt.parallel.layout import split_layout
from megatron_eopt.redirect import around
from megatron_eopt.registry import list_optimizers
from megatron_eopt.routing import to_json

_TO_LOAD = ""  # what a checkpoint fills in


class SavedShards:
    """Saves and loads optimizer state of a Megatron-FSDP run."""

    def __init__(self, optimizer: Any, run: Any) -> None:
        self._megatron = optimizer
        self._run = run
        self._optimizers: list[Optimizer] = list(torch_optimizers(optimizer))
        self._splits = {each.tensor: in_shards(each) for each in run.parameters}
        optimizer.sharded_state_dict = self.sharded_state_dict
        optimizer.load_state_dict = self.load_state_dict

    def sharded_state_dict(self, model: Any, is_loading: bool = False, **kwargs: Any) -> dict[str, Any]:
        """State and settings by parameters; NaN where to be loaded."""
        self._megatron.init_state_fn(self._megatron.optimizer, self._megatron.config)
        for adam in (x for x in self._optimizers if isinstance(x, Adam | AdamW)):
            for values in adam.state.values():
                values.setdefault("step", torch.zeros(()))  # which Megatron leaves to the first step
        state: dict[str, dict[str, Tensor]] = {}
        settings: dict[str, str] = {}  # in JSON, which torch's checkpoints do not take apart
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                plain = {key: value for key, value in group.items() if key not in NO_SETTINGS}
                for parameter in group["params"]:
                    name = self._megatron._param_name(parameter)
                    settings[name] = _TO_LOAD if is_loading else json.dumps([type(optimizer).__name__, plain])
                    tensors = optimizer.state_tensors(parameter) if isinstance(optimizer, BaseOptimizer) else ()
                    described = {tensor.key: tensor for tensor in tensors}
                    for key, x in optimizer.state[parameter].items():
                        if is_loading:
                            local(x).fill_(torch.nan if x.is_floating_point() else 0)
                        tensor = described.get(key, StateTensor(key))
                        for part, piece in self._pieces(optimizer, parameter, tensor, x):
                            state.setdefault(f"{name}{part}", {})[key] = piece
        run = {"format": FORMAT, "manifest": to_json(self._run.families), "tp_mode": self._run.tp_mode}
        return {"state": state, "settings": settings, BLOCK: {"run": _TO_LOAD if is_loading else json.dumps(run)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the loaded state; all ranks together."""
        if state_dict[BLOCK]["run"] == _TO_LOAD:  # Megatron's --strict-fsdp-dtensor-load is off
            raise CheckpointError(f"the checkpoint holds no settings of optimizers: another program wrote it; {FRESH}")
        run = json.loads(state_dict[BLOCK]["run"])
        problem = too_new(run["format"])
        if problem:
            raise CheckpointError(f"the checkpoint cannot serve this run: {problem}")
        self._run.adopt_tp_mode(run["tp_mode"])
        report_changes(run["manifest"], self._run.families)
        saved = {name: json.loads(each) for name, each in state_dict["settings"].items()}
        problems = union(self._problems(saved))
        if problems:
            raise CheckpointError(f"the checkpoint cannot serve this run: {problems[0]}; {FRESH}")
        for optimizer in self._optimizers:
            state = optimizer.state_dict()
            for number, group in enumerate(optimizer.param_groups):
                found = [saved[self._megatron._param_name(parameter)][1] for parameter in group["params"]]
                different = [each for i, each in enumerate(found) if each not in found[:i]]
                state["param_groups"][number] |= settings_of_group(optimizer, number, different)
            optimizer.load_state_dict(state)

    def _problems(self, saved: dict[str, Any]) -> Iterator[str]:
        for optimizer in self._optimizers:
            ours = type(optimizer).__name__
            for parameter, state in optimizer.state.items():
                name = self._megatron._param_name(parameter)
                wrote, _ = saved[name]
                if wrote != ours:
                    yield f"{wrote} wrote the state of {name}, and {ours} would take it for its own"
                else:
                    bad = [key for key, x in state.items() if not local(x).isfinite().all()]
                    yield from (f"its {key} of {name} has values that are not finite" for key in bad)

    def _pieces(
        self, optimizer: Any, parameter: DTensor, tensor: StateTensor, data: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Views of ``data`` as saved, with suffixes of the name."""
        if not isinstance(data, DTensor):
            yield "", data
            return
        layout = layout_of_dtensor(parameter)
        split = self._splits[parameter]
        dims: tuple[Dim, ...] = SIDES[: data.ndim] if tensor.dims is None else tensor.dims
        if tensor.dims is not None and len(layouts := optimizer.matrix_layouts(parameter)) > 1:
            split = WHOLE
            layout = layouts[tensor.matrix]
        if "rows" not in dims:
            split = WHOLE
        elif not split.is_whole and dims[0] != "rows":
            raise ValueError(f"{tensor.key} of fused matrices is saved along its rows, which come first; got {dims}")
        parts = split_layout(layout, split)
        pieces = [local(data)]
        if not split.is_whole:  # the order of the rows depends on the number of shards
            pieces = list(pieces[0].split([part.rectangle.shape[0] for part in parts]))
        for name, part, piece in zip(split.names(layout.shape[0]), parts, pieces, strict=True):
            held = part.rectangle
            along = {"rows": (part.shape[0], held.top), "columns": (part.shape[1], held.left)}
            sides = [(dim, 0) if isinstance(dim, int) else along[dim] for dim in dims]
            shape, start = zip(*sides, strict=True)
            yield f"[{name}]" if name else "", with_chunk(piece, data, shape, start)


def with_chunk(piece: Tensor, like: DTensor, shape: Sequence[int], start: Sequence[int]) -> DTensor:
    """A DTensor of global ``shape`` with ``piece`` at ``start`` here."""
    stride = torch.empty(*shape, device="meta").stride()
    mesh = like.device_mesh
    whole = DTensor.from_local(piece, mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride)
    shard: Any = whole._local_tensor
    chunk = metadata.ChunkStorageMetadata(offsets=torch.Size(start), sizes=shard.shape)

    def write_items(name: str, x: DTensor) -> list[WriteItem]:
        if not shard.numel():
            return []
        data = TensorWriteData(chunk, metadata.TensorProperties.create_from_tensor(shard), x.size())
        return [WriteItem(metadata.MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    shard.__create_chunk_list__ = lambda: [chunk]
    shard.__create_write_items__ = write_items
    return whole


def in_shards(parameter: ModelParameter) -> Split:
    """The matrices of which every tensor-parallel shard has rows."""
    made_of = fused(parameter if parameter.tensor.ndim > 1 else replace(parameter, tensor=torch.empty(1, 1)))
    return made_of.matrices if made_of is not None and made_of.matrices.order == "per_shard" else WHOLE


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
def prepared(prepare: Callable[..., Any], args: Any, state_dict: dict[str, Any], model: Any) -> Any:
    """Replaces ``preprocess_fsdp_dtensor_state_dict``, which knows Adam's state only."""
    if args.optimizer not in list_optimizers():
        return prepare(args, state_dict, model)
    ours = {key: state_dict[key] for key in ("optimizer",) if key in state_dict}
    if ours and ours["optimizer"][BLOCK]["run"] == _TO_LOAD:
        _refuse_missing(args, ours["optimizer"]["state"])
    rest = {key: value for key, value in state_dict.items() if key not in ours}
    return prepare(args, rest, _Model(model)) | ours


def _refuse_missing(args: Any, wanted: dict[str, dict[str, Tensor]]) -> None:
    path, stored = from_rank_0(lambda: _stored(Path(args.load), getattr(args, "ckpt_step", None)))
    held: dict[str, list[str]] = {}
    for name, _, key in (each.rpartition(".") for each in sorted(stored)):
        held.setdefault(name, []).append(key)
    lacking = (
        f"it holds {', '.join(has) or 'no state'} for {name}, and this run needs {', '.join(sorted(keys))}"
        for name, keys in wanted.items()
        if not keys.keys() <= set(has := held.get(f"optimizer.state.{name}", []))
    )
    problems = union(lacking)
    if problems:
        reason = "another optimizer wrote it, or this one with other settings; resume with that one, or"
        raise CheckpointError(f"{path}: {problems[0]}: {reason} {FRESH}")
    tensors = ((name, key, x) for name, state in wanted.items() for key, x in state.items())
    report_converted((key, stored[f"optimizer.state.{name}.{key}"], x.dtype) for name, key, x in tensors)


def _stored(folder: Path, step: int | None) -> tuple[Path, dict[str, torch.dtype]]:
    path = resumed(folder, step)
    assert path is not None, "Megatron loads it"
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    return path, {key: x.properties.dtype for key, x in stored.items() if isinstance(x, metadata.TensorStorageMetadata)}
