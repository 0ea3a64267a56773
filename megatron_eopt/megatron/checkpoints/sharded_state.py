"""Save and load the state of Megatron's optimizers in ``torch_dist`` checkpoints.

Megatron saves what is shaped as its parameter; the rest is in our block of its state dict.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.checkpoints.states import BLOCK, BLOCK_FORMAT, Block, Settings, StateDict
from megatron_eopt.megatron.at_average import has_average, restore_training_weights, save_average, trained_parameters
from megatron_eopt.megatron.checkpoints.changes import report_changes
from megatron_eopt.megatron.checkpoints.group_settings import groups_after_load, saved_settings
from megatron_eopt.megatron.checkpoints.keys import Sharded, stacked_index
from megatron_eopt.megatron.checkpoints.loading import MAIN_PARAMETERS, torch_state
from megatron_eopt.megatron.checkpoints.shards import joined, sharded_state
from megatron_eopt.megatron.consensus import distinct
from megatron_eopt.megatron.wrappers import model_parameters
from megatron_eopt.registry import BUILT_AS
from megatron_eopt.routing import to_json
from megatron_eopt.settings.modifiers import optional_states
from megatron_eopt.settings.of_class import settings_of
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.parameters import local, parameters_in
from megatron_eopt.step.state import StateTensor

_STEP = "step"

# Parameters in a checkpoint: keys, and indices among the layers and experts that are stacked under them.
Names = dict[str, list[int]]


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
        self._names: list[Names] = []  # of the parameters of each group

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
        names = ({sharded[i].key: [stacked_index(sharded[i])]} for i in count())
        self._names = [merged(islice(names, len(group["params"]))) for group in self._torch.param_groups]
        inner = torch_state(state_dict)
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

    def _state_of_other_shapes(self, sharded: Mapping[int, Sharded]) -> StateDict:
        """By index of the parameter, and key."""
        state: StateDict = {}
        for index, parameter, tensor in self._of_other_shapes():
            layouts = self._torch.matrix_layouts(parameter)
            data = local(self._torch.state[parameter][tensor.key])
            shards = sharded_state(tensor, data, sharded[index], layouts)
            state.setdefault(index, {})[tensor.key] = shards
        return state

    def _requested(self) -> Block:
        """What a load has to know of this run."""
        requested = {
            "import_adam": bool(getattr(self._megatron.config, "muon_momentum_from_adam", False)),
            "layers_differ": self._layers_differ,
            "optional": optional_states(settings_of(type(self._torch))) if self._is_ours else [],
        }
        return requested | ({"settings": self._torch.settings()} if self._is_ours else {})

    def _about(self, step: Any) -> Block:
        """The optimizer, its groups and settings, equal on all ranks."""
        here = list(zip(self._names, map(saved_settings, self._torch.param_groups), strict=True))
        of_ranks = distinct((step, here))
        about = {
            "format": BLOCK_FORMAT,
            "settings": self._torch.settings() if self._is_ours else {},
            "groups": [_group_of(of_group) for of_group in zip(*(groups for _, groups in of_ranks), strict=True)],
            "common_step": next((step for step, _ in of_ranks if step is not None), None),
        }
        if self._run is not None:
            about["manifest"] = to_json(self._run.families)
        return about

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what :meth:`sharded_state_dict` or Megatron alone saved."""
        if BLOCK not in state_dict:  # not from torch_dist: as it was
            self._megatrons_load_state_dict(state_dict)
            return
        block = state_dict.pop(BLOCK)
        inner = torch_state(state_dict)
        if self._run is not None:
            report_changes(block.get("manifest"), self._run.families)
        groups = groups_after_load(self._torch, self._saved_groups(inner["param_groups"], block.get("groups")))
        live = {}
        for index, (key, _) in self._trained().items():
            values = inner["state"].get(index, {})
            if key in values:
                live[index] = values.pop(key)
        self._place(state_dict)
        self._join(block["state"], inner["state"])
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

    def _saved_groups(self, theirs: Iterable[Settings], ours: Sequence[Settings] | None) -> list[list[Settings]]:
        """For each group, settings of those of the checkpoint that have its parameters."""
        if ours is None:
            # nothing says which group a parameter was in, but all have made as many steps
            steps = [] if self._is_ours else [{_STEP: group[_STEP]} for group in theirs if _STEP in group]
            return [steps for _ in self._names]
        return [[group["settings"] for group in ours if have_common(names, group["names"])] for names in self._names]

    def _place(self, state_dict: StateDict) -> None:
        """Make DTensors of loaded shards shaped as parameters, in place; Megatron does not."""
        for index, parameter in enumerate(parameters_in(self._torch.param_groups)):
            values = torch_state(state_dict)["state"].get(index, {})
            for key, value in values.items():
                if isinstance(value, Tensor) and value.ndim:
                    values[key] = _like(parameter, value)
        groups = getattr(self._megatron, "fp32_from_float16_groups", [])
        for mains, loaded in zip(groups, state_dict.get(MAIN_PARAMETERS, []), strict=False):
            loaded[:] = map(_like, mains, loaded)

    def _join(self, saved: StateDict, state: StateDict) -> None:
        """Put loaded shards of other shapes together, into ``state``."""
        for index, parameter, tensor in self._of_other_shapes():
            shards = saved.get(index, {}).get(tensor.key, [])
            loaded = [shard for shard in nested_values(shards) if shard is not None]
            if tensor.optional and not loaded:
                continue
            own = self._torch.state[parameter][tensor.key]
            state.setdefault(index, {})[tensor.key] = _like(own, joined(tensor, loaded, tuple(local(own).shape)))

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

    def _of_other_shapes(self) -> Iterator[tuple[int, Tensor, StateTensor]]:
        """Each state tensor of ours not shaped as its parameter, with that and its index."""
        if self._is_ours:
            for index, parameter in enumerate(parameters_in(self._torch.param_groups)):
                for tensor in self._torch.state_tensors(parameter):
                    if not tensor.like_parameter:
                        yield index, parameter, tensor


def refuse_unsaved(optimizer: Optimizer) -> None:
    """Refuse state of a user's optimizer that Megatron cannot save."""
    if optimizer not in BUILT_AS or isinstance(optimizer, BaseOptimizer):
        return
    for parameter in parameters_in(optimizer.param_groups):
        for key, value in optimizer.state.get(parameter, {}).items():
            shape = tuple(local(value).shape) if isinstance(value, Tensor) else None
            if key != _STEP and shape != tuple(local(parameter).shape):
                found = type(value).__name__ if shape is None else f"a tensor of shape {shape}"
                raise ValueError(
                    f"{BUILT_AS[optimizer]}: {type(optimizer).__name__} keeps {key!r}, {found}, for a parameter of "
                    f"shape {tuple(parameter.shape)}, and torch_dist checkpoints hold tensors of the shape of the "
                    "parameter beside one 'step', equal for all: call a count 'step', keep another number in the "
                    "group, describe other shapes by a subclass of BaseOptimizer, or save with --ckpt-format torch"
                )


def have_common(names: Names, others: Names) -> bool:
    """Whether a parameter is among both."""
    return any(not {*names[key]}.isdisjoint(others[key]) for key in names.keys() & others.keys())


def merged(names: Iterable[Names]) -> Names:
    """All these names together."""
    indices: dict[str, set[int]] = defaultdict(set)
    for some in names:
        for key in some:
            indices[key].update(some[key])
    return {key: sorted(indices[key]) for key in sorted(indices)}


def _group_of(of_ranks: Sequence[tuple[Names, Settings]]) -> Settings:
    """One group as all ranks know it together."""
    # a stage of a pipeline that has no parameter of a group does not know what became of it
    settings = next((settings for names, settings in of_ranks if names), of_ranks[0][1])
    return {"names": merged(names for names, _ in of_ranks), "settings": settings}


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
