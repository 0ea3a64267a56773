"""Megatron's optimizers save and load what is described: their own methods, wrapped one object at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.checkpoints.contents import CheckpointError
from megatron_eopt.checkpoints.states import BLOCK, base
from megatron_eopt.manifest import compare, from_json
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.checkpoints.exporting import Exporting
from megatron_eopt.megatron.checkpoints.groups import Names, Settings, compressed, has, merged, settings_after_load
from megatron_eopt.megatron.checkpoints.parts import GROUPS, torch_part
from megatron_eopt.megatron.checkpoints.sharding import Sharded, built, joined, sharded_state
from megatron_eopt.megatron.parameters import model_parameters, plain_wrappers
from megatron_eopt.optimizers.batch import local
from megatron_eopt.optimizers.state import DescribedState, StateTensor
from megatron_eopt.parallel.layout import is_cut_again

FORMAT = 1
"""Grows when an older release could not read a checkpoint any more."""


class SavedState:
    """How one of Megatron's optimizers, around a torch optimizer, saves and loads its state in torch_dist.

    Args:
        optimizer: Megatron's; its ``sharded_state_dict`` and ``load_state_dict`` are wrapped.
        manifest: of the whole run, where this optimizer is the one that saves it.
    """

    def __init__(self, optimizer: Any, manifest: dict[str, Any] | None = None) -> None:
        self._megatron = optimizer
        self._manifest = manifest
        self._torch: Optimizer = optimizer.optimizer
        self._exporting = Exporting(optimizer)
        self._save = optimizer.sharded_state_dict
        self._load = optimizer.load_state_dict
        optimizer.sharded_state_dict = self.sharded_state_dict
        optimizer.load_state_dict = self.load_state_dict

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """What Megatron saves, and beside it, in :data:`BLOCK`, what is not shaped as its parameter.

        Raises:
            CheckpointError: for weights that Megatron cuts a second time.
        """
        cut = next((p for p in self._parameters() if is_cut_again(p)), None)
        if cut is not None:
            raise CheckpointError(
                f"a weight of shape {tuple(cut.shape)} on this rank is cut a second time (gtp_remat), and whether a "
                f"checkpoint of its optimizer state could be loaded is unproven: take the model alone "
                f"(--no-save-optim, --no-load-optim)"
            )
        if isinstance(self._torch, DescribedState):
            self._torch.init_state()  # also of what has had no gradient yet: who loads asks for it
        # Megatron takes every tensor of the state for one of the shape of the parameter.
        hook = self._torch.register_state_dict_post_hook(self._without_special)
        try:
            state_dict: dict[str, Any] = self._save(model_sharded_state_dict, is_loading, *args, **kwargs)
        finally:
            hook.remove()
        sharded = get_param_id_to_sharded_param_map(model_sharded_state_dict, model_parameters(self._megatron))
        config = self._megatron.config
        block: dict[str, Any] = {
            "state": self._special(sharded),
            "optimizer": type(self._torch).__name__,
            "checksums": bool(getattr(config, "checksums", True)),
        }
        if is_loading:
            block["import_adam"] = bool(getattr(config, "muon_momentum_from_adam", False))
            # A run may have other groups than the one that saved: ours are put together in load_state_dict.
            torch_part(state_dict)[GROUPS] = []
            self._places = _places(sharded)
        else:
            block |= self._about(sharded, torch_part(state_dict)["state"].get("common_step"))
            block |= {} if self._manifest is None else {"manifest": self._manifest}
            self._exporting.put_into(model_sharded_state_dict)
        state_dict[BLOCK] = block
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`sharded_state_dict` saved, or what Megatron did before this package was there."""
        inner = torch_part(state_dict)
        theirs = inner[GROUPS]
        if any("params" in group for group in theirs):  # not from torch_dist: as it was
            self._load(state_dict)
            return
        block = state_dict.pop(BLOCK, {})
        self._report_changes(block.get("manifest"))
        for index, parameter, tensor in self._described():
            if tensor.dims is not None and tensor.saved:
                parts = block.get("state", {}).get(index, {}).get(tensor.key, [])
                shape = tuple(self._torch.state[parameter][tensor.key].shape)
                state = inner["state"].setdefault(index, {})
                state[tensor.key] = joined(tensor, [part for part in nested_values(parts) if part is not None], shape)
        settings = self._settings(theirs, block)
        packed = self._torch.state_dict()["param_groups"]
        groups = [{**each, "params": group["params"]} for each, group in zip(settings, packed, strict=True)]
        inner[GROUPS] = groups
        with self._groups_in_order(), self._exporting.taken_out(inner["state"]):
            self._load(state_dict)
        self._check_finite()

    @contextmanager
    def _groups_in_order(self) -> Iterator[None]:
        """Let Megatron take the groups as they come: it tells them apart by some settings, and mixes up the rest."""
        self._megatron._filter_and_reorder_param_groups = lambda current, in_order: in_order
        try:
            yield
        finally:
            del self._megatron._filter_and_reorder_param_groups

    def _settings(self, theirs: list[Settings], block: dict[str, Any]) -> list[Settings]:
        """Those of each group after a load, from ours in the checkpoint, or from Megatron's where it wrote it."""
        carried = self._torch.carried_settings if isinstance(self._torch, DescribedState) else frozenset()
        from_checkpoint = releases.wants_schedule_of_checkpoint()
        results = []
        for number, group in enumerate(self._groups()):
            if "groups" in block:
                own = self._places_of_group(number)
                saved = [g["settings"] for g in block["groups"] if any(has(g["names"], *name) for name in own)]
            elif isinstance(self._torch, DescribedState):
                saved = []
            else:  # nothing says which group a parameter was in, but all have made as many steps
                saved = [{key: each[key] for key in ("step",) if key in each} for each in theirs]
            settings, changed = settings_after_load(group, saved, carried, from_checkpoint)
            results.append(settings)
            self._report(number, changed)
        return results

    def _check_finite(self) -> None:
        """A value that is not finite would stay in the state for ever, so nobody goes on with it, on any rank."""
        tensors = {
            (index, key): value
            for index, parameter in enumerate(self._parameters())
            for key, value in self._torch.state[parameter].items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        flags = [local(value).isfinite().all() for value in tensors.values()]
        finite = torch.stack(flags).tolist() if flags else []
        bad = [
            f"{key} of {self._places[index][0]}" for (index, key), good in zip(tensors, finite, strict=True) if not good
        ]
        everywhere: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everywhere, bad)
        found = sorted({name for names in everywhere for name in names})
        if found:
            raise CheckpointError(
                f"the checkpoint holds values that are not finite, in {len(found)} tensors, such as {found[0]}: a run "
                f"would not get rid of them. Load an earlier checkpoint, or pass --no-load-optim to load the weights "
                f"alone and start with fresh optimizer state"
            )

    def _report(self, number: int, changed: dict[str, tuple[Any, Any]]) -> None:
        if changed and dist.get_rank() == 0:
            listed = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in sorted(changed.items()))
            print(
                f"megatron_eopt: group {number} of {type(self._torch).__name__} goes on with other settings than the "
                f"checkpoint has: {listed}",
                flush=True,
            )

    def _report_changes(self, saved: dict[str, Any] | None) -> None:
        """Say what changed since the save. Nothing is decided by it, so one that cannot be read ends no run."""
        if self._manifest is None or saved is None or dist.get_rank() != 0:
            return
        try:
            changes = compare(from_json(saved), from_json(self._manifest))
        except ValueError as error:
            changes = [f"not known, since {error}"]
        for line in changes:
            print(f"megatron_eopt: other than in the checkpoint: {line}", flush=True)

    def _about(self, sharded: dict[int, Sharded], step: Any) -> dict[str, Any]:
        """What says which optimizer this is, whose each group is and its settings: the same on every rank."""
        self._places = _places(sharded)
        everywhere: list[Any] = [None] * dist.get_world_size()
        about_groups = [self._about_group(i) for i in range(len(self._groups()))]
        dist.all_gather_object(everywhere, (step, about_groups, self._kept()))
        groups = []
        for of_ranks in zip(*(each for _, each, _ in everywhere), strict=True):
            # a stage of a pipeline that has no parameter of a group does not know what became of it
            _, settings = next((each for each in of_ranks if each[0]), of_ranks[0])
            groups.append({"names": merged([names for names, _ in of_ranks]), "settings": settings})
        names = merged([each["names"] for each in groups])
        states = sorted({state for *_, kept in everywhere for state in kept})
        having = {state: merged([kept.get(state, {}) for *_, kept in everywhere]) for state in states}
        return {
            "format": FORMAT,
            "settings": self._torch.settings() if isinstance(self._torch, DescribedState) else {},
            "groups": groups,
            "common_step": next((each for each, *_ in everywhere if each is not None), None),
            "states": states,
            "partly": {state: having[state] for state in states if having[state] != names},
        }

    def _kept(self) -> dict[str, Names]:
        """The parameters that have each state, where the optimizer says what it keeps."""
        keys = [(index, tensor.key) for index, _, tensor in self._described() if tensor.saved]
        keys += [(index, key) for index, (key, _) in self._exporting.trained().items()]
        found: dict[str, dict[str, set[int]]] = {}
        for index, key in keys:
            name, place = self._places[index]
            found.setdefault(base(key), {}).setdefault(name, set()).add(place)
        return {state: compressed(places) for state, places in found.items()}

    def _about_group(self, number: int) -> tuple[Names, Settings]:
        found: dict[str, set[int]] = {}
        for key, place in self._places_of_group(number):
            found.setdefault(key, set()).add(place)
        group = self._groups()[number]
        return compressed(found), {key: group[key] for key in group.keys() - {"params", "param_names"}}

    def _without_special(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state that has what lies as its parameter does, and what no description speaks of."""
        hidden = {
            (index, tensor.key) for index, _, tensor in self._described() if tensor.dims is not None or not tensor.saved
        }
        state = {
            index: {key: value for key, value in values.items() if (index, key) not in hidden}
            for index, values in state_dict["state"].items()
        }
        for index, (key, trained) in self._exporting.trained().items():
            state[index][key] = trained.clone()  # what is trained goes on while an asynchronous save writes
        return {**state_dict, "state": state}

    def _special(self, sharded: dict[int, Sharded]) -> dict[int, dict[str, list[ShardedTensor]]]:
        """By parameter and key, what does not lie as its parameter does."""
        state: dict[int, dict[str, list[ShardedTensor]]] = {}
        for index, parameter, tensor in self._described():
            if tensor.dims is not None and tensor.saved:
                assert isinstance(self._torch, DescribedState)  # no other says what it keeps
                state.setdefault(index, {})[tensor.key] = sharded_state(
                    tensor,
                    self._torch.state[parameter][tensor.key],
                    sharded[index],
                    self._torch.matrix_layouts(parameter),
                )
        return state

    def _described(self) -> Iterator[tuple[int, Tensor, StateTensor]]:
        """What the optimizer says that it keeps, with the parameter and its place; nothing of one that does not."""
        if isinstance(self._torch, DescribedState):
            for index, parameter in enumerate(self._parameters()):
                for tensor in self._torch.state_tensors(parameter):
                    yield index, parameter, tensor

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._groups() for parameter in group["params"]]

    def _places_of_group(self, number: int) -> list[tuple[str, int]]:
        start = sum(len(group["params"]) for group in self._groups()[:number])
        return [self._places[index] for index in range(start, start + len(self._groups()[number]["params"]))]

    def _groups(self) -> list[dict[str, Any]]:
        return self._torch.param_groups


def attach(optimizer: Any, manifest: dict[str, Any] | None = None) -> None:
    """Let every optimizer inside Megatron's wrappers save and load its state by its description.

    Args:
        optimizer: Megatron's.
        manifest: what the checkpoint says of the run, and what a run that loads it is compared with.
    """
    for number, each in enumerate(plain_wrappers(optimizer)):
        SavedState(each, manifest if number == 0 else None)


def _places(sharded: dict[int, Sharded]) -> dict[int, tuple[str, int]]:
    """Place of the parameter among the optimizer's -> its key in the checkpoint, and its place among those stacked."""
    return {index: (parameter.key, _stacked_place(parameter)) for index, parameter in sharded.items()}


def _stacked_place(parameter: Sharded) -> int:
    part = built(parameter)[0]
    place = 0
    for axis in range(part.prepend_axis_num):
        place = place * part.global_shape[axis] + part.global_offset[axis]
    return place
