"""State dicts of Muon with AdamW inside as others and earlier commits have them.

Earlier commits kept AdamW's state in that of the first matrix, as ``adamw.NAME.exp_avg`` and so on, and its groups in
the first group, as ``adamw``. KempnerForge's Muon has a state dict of its own for AdamW.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from torch.optim.optimizer import Optimizer

from megatron_eopt.optimizers.parameters import NAME

ADAMW = "adamw"  # key of AdamW's groups, and the beginning of its state's
INITIAL_LR = "initial_lr"

Group = dict[str, Any]


class EarlierLayout(Optimizer):
    """Muon with AdamW inside, to load what earlier commits saved by ``torch.distributed.checkpoint``.

    ::

        earlier = EarlierLayout(optimizer)
        state = get_optimizer_state_dict(model, earlier)
        torch.distributed.checkpoint.load({"optimizer": state}, checkpoint_id=folder)
        set_optimizer_state_dict(model, earlier, state)  # into the optimizer itself

    Files of ``torch.save`` need no such thing.
    """

    def __init__(self, optimizer: Any) -> None:
        of_matrices = optimizer.matrices.param_groups
        super().__init__([dict(group) for group in of_matrices], optimizer.matrices.defaults)
        self.optimizer = optimizer
        optimizer.init_state()
        parameters = optimizer.matrices._parameters()
        for parameter in parameters:
            self.state[parameter] = dict(optimizer.state[parameter])
        first = next((p for p in parameters if p.requires_grad), parameters[0])  # frozen ones' state is not saved
        groups = optimizer._adam_groups
        settings = []
        for group, names in zip(groups, _names(groups), strict=True):
            settings.append({**group, "params": names, INITIAL_LR: group["adam_lr"]})
            for parameter, name in zip(group["params"], names, strict=True):
                for key, x in optimizer.state[parameter].items():
                    self.state[first][f"{ADAMW}.{name}.{key}"] = x
        if groups:
            self.param_groups[0][ADAMW] = {
                INITIAL_LR: groups[0]["adam_lr_at"],
                "param_groups": tuple(settings),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the optimizer itself."""
        self.optimizer.load_state_dict(state_dict)


def as_now(state_dict: Mapping[str, Any], groups: Sequence[Group], called: str) -> Mapping[str, Any]:
    """A state dict as Muon with the ``groups`` of AdamW has it now."""
    if "_adam_state" in state_dict:
        return _of_kempnerforge(state_dict)
    of_matrices = [dict(group) for group in state_dict["param_groups"]]
    settings = [group.pop(ADAMW) for group in of_matrices if ADAMW in group]
    if not settings:
        return state_dict
    state: dict[Any, dict[str, Any]] = {}
    for index, saved in state_dict["state"].items():
        state[index] = {}
        for key, x in _flat(saved):
            if key.startswith(f"{ADAMW}."):
                _, name, key_there = key.split(".", 2)
                state.setdefault(f"{ADAMW}.{name}", {})[key_there] = x
            else:
                state[index][key] = x
    saved_groups = settings[0]["param_groups"]
    of_adamw = []
    for group, names in zip(saved_groups, _in_order(saved_groups, groups, called), strict=True):
        indices = [f"{ADAMW}.{name}" for name in names]
        for index in indices:
            state.setdefault(index, {})  # which lacks what AdamW needs
        rates = {"adam_lr": group[INITIAL_LR], "adam_lr_at": settings[0][INITIAL_LR]}
        of_adamw.append({**group, **rates, "params": indices})
    return {**state_dict, "state": state, "param_groups": of_matrices + of_adamw}


def _flat(saved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Entries of one parameter's state; the oldest commits have AdamW's in a dict."""
    for key, x in saved.items():
        if key != ADAMW:
            yield key, x
            continue
        for name, tensors in x.items():
            for key_there, tensor in tensors.items():
                yield f"{ADAMW}.{name}.{key_there}", tensor


def _of_kempnerforge(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    of_adamw = state_dict["_adam_state"]
    state = {**state_dict["state"], **{f"{ADAMW}.{index}": x for index, x in of_adamw["state"].items()}}
    groups = list(state_dict["param_groups"])
    for group in of_adamw["param_groups"]:
        rates = {"adam_lr": state_dict["_initial_adam_lr"], "adam_lr_at": state_dict["_initial_lr"]}
        groups.append({**group, **rates, "params": [f"{ADAMW}.{index}" for index in group["params"]]})
    return {"state": state, "param_groups": groups}


def _names(groups: Sequence[Group]) -> list[list[str]]:
    """Names of AdamW's parameters by group, unique or indices."""
    known = [g.get("param_names") or [getattr(p, NAME, None) for p in g["params"]] for g in groups]
    flat = list(chain(*known))
    if None in flat or len(set(flat)) < len(flat):
        indices = map(str, range(len(flat)))
        return [list(islice(indices, len(names))) for names in known]
    # torch's flat form of a state divides names at dots
    return [[name.replace(".", "/") for name in names] for names in known]


def _in_order(saved: Sequence[Group], groups: Sequence[Group], called: str) -> list[list[str]]:
    """Names in ``saved`` groups, in the order of the optimizer's own."""
    present = _names(groups)
    names = [list(group["params"]) for group in saved]
    if [set(x) for x in names] == [set(x) for x in present]:
        return present
    if _by_name(present) and _by_name(names):
        raise ValueError(
            f"AdamW in {called} has groups of the parameters {present}, but the state was saved with {names}: build "
            "the optimizer for the model as it was"
        )
    return names


def _by_name(groups: Sequence[Sequence[str]]) -> bool:
    return not all(name.isdigit() for name in chain(*groups))
