"""Save and load optimizer state in ``torch_dist`` checkpoints."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW
from torch.optim.optimizer import Optimizer

from megatron_eopt.checkpoints.contents import CheckpointError
from megatron_eopt.checkpoints.states import BLOCK, base, holding
from megatron_eopt.checkpoints.sums import CHECKSUMS
from megatron_eopt.megatron.agreement import distinct, say, union
from megatron_eopt.megatron.averaging import export, exports, go_on_from, trained
from megatron_eopt.megatron.checkpoints import loading, matching, sharding
from megatron_eopt.megatron.checkpoints.whole import checksums
from megatron_eopt.megatron.dealing import share_dealt
from megatron_eopt.megatron.parameters import model_parameters
from megatron_eopt.megatron.support.run import on
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.parameters import local
from megatron_eopt.optimizers.state import NO_SETTINGS, StateTensor
from megatron_eopt.optimizers.weight_average import AVERAGE, SCHEDULE, average_in, average_of
from megatron_eopt.parallel.attributes import is_cut_again
from megatron_eopt.redirect import around
from megatron_eopt.routing import to_json

STEP = "step"


class SavedState:
    """Saves and loads the state of one of Megatron's optimizers."""

    def __init__(self, optimizer: Any, run: Any = None, layers_differ: bool = False, whole: Any = None) -> None:
        self._megatron = optimizer
        self._run = run
        self._layers_differ = layers_differ
        self._whole = whole  # Megatron's layer-wise optimizer, of which this is a part
        # Megatron's layer-wise optimizer takes state dicts to be as in bf16, also where they are of fp32.
        self._nested = whole is not None and isinstance(optimizer, FP32Optimizer)
        self._torch = optimizer.optimizer
        self._save = optimizer.sharded_state_dict
        self._load = optimizer.load_state_dict
        optimizer.sharded_state_dict = self.sharded_state_dict
        optimizer.load_state_dict = self.load_state_dict
        self._state_dict = optimizer.state_dict
        optimizer.state_dict = self.state_dict
        self._exports = exports(
            optimizer, on(optimizer.config, "save_weight_average")
        )  # whether the model of a checkpoint is an average
        self._with_trained = False  # whether the state dict at work has what is trained, too

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Megatron's, as plain tensors without attributes: files allow no others."""
        state_dict = self._state_dict(*args, **kwargs)
        return dict_list_map_outplace(lambda x: x.detach() if isinstance(x, Tensor) else x, state_dict)

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Megatron's, with state of other shapes in :data:`BLOCK`."""
        cut = next(filter(is_cut_again, self._parameters()), None)
        if cut is not None:
            raise CheckpointError(
                f"a weight of shape {tuple(cut.shape)} on this rank is cut a second time (gtp_remat), and whether a "
                f"checkpoint of its optimizer state could be loaded is unproven: take the model alone "
                f"(--no-save-optim, --no-load-optim)"
            )
        if isinstance(self._torch, BaseOptimizer):
            self._torch.init_state()  # also of what has had no gradient yet: who loads asks for it
        # of a run that may have exported an average, what is trained is asked for, and left out if it is not there
        self._with_trained = self._exports or (is_loading and average_of(self._torch) is not None)
        # Megatron takes every tensor of the state for one of the shape of the parameter.
        hook = self._torch.register_state_dict_post_hook(self._shaped_as_parameters)
        try:
            state_dict: dict[str, Any] = self._save(model_sharded_state_dict, is_loading, *args, **kwargs)
        finally:
            hook.remove()
        sharded = get_param_id_to_sharded_param_map(model_sharded_state_dict, model_parameters(self._megatron))
        # Index of a parameter -> its key in the checkpoint, and its index among the layers that are stacked there.
        self._names = {index: (each.key, sharding.stacked_index(each)) for index, each in sharded.items()}
        state: dict[int, dict[str, Any]] = defaultdict(dict)  # what is not shaped as its parameter
        for index, parameter, tensor in self._described():
            if not tensor.like_parameter:
                layouts = self._torch.matrix_layouts(parameter)
                data = local(self._torch.state[parameter][tensor.key])
                state[index][tensor.key] = sharding.sharded_state(tensor, data, sharded[index], layouts)
        config = self._megatron.config
        sums = bool(getattr(config, "checksums", True))
        block: dict[str, Any] = {"state": dict(state), "optimizer": type(self._torch).__name__, "checksums": sums}
        if is_loading:
            block["import_adam"] = bool(getattr(config, "muon_momentum_from_adam", False))
            block["layers_differ"] = self._layers_differ
            ours = isinstance(self._torch, BaseOptimizer)
            block["modifies"] = ours and "weight_norm" in self._torch.settings_of_groups()
            # A run may have other groups than the one that saved: ours are put together in load_state_dict.
            matching.torch_state(state_dict)["param_groups"] = []
        else:
            block |= self._about(matching.torch_state(state_dict)["state"].get("common_step"))
            block |= {} if self._run is None else {"manifest": to_json(self._run.families)}
            average = average_of(self._torch)
            if average is not None:
                schedules = distinct((bool(self._parameters()), average.schedule()))
                block["average"] = {"schedule": max(schedules)[1], "exported": self._exports}
            if self._exports:
                export(self._megatron, model_sharded_state_dict)
        return ({"optimizer": state_dict} if self._nested else state_dict) | {BLOCK: block}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`sharded_state_dict` or Megatron alone saved."""
        inner = matching.torch_state(state_dict)
        theirs = inner["param_groups"]
        if any("params" in group for group in theirs):  # not from torch_dist: as it was
            self._load(state_dict)
            return
        block = state_dict.pop(BLOCK, {})
        if self._run is not None:
            if "tp_mode" in block:
                self._run.adopt_tp_mode(block["tp_mode"])
            loading.report_changes(block.get("manifest"), self._run.families)
        for index, parameter, tensor in self._described():
            if not tensor.like_parameter:
                saved = block.get("state", {}).get(index, {}).get(tensor.key, [])
                loaded = [each for each in nested_values(saved) if each is not None]
                if tensor.optional and not loaded:
                    continue
                own = self._torch.state[parameter][tensor.key]
                part = sharding.joined(tensor, loaded, tuple(local(own).shape))
                inner["state"].setdefault(index, {})[tensor.key] = _like(own, part)
        average = block.get("average", {})
        if average and average_of(self._torch) is None:
            say(f"{type(self._torch).__name__} leaves the average of weights in the checkpoint, as this run has none")
        inner["param_groups"] = self._groups(theirs, block)
        live = {}
        for index, (key, _) in self._trained().items():
            values = inner["state"].get(index, {})
            if key in values:
                live[index] = values.pop(key)
        self._check_finite(inner["state"])
        self._place(state_dict)
        for values in inner["state"].values():
            if isinstance(values, dict) and AVERAGE in values:
                values[SCHEDULE] = torch.tensor(average["schedule"], dtype=torch.float64)
        # Megatron tells groups apart by some of their settings, and mixes up the rest: ours are in order.
        self._megatron._filter_and_reorder_param_groups = lambda current, in_order: in_order
        try:
            self._load(inner if self._nested else state_dict)
        finally:
            del self._megatron._filter_and_reorder_param_groups
        if exports(self._megatron) or average.get("exported"):
            go_on_from(self._megatron, live)
            share_dealt(self._whole)  # others have loaded the average as the model

    def _place(self, state_dict: dict[str, Any]) -> None:
        """Make DTensors of loaded shards, in place; Megatron does not."""
        plain = {(index, tensor.key) for index, _, tensor in self._described() if not tensor.like_parameter}
        for index, values in matching.torch_state(state_dict)["state"].items():
            parameter = self._parameters()[index] if isinstance(index, int) else None
            for key in values if isinstance(parameter, DTensor) else ():
                if (index, key) not in plain and isinstance(values[key], Tensor) and values[key].ndim:
                    values[key] = _like(parameter, values[key])
        groups = getattr(self._megatron, "fp32_from_float16_groups", [])
        for mains, loaded in zip(groups, state_dict.get(matching.MAIN_PARAMETERS, []), strict=False):
            loaded[:] = map(_like, mains, loaded)

    def _shaped_as_parameters(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state without tensors of other shapes."""
        hidden = {(index, tensor.key) for index, _, tensor in self._described() if not tensor.like_parameter}
        found = state_dict["state"].items()
        state = {}
        for i, values in found:
            state[i] = {key: x for key, x in values.items() if (i, key) not in hidden}
        averaging = average_of(optimizer) is not None
        for index, parameter in enumerate(self._parameters()):
            if state.get(index, {}).pop(SCHEDULE, None) is not None or (averaging and state.get(index)):
                state[index][AVERAGE] = average_in(state[index], parameter)
        for index, (key, parameter) in self._trained().items():
            state[index][key] = parameter.clone()  # what is trained goes on while an asynchronous save writes
        return {**state_dict, "state": state}

    def _trained(self) -> dict[int, tuple[str, Tensor]]:
        return trained(self._megatron) if self._with_trained else {}

    def _described(self) -> Iterator[tuple[int, Tensor, StateTensor]]:
        if isinstance(self._torch, BaseOptimizer):
            for index, parameter in enumerate(self._parameters()):
                for tensor in self._torch.state_tensors(parameter):
                    yield index, parameter, tensor

    def _about(self, step: Any) -> dict[str, Any]:
        """The optimizer, its groups and settings, equal on all ranks."""
        settings = [{key: g[key] for key in sorted(g.keys() - NO_SETTINGS)} for g in self._torch.param_groups]
        here = list(zip(map(matching.compressed, self._names_of_groups()), settings, strict=True))
        having: dict[str, set[tuple[str, int]]] = defaultdict(set)  # the parameters that have each described state
        keys = [(index, tensor.key) for index, _, tensor in self._described()]
        keys += [(index, key) for index, (key, _) in self._trained().items()]
        for index, key in keys:
            having[base(key)].add(self._names[index])
        everywhere = distinct((step, here, {state: matching.compressed(names) for state, names in having.items()}))
        groups = []
        for of_ranks in zip(*(each for _, each, _ in everywhere), strict=True):
            # a stage of a pipeline that has no parameter of a group does not know what became of it
            _, of_group = next((each for each in of_ranks if each[0]), of_ranks[0])
            groups.append({"names": matching.merged([names for names, _ in of_ranks]), "settings": of_group})
        names = matching.merged([each["names"] for each in groups])
        states = sorted({state for *_, kept in everywhere for state in kept})
        kept = {state: matching.merged([of_rank.get(state, {}) for *_, of_rank in everywhere]) for state in states}
        return {
            "format": loading.FORMAT,
            "settings": self._torch.settings() if isinstance(self._torch, BaseOptimizer) else {},
            "groups": groups,
            "common_step": next((each for each, *_ in everywhere if each is not None), None),
            "states": states,
            "partly": {state: kept[state] for state in states if kept[state] != names},
        }

    def _groups(self, theirs: list[dict[str, Any]], block: dict[str, Any]) -> list[dict[str, Any]]:
        """The groups of this run, with the settings to go on with."""
        groups = []
        names = self._names_of_groups()
        for number, own in enumerate(self._torch.state_dict()["param_groups"]):
            saved = []
            if "groups" in block:
                for group in block["groups"]:
                    if any(matching.has(group["names"], *name) for name in names[number]):
                        saved.append(group["settings"])
            elif not isinstance(self._torch, BaseOptimizer):
                # nothing says which group a parameter was in, but all have made as many steps
                saved = [{"step": group["step"]} for group in theirs if "step" in group]
            settings = matching.settings_of_group(self._torch, number, saved)
            kept = {key: own[key] for key in NO_SETTINGS & own.keys()}  # indices, and the mark
            groups.append(settings | kept)
        return groups

    def _check_finite(self, state: dict[Any, Any]) -> None:
        """Refuse values that are not finite, on all ranks together, also of Adam."""
        found = []
        for index, (name, _) in self._names.items():
            for key, value in state.get(index, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and not local(value).isfinite().all():
                    found.append(f"{key} of {name}")
        bad = union(found)
        if bad:
            raise CheckpointError(
                f"the checkpoint holds values that are not finite, in {len(bad)} tensors, such as {bad[0]}: a run "
                f"would not get rid of them. Load an earlier checkpoint, or {loading.FRESH}"
            )

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._torch.param_groups for parameter in group["params"]]

    def _names_of_groups(self) -> list[list[tuple[str, int]]]:
        indices = itertools.count()
        return [[self._names[next(indices)] for _ in group["params"]] for group in self._torch.param_groups]


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


@around
def checked_save(save: Callable[..., Any], sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``dist_checkpointing.save``: our checkpoints get checksums."""
    if any(each[BLOCK]["checksums"] for each in holding(sharded_state_dict, BLOCK)):
        sharded_state_dict[CHECKSUMS] = checksums(sharding.sharded_tensors(sharded_state_dict))
    return save(sharded_state_dict, *args, **kwargs)


class AdamOfBuffers:
    """Lets Megatron's distributed optimizer save and load the state of torch's Adam.

    Transformer Engine's and Apex's Adam count steps in their groups; torch's counts them beside each parameter, from
    its first step on, and nowhere on a rank whose shards of buffers are padding alone. Megatron asserts that there is
    such a count when it saves and before it loads. It loads one tensor for all parameters, which each would raise, and
    writes the count from before the load over it.
    """

    def __init__(self, optimizer: Any) -> None:
        self._adam = optimizer.optimizer
        if not isinstance(self._adam, Adam | AdamW):
            return
        for parameter in (p for group in self._adam.param_groups for p in group["params"]):
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            self._adam.state[parameter] = {STEP: torch.zeros(()), **moments}
        self._adam.register_state_dict_post_hook(_with_a_count)
        self._adam.register_load_state_dict_post_hook(_with_counts_apart)
        self._get, self._set = (
            getattr(optimizer, f"_{verb}_main_param_and_optimizer_states") for verb in ("get", "set")
        )
        optimizer._get_main_param_and_optimizer_states = self.get
        optimizer._set_main_param_and_optimizer_states = self.set

    def get(self, parameter: Any) -> dict[str, Any]:
        """Megatron's: the state of a parameter, without its count."""
        return {key: value for key, value in self._get(parameter).items() if key != STEP}

    @torch.no_grad()
    def set(self, parameter: Any, tensors: dict[str, Any]) -> None:
        """Megatron's: takes over loaded state; the count stays."""
        self._set(parameter, tensors | {STEP: self._get(parameter)[STEP]})


def _with_a_count(adam: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    return state_dict | {"state": state_dict["state"] or {"nothing": {STEP: torch.zeros(())}}}


def _with_counts_apart(adam: Any) -> None:
    for state in adam.state.values():
        state[STEP] = state[STEP].clone()
    for group in adam.param_groups:
        group.pop(STEP, None)
