"""Save and load optimizer state in ``torch_dist`` checkpoints."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.checkpoints.states import BLOCK, Block, Settings, StateDict, base
from megatron_eopt.megatron.at_average import has_average, restore_training_weights, save_average, trained_parameters
from megatron_eopt.megatron.checkpoints import matching, sharding
from megatron_eopt.megatron.checkpoints.loading import report_changes
from megatron_eopt.megatron.checkpoints.refusals import FORMAT
from megatron_eopt.megatron.consensus import distinct
from megatron_eopt.megatron.wrappers import model_parameters
from megatron_eopt.registry import BUILT_AS
from megatron_eopt.routing import to_json
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.parameters import local, parameters_in
from megatron_eopt.step.state import NO_SETTINGS, StateTensor


class SavedState:
    """Saves and loads the state of one of Megatron's optimizers."""

    def __init__(self, optimizer: Any, run: Any = None, layers_differ: bool = False, layer_wise: bool = False) -> None:
        self._megatron = optimizer
        self._run = run
        self._layers_differ = layers_differ
        # Megatron's layer-wise optimizer takes state dicts to be as in bf16, also where they are of fp32.
        self._nested = layer_wise and isinstance(optimizer, FP32Optimizer)
        self._torch = optimizer.optimizer
        self._is_ours = isinstance(self._torch, BaseOptimizer)
        self._megatrons_state_dict = optimizer.state_dict
        self._megatrons_sharded_state_dict = optimizer.sharded_state_dict
        self._megatrons_load_state_dict = optimizer.load_state_dict
        optimizer.state_dict = self.state_dict
        optimizer.sharded_state_dict = self.sharded_state_dict
        optimizer.load_state_dict = self.load_state_dict
        self._names: dict[int, matching.Name] = {}  # of parameters, by index

    def state_dict(self, *args: Any, **kwargs: Any) -> StateDict:
        """Megatron's, as plain tensors without attributes: files allow no others."""
        state_dict = self._megatrons_state_dict(*args, **kwargs)
        return dict_list_map_outplace(lambda x: x.detach() if isinstance(x, Tensor) else x, state_dict)

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> StateDict:
        """Megatron's, with state of other shapes in :data:`BLOCK`."""
        if self._is_ours:
            self._torch.init_state()  # also of what has had no gradient yet: who loads asks for it
        # Megatron takes every tensor of the state for one of the shape of the parameter.
        hook = self._torch.register_state_dict_post_hook(self._shaped_as_parameters)
        try:
            state_dict = self._megatrons_sharded_state_dict(model_sharded_state_dict, is_loading, *args, **kwargs)
        finally:
            hook.remove()
        sharded = get_param_id_to_sharded_param_map(model_sharded_state_dict, model_parameters(self._megatron))
        self._names = {index: (each.key, sharding.stacked_index(each)) for index, each in sharded.items()}
        inner = matching.torch_state(state_dict)
        block = {
            "state": self._state_of_other_shapes(sharded),
            "optimizer": type(self._torch).__name__,
            "checksums": bool(getattr(self._megatron.config, "checksums", True)),
        }
        if is_loading:
            block |= self._requested()
            # A run may have other groups than the one that saved: ours are put together in load_state_dict.
            inner["param_groups"] = []
        else:
            block |= self._about(inner["state"].get("common_step"))
            if has_average(self._megatron):
                save_average(self._megatron, model_sharded_state_dict)
        if self._nested:
            state_dict = {"optimizer": state_dict}
        return state_dict | {BLOCK: block}

    def _state_of_other_shapes(self, sharded: dict[int, sharding.Sharded]) -> StateDict:
        """By index of the parameter, and key."""
        state: StateDict = {}
        for index, parameter, tensor in self._of_other_shapes():
            layouts = self._torch.matrix_layouts(parameter)
            data = local(self._torch.state[parameter][tensor.key])
            shards = sharding.sharded_state(tensor, data, sharded[index], layouts)
            state.setdefault(index, {})[tensor.key] = shards
        return state

    def _requested(self) -> Block:
        """What a load has to know of this run."""
        requested = {
            "import_adam": bool(getattr(self._megatron.config, "muon_momentum_from_adam", False)),
            "layers_differ": self._layers_differ,
            "modifies": self._is_ours and "weight_norm" in self._torch.settings_of_groups(),
        }
        return requested | (matching.of_whole(self._torch) if self._is_ours else {})

    def _about(self, step: Any) -> Block:
        """The optimizer, its groups and settings, equal on all ranks."""
        of_ranks = distinct(self._on_this_rank(step))
        groups = [_merged(of_group) for of_group in zip(*(rank.groups for rank in of_ranks), strict=True)]
        names = matching.merged(group["names"] for group in groups)
        kept = {}
        for state in sorted({state for rank in of_ranks for state in rank.kept}):
            kept[state] = matching.merged(rank.kept.get(state, {}) for rank in of_ranks)
        about = {
            "format": FORMAT,
            "settings": self._torch.settings() if self._is_ours else {},
            "groups": groups,
            "common_step": next((rank.step for rank in of_ranks if rank.step is not None), None),
            "states": list(kept),
            "partly": {state: having for state, having in kept.items() if having != names},
        }
        if self._run is not None:
            about["manifest"] = to_json(self._run.families)
        return about

    def _on_this_rank(self, step: Any) -> "_OnRank":
        groups = []
        for names, group in zip(self._names_of_groups(), self._torch.param_groups, strict=True):
            settings = {key: group[key] for key in sorted(group.keys() - NO_SETTINGS)}
            groups.append((matching.compressed(names), settings))
        having: dict[str, set[matching.Name]] = defaultdict(set)
        for index, _, tensor in self._described():
            having[base(tensor.key)].add(self._names[index])
        for index, (key, _) in self._trained().items():
            having[base(key)].add(self._names[index])
        return _OnRank(step, groups, {state: matching.compressed(names) for state, names in having.items()})

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what :meth:`sharded_state_dict` or Megatron alone saved."""
        inner = matching.torch_state(state_dict)
        if BLOCK not in state_dict:  # not from torch_dist: as it was
            self._megatrons_load_state_dict(state_dict)
            return
        block = state_dict.pop(BLOCK)
        if self._run is not None:
            report_changes(block.get("manifest"), self._run.families)
        self._join(block.get("state", {}), inner["state"])
        groups = self._groups(inner["param_groups"], block)
        live = {}
        for index, (key, _) in self._trained().items():
            values = inner["state"].get(index, {})
            if key in values:
                live[index] = values.pop(key)
        self._place(state_dict)
        # Megatron pairs groups by a few of their settings, and mixes up those that are equal in these. So it gets the
        # groups of this run, and torch those to go on with, in the same list, which Transformer Engine's Adam reads.
        inner["param_groups"] = self._torch.state_dict()["param_groups"]
        hook = self._torch.register_load_state_dict_pre_hook(
            lambda optimizer, loaded: loaded["param_groups"].__setitem__(slice(None), groups)
        )
        try:
            self._megatrons_load_state_dict(inner if self._nested else state_dict)
        finally:
            hook.remove()
        if has_average(self._megatron):
            restore_training_weights(self._megatron, live)

    def _join(self, saved: StateDict, state: StateDict) -> None:
        """Put loaded shards of other shapes together, into ``state``."""
        for index, parameter, tensor in self._of_other_shapes():
            shards = saved.get(index, {}).get(tensor.key, [])
            loaded = [shard for shard in nested_values(shards) if shard is not None]
            if tensor.optional and not loaded:
                continue
            own = self._torch.state[parameter][tensor.key]
            joined = sharding.joined(tensor, loaded, tuple(local(own).shape))
            state.setdefault(index, {})[tensor.key] = _like(own, joined)

    def _groups(self, theirs: list[Settings], block: Block) -> list[Settings]:
        """The groups of this run, with the settings to go on with."""
        of_groups = []
        for names in self._names_of_groups():
            saved = []
            if "groups" in block:
                for group in block["groups"]:
                    if any(matching.has(group["names"], *name) for name in names):
                        saved.append(group["settings"])
            elif not self._is_ours:
                # nothing says which group a parameter was in, but all have made as many steps
                saved = [{"step": group["step"]} for group in theirs if "step" in group]
            of_groups.append(saved)
        groups = []
        after_load = matching.groups_after_load(self._torch, of_groups)
        for own, settings in zip(self._torch.state_dict()["param_groups"], after_load, strict=True):
            kept = {key: own[key] for key in NO_SETTINGS & own.keys()}  # indices, and the mark
            groups.append(settings | kept)
        return groups

    def _place(self, state_dict: StateDict) -> None:
        """Make DTensors of loaded shards, in place; Megatron does not."""
        done = {(index, tensor.key) for index, _, tensor in self._of_other_shapes()}
        for index, parameter in enumerate(self._parameters()):
            values = matching.torch_state(state_dict)["state"].get(index, {})
            for key, value in values.items():
                if (index, key) not in done and isinstance(value, Tensor) and value.ndim:
                    values[key] = _like(parameter, value)
        groups = getattr(self._megatron, "fp32_from_float16_groups", [])
        for mains, loaded in zip(groups, state_dict.get(matching.MAIN_PARAMETERS, []), strict=False):
            loaded[:] = map(_like, mains, loaded)

    def _shaped_as_parameters(self, optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        """A copy of the state without tensors of other shapes."""
        hidden = {(index, tensor.key) for index, _, tensor in self._of_other_shapes()}
        state = {}
        for index, values in state_dict["state"].items():
            state[index] = {key: value for key, value in values.items() if (index, key) not in hidden}
        for index, (key, parameter) in self._trained().items():
            state[index][key] = parameter.clone()  # what is trained goes on while an asynchronous save writes
        return {**state_dict, "state": state}

    def _trained(self) -> dict[int, tuple[str, Tensor]]:
        return trained_parameters(self._megatron) if has_average(self._megatron) else {}

    def _described(self) -> Iterator[tuple[int, Tensor, StateTensor]]:
        """Each state tensor of ours, with its parameter and index."""
        if self._is_ours:
            for index, parameter in enumerate(self._parameters()):
                for tensor in self._torch.state_tensors(parameter):
                    yield index, parameter, tensor

    def _of_other_shapes(self) -> Iterator[tuple[int, Tensor, StateTensor]]:
        """Those not shaped as their parameters."""
        for index, parameter, tensor in self._described():
            if not tensor.like_parameter:
                yield index, parameter, tensor

    def _parameters(self) -> list[Tensor]:
        return parameters_in(self._torch.param_groups)

    def _names_of_groups(self) -> list[list[matching.Name]]:
        names = []
        first = 0
        for group in self._torch.param_groups:
            end = first + len(group["params"])
            names.append([self._names[index] for index in range(first, end)])
            first = end
        return names


def refuse_unsaved(optimizer: Optimizer) -> None:
    """Refuse state of a user's optimizer that Megatron cannot save."""
    if optimizer not in BUILT_AS or isinstance(optimizer, BaseOptimizer):
        return
    for parameter in parameters_in(optimizer.param_groups):
        for key, value in optimizer.state.get(parameter, {}).items():
            shape = tuple(local(value).shape) if isinstance(value, Tensor) else None
            if key != "step" and shape != tuple(local(parameter).shape):
                found = type(value).__name__ if shape is None else f"a tensor of shape {shape}"
                raise ValueError(
                    f"{BUILT_AS[optimizer]}: {type(optimizer).__name__} keeps {key!r}, {found}, for a parameter of "
                    f"shape {tuple(parameter.shape)}, and torch_dist checkpoints hold tensors of the shape of the "
                    "parameter beside one 'step', equal for all: call a count 'step', keep another number in the "
                    "group, describe other shapes by a subclass of BaseOptimizer, or save with --ckpt-format torch"
                )


class _OnRank(NamedTuple):
    """What one rank knows of an optimizer."""

    step: Any
    groups: list[tuple[matching.Names, Settings]]  # parameters and settings
    kept: dict[str, matching.Names]  # described state -> the parameters that have it


def _merged(of_ranks: Sequence[tuple[matching.Names, Settings]]) -> Settings:
    """One group as all ranks know it together."""
    # a stage of a pipeline that has no parameter of a group does not know what became of it
    _, settings = next((of_rank for of_rank in of_ranks if of_rank[0]), of_ranks[0])
    return {"names": matching.merged(names for names, _ in of_ranks), "settings": settings}


def _like(parameter: Tensor | None, shard: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor) or isinstance(shard, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
