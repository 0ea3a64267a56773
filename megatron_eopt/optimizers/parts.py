"""One optimizer with two parts: matrices are one's, all other parameters are AdamW's."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW
from torch.optim.optimizer import Optimizer, ParamsT

from megatron_eopt.matrices import declared_split
from megatron_eopt.optimizers.checks import check_adam_settings, check_gradients

logger = logging.getLogger(__name__)

MATRICES, REST = "matrices", "rest"

ROLE = "role"
"""Setting of a group: which part it belongs to, :data:`MATRICES` or :data:`REST`."""

Group = dict[str, Any]
Recipe = tuple[type[Optimizer], dict[str, Any]]


class HybridOptimizer(Optimizer):
    """An optimizer of matrices, and AdamW for all other parameters, in one.

    Both parts step together and are saved in one ``state_dict``. The groups are the parts' own: a scheduler that
    multiplies every group's rate keeps their ratio. A group says in ``role`` whether it is of the ``matrices`` or of
    the ``rest``, and without it is of the matrices; what is no matrix there becomes a group of the rest, whose rate has
    the same ratio to its group's as AdamW's to that of matrices.

    Gradients that are not finite: what the optimizer of matrices does of its own (those of this package skip the step
    of that parameter, count it, and end the run after several in a row). torch's AdamW looks for none: let a gradient
    clipper or scaler do so, or its parameters become NaN.

    Args:
        matrices: parameters, named parameters or groups.
        rest: likewise.
        optimizer_cls: of the matrices.
        settings: its arguments, ``lr`` and ``weight_decay`` among them.
        adam_settings: those of ``torch.optim.AdamW``, likewise.

    Attributes:
        parts: the optimizers by their role; one without parameters is missing.

    Raises:
        ValueError: for a setting out of its range, and for what the part refuses.
    """

    def __init__(
        self,
        matrices: ParamsT,
        rest: ParamsT,
        optimizer_cls: type[Optimizer],
        settings: Mapping[str, Any],
        adam_settings: Mapping[str, Any],
    ) -> None:
        self._recipes: dict[str, Recipe] = {
            MATRICES: (optimizer_cls, dict(settings)),
            REST: (AdamW, dict(adam_settings)),
        }
        self.parts: dict[str, Optimizer] = {}
        divided = [each for group in _as_groups(matrices, MATRICES) for each in self._divided(group)]
        given = [each for group in _as_groups(rest, REST) for each in self._divided(group)]
        super().__init__(_joined(divided, given), {key: settings[key] for key in ("lr", "weight_decay")})
        self._log([each for group in divided if group[ROLE] == REST for each in _tensors(group["params"])])

    def why_rest(self, parameter: Tensor) -> str | None:
        """Why a parameter is AdamW's; None where it is a matrix, or declared to be several."""
        matrix = parameter.ndim == 2 or declared_split(parameter) is not None
        return None if matrix else "of other than two dimensions"

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, or two where some of its parameters are no matrices.

        Raises:
            ValueError: for a parameter that the part cannot have, or a setting out of its range.
        """
        before = list(self.param_groups)
        try:
            for group in self._divided(param_group):
                self._add(group)
        except (TypeError, ValueError):
            self.param_groups[:] = before
            for role, part in self.parts.items():
                part.param_groups[:] = [group for group in before if group[ROLE] == role]
            raise

    def _add(self, group: Group) -> None:
        role = group[ROLE]
        optimizer_cls, settings = self._recipes[role]
        for key in self.defaults:  # which are those of matrices
            group.setdefault(key, settings[key])
        super().add_param_group(group)
        if role == REST:
            check_adam_settings(f"AdamW in {type(self).__name__}", {**settings, **group})
        if role in self.parts:
            self.parts[role].add_param_group(group)
        else:
            self.parts[role] = optimizer_cls([group], **settings)

    def _divided(self, group: Group) -> list[Group]:
        """A group as one of matrices and one of the rest, without empty ones."""
        role = group.get(ROLE, MATRICES)
        if role not in self._recipes:
            raise ValueError(f"{ROLE} of a group is {MATRICES!r} or {REST!r}, got {role!r}")
        named = [group["params"]] if isinstance(group["params"], Tensor) else _listed(group["params"])
        if "param_names" in group:
            named = list(zip(group["param_names"], named, strict=True))
        own = {key: value for key, value in group.items() if key not in ("params", "param_names", ROLE)}
        if role == REST:
            return [{**own, "params": named, ROLE: REST}] if named else []
        taken = [self.why_rest(parameter) is None for parameter in _tensors(named)]
        of_rest = {"weight_decay": own["weight_decay"]} if "weight_decay" in own else {}
        if "lr" in own:
            lr, adam_lr = (self._recipes[role][1]["lr"] for role in (MATRICES, REST))
            of_rest["lr"] = own["lr"] * adam_lr / lr if lr else adam_lr
        divided = [
            {**own, "params": [each for each, take in zip(named, taken, strict=True) if take], ROLE: MATRICES},
            {**of_rest, "params": [each for each, take in zip(named, taken, strict=True) if not take], ROLE: REST},
        ]
        return [each for each in divided if each["params"]]

    def _log(self, diverted: Sequence[Tensor]) -> None:
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        reasons = Counter(self.why_rest(parameter) for parameter in diverted)
        listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        logger.info(
            "%s: %s; AdamW beside it: %s%s",
            self._recipes[MATRICES][0].__name__ if type(self) is HybridOptimizer else type(self).__name__,
            self._counted(MATRICES, "matrices"),
            self._counted(REST, "parameters"),
            f", and in that, of those given as matrices, {listed}" if listed else "",
        )

    def _counted(self, role: str, what: str) -> str:
        sizes = [p.numel() for group in self.param_groups if group[ROLE] == role for p in group["params"]]
        return f"{len(sizes)} {what} with {sum(sizes)} entries"

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step with both parts.

        Args:
            closure: computes the loss and the gradients anew; called once, with gradients enabled.

        Returns:
            What the closure returned.

        Raises:
            ValueError: for a gradient that one of the parts cannot take, before anything is changed.
            RuntimeError: if a gradient of a matrix was not finite in several steps in a row.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # torch's AdamW would refuse its own when the matrices have made their step
        of_rest = (p for group in self.param_groups if group[ROLE] == REST for p in group["params"])
        check_gradients(f"AdamW in {type(self).__name__}", of_rest, self.param_groups)
        for role in sorted(self.parts):  # the matrices first, whose gradients are checked
            self.parts[role].step()
            self.state.update(self.parts[role].state)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of both parts.

        Raises:
            ValueError: if the groups or the shapes are others, or if a tensor is missing; nothing is changed then.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        found, expected = _roles(state_dict["param_groups"]), _roles(self.param_groups)
        if found != expected:
            raise ValueError(
                f"{type(self).__name__} has groups of the roles {expected}, but the state was saved with {found}: "
                f"build the optimizer as it was"
            )
        before = {role: (part.param_groups, part.state) for role, part in self.parts.items()}
        try:
            for role, part in self.parts.items():
                part.load_state_dict(_of_role(state_dict, role))
        except Exception:
            for role, (groups, state) in before.items():
                self.parts[role].param_groups, self.parts[role].state = groups, state
            raise
        loaded = {role: iter(part.param_groups) for role, part in self.parts.items()}
        self.param_groups = [next(loaded[group[ROLE]]) for group in self.param_groups]
        self.state = defaultdict(dict)
        for part in self.parts.values():
            self.state.update(part.state)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled and copied: the parts are made anew of it."""
        return {**super().__getstate__(), "_recipes": self._recipes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what was pickled."""
        super().__setstate__(state)
        self.parts = {}
        for role, (optimizer_cls, settings) in self._recipes.items():
            groups = [group for group in self.param_groups if group[ROLE] == role]
            if groups:
                part = self.parts[role] = optimizer_cls(groups, **settings)
                own = [parameter for group in groups for parameter in group["params"] if parameter in self.state]
                part.state.update({parameter: self.state[parameter] for parameter in own})


def _listed(params: Any) -> list[Any]:
    if isinstance(params, Tensor | set):
        raise TypeError(f"parameters come as an ordered list, or as a list of groups, got a {type(params).__name__}")
    return list(params)


def _as_groups(params: ParamsT, role: str) -> list[Group]:
    listed = _listed(params)
    if listed and isinstance(listed[0], dict):
        return [{ROLE: role, **group} for group in listed]
    return [{ROLE: role, "params": listed}] if listed else []


def _joined(divided: Sequence[Group], given: Sequence[Group]) -> list[Group]:
    """All groups, those of matrices first; what is no matrix joins a given group of the rest with its settings."""
    groups = [group for group in divided if group[ROLE] == MATRICES] + list(given)
    for group in divided:
        if group[ROLE] == REST:
            same = next((each for each in given if _settings(each) == _settings(group)), None)
            if same is None:
                groups.append(group)
            else:
                same["params"] = [*same["params"], *group["params"]]
    return groups


def _settings(group: Group) -> Group:
    return {key: value for key, value in group.items() if key != "params"}


def _tensors(named: Sequence[Any]) -> list[Tensor]:
    return [each[1] if isinstance(each, tuple) else each for each in named]


def _roles(groups: Sequence[Group]) -> list[str | None]:
    return [group.get(ROLE) for group in groups]


def _of_role(state_dict: dict[str, Any], role: str) -> dict[str, Any]:
    """The part of a state dict that is of one role."""
    groups = [group for group in state_dict["param_groups"] if group[ROLE] == role]
    places = {place for group in groups for place in group["params"]}
    return {
        "state": {place: state_dict["state"][place] for place in places if place in state_dict["state"]},
        "param_groups": groups,
    }
