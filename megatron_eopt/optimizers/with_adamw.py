"""Muon, or another optimizer of matrices, with AdamW inside."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers.heavy_ball_muon import HeavyBallMuon
from megatron_eopt.settings.groups import plain, warn, warn_of_idle
from megatron_eopt.settings.of_class import check_values, settings_of
from megatron_eopt.settings.other_names import check_arguments
from megatron_eopt.settings.records import ADAM, RECORDS, Setting
from megatron_eopt.settings.values import AT_LEAST_0
from megatron_eopt.step.adamw import AdamW, state_tensors
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.gradients import check_gradients
from megatron_eopt.step.loaded_state import (
    apart,
    check_loaded,
    check_writer,
    hook_loaded,
    hooked,
    name_in_states,
    warn_reinitialized,
)
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.ownership import ownership
from megatron_eopt.step.parameters import check_parameters, check_scalable, parameter_names, parameters_in
from megatron_eopt.step.reporting import ReportingOptimizer
from megatron_eopt.step.state import STATE_OF, StateTensor, forget_replaced

# In AdamW's groups: their first rate, that of the first group of matrices at that time, and that of their last step.
ADAM_LR = "adam_lr"
ADAM_LR_AT = "adam_lr_at"
LAST_LR = "last_lr"

_RATES = (Setting(ADAM_LR, check=AT_LEAST_0), Setting(ADAM_LR_AT, check=AT_LEAST_0))
OF_ADAMW = {record.name: record for record in (RECORDS["lr"], RECORDS["weight_decay"], *ADAM, *_RATES)}

Group = dict[str, Any]
State = MutableMapping[Tensor, dict[str, Any]]


class JoinedState(State):
    """The state of two optimizers as one.

    As torch's, it makes what is asked for by ``state[parameter]``, and not by ``get`` or ``in``.
    """

    def __init__(self, matrices: State, adamw: State, of_adamw: Sequence[Tensor]) -> None:
        self._matrices = matrices
        self._adamw = adamw
        self._of_adamw = of_adamw

    def _of(self, parameter: Tensor) -> State:
        if parameter in self:
            return self._adamw if parameter in self._adamw else self._matrices
        return self._adamw if any(parameter is p for p in self._of_adamw) else self._matrices

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._matrices or parameter in self._adamw

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """A parameter's state, if there is one."""
        return self._of(parameter).get(parameter, default)

    def pop(self, parameter: Tensor, *default: Any) -> Any:
        """Take a parameter's state out."""
        return self._of(parameter).pop(parameter, *default)

    def setdefault(self, parameter: Tensor, state: Any = None) -> Any:
        """A parameter's state, set if there is none."""
        return self._of(parameter).setdefault(parameter, state)

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        return self._of(parameter)[parameter]

    def __setitem__(self, parameter: Tensor, state: dict[str, Any]) -> None:
        self._of(parameter)[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._of(parameter)[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        return chain(self._matrices, self._adamw)

    def __len__(self) -> int:
        return len(self._matrices) + len(self._adamw)


class JoinedGroups(list[Group]):
    """The groups of two optimizers, whose lists these are."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        """Refuse a change, which neither optimizer would have."""
        raise TypeError(
            "param_groups joins the groups of two optimizers, so the list cannot be changed: add a group by "
            "add_param_group(), and set keys of a group in its dict"
        )

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)  # whose items a copy appends


class WithAdamW(ReportingOptimizer):
    """One optimizer: any of matrices, and AdamW for the rest.

    ``param_groups`` are the groups of the matrices, then those of AdamW; groups that :meth:`add_param_group` adds, of
    matrices, come last. A changed value is in force in the next step. The ``lr`` that a group has is its rate. If all
    groups are given one ``lr``, as by a loop, it is the rate of the matrices, and the step sets those of AdamW::

        lr of a group of AdamW = adam_lr * (lr of the matrices / adam_lr_at)

    with AdamW's first rate, ``adam_lr``, and the first rate of the first group of matrices, ``adam_lr_at``. Where
    ``adam_lr_at`` is 0, where nobody has changed the rates of AdamW since the last step (``last_lr``), and where a
    scheduler began with several rates (``initial_lr``), each group keeps its ``lr``.

    ``state`` and ``state_dict`` have both states, each parameter's by itself. State that is missing is made where
    ``state`` is first read, and by ``state_dict``.

    A step with a gradient that is not finite, or above 2^50 in norm, is skipped, of matrices and of the rest. On a GPU
    AdamW is torch's fused one, which skips a step without asking the host. torch's ``GradScaler`` unscales both, and
    skips both steps.

    Args:
        matrices: any of this package's, with at least one parameter.
        adam_params: all other parameters, or groups of them with their own ``lr``, ``betas``, ``eps`` or
            ``weight_decay`` (else torch's 0.01). May be empty.
        adam_settings: arguments of ``torch.optim.AdamW``.

    Attributes:
        adamw: ``torch.optim.AdamW``; None where it has no parameters.

    Raises:
        ValueError: for a setting of AdamW out of its range, and for a parameter that is in both.
    """

    _matrices: BaseOptimizer
    adamw: AdamW | None

    def __init__(self, matrices: BaseOptimizer, adam_params: ParamsT, adam_settings: Mapping[str, Any]) -> None:
        self._matrices = matrices
        self.adamw = _adamw_of(self._of_adamw, list(adam_params), adam_settings)
        self._groups_at_first = len(matrices.param_groups)
        # torch's constructor would set state and groups, which are those of the two
        self.__setstate__({"defaults": dict(matrices.defaults)})
        if not matrices._parameters():
            raise ValueError(f"{self._called} needs at least one matrix: for all else take torch.optim.AdamW")
        if self.adamw is not None:
            self.adamw.param_groups[0][ADAM_LR_AT] = float(matrices.param_groups[0]["lr"])
        beside = {}
        for number, group in enumerate(self._adam_groups):
            check_parameters(self._of_adamw, self._adam_groups[: number + 1])
            for key, x in plain(group).items():
                beside[f"AdamW's {key} of group {number}"] = x
        matrices._session.adamw_settings = beside
        self._check_apart(matrices._parameters())

    @property
    def matrices(self) -> BaseOptimizer:
        """The optimizer of matrices."""
        return self._matrices

    @property
    def _called(self) -> str:
        return type(self.matrices).__name__

    @property
    def _of_adamw(self) -> str:
        return f"AdamW in {self._called}"

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, self._called, 1)

    def __getstate__(self) -> dict[str, Any]:
        names = ("defaults", "_matrices", "adamw", "_groups_at_first")
        return {name: getattr(self, name) for name in names}

    def explain(self) -> str:
        """Which parameters are the matrices', which AdamW's; their rates; what ranks exchange of the matrices."""
        table = ownership(filter(None, (self.matrices, self.adamw)))
        return "\n\n".join([table, *self.matrices.plans_of_ranks()])

    def skipped_steps(self) -> int:
        """How many steps were skipped; waits for the device."""
        return self.matrices.skipped_steps()

    # Groups and rates.

    @property
    def param_groups(self) -> list[Group]:  # type: ignore[override]
        """Groups of the matrices, those of AdamW, and those that were added."""
        of_matrices = self.matrices.param_groups
        first = self._groups_at_first
        return JoinedGroups([*of_matrices[:first], *self._adam_groups, *of_matrices[first:]])

    @property
    def _adam_groups(self) -> list[Group]:
        if self.adamw is None:
            return []
        groups = self.adamw.param_groups
        for group in groups:  # users may add one to AdamW
            if ADAM_LR not in group:
                group[ADAM_LR] = float(group["lr"])  # a tensor may be changed in place
            group.setdefault(ADAM_LR_AT, groups[0][ADAM_LR_AT])
            group.setdefault(LAST_LR, 0.0)  # before the first step
            group.setdefault(STATE_OF, name_in_states(type(self.matrices)))
        return groups

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of matrices."""
        self.matrices.add_param_group(param_group)
        try:
            self._check_apart(self.matrices.param_groups[-1]["params"])
        except ValueError:
            self.matrices.param_groups.pop()
            raise

    def _check_apart(self, matrices: Sequence[Tensor]) -> None:
        if not set(matrices).isdisjoint(parameters_in(self._adam_groups)):
            raise ValueError("some parameters appear in more than one parameter group: they are AdamW's already")

    def _set_rates(self) -> None:
        """Take one rate that all groups were given for that of the matrices."""
        groups = self.param_groups
        of_adamw = self._adam_groups
        if any(isinstance(group["lr"], Tensor) and group["lr"].is_cuda for group in groups):
            return  # to compare them would wait for the device
        if all(group["lr"] == group[LAST_LR] for group in of_adamw):
            return  # the matrices alone may have been given another one
        lr, first = groups[0]["lr"], groups[0].get("initial_lr")
        if all(group["lr"] == lr and group.get("initial_lr") == first for group in groups):
            for group in of_adamw:
                if group[ADAM_LR_AT] > 0:
                    group["lr"] = group[ADAM_LR] * (lr / group[ADAM_LR_AT])
        for group in of_adamw:
            group[LAST_LR] = float(group["lr"])

    # The step.

    @property
    def _step_supports_amp_scaling(self) -> bool:
        if not self.matrices._session.scalable:
            check_scalable(self.param_groups, self.matrices.pg_collection)
        return self.matrices._step_supports_amp_scaling

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the matrices, then AdamW; both check their gradients before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._sort_state()
        groups = self._adam_groups
        check_gradients(self._of_adamw, parameters_in(groups), groups, False)
        session = self.matrices._session
        session.after_step = self._step_adamw
        session.after_step_groups = groups
        try:
            self.matrices.step()
        finally:
            session.after_step = None
            session.after_step_groups = ()
        return loss

    def _step_adamw(self, ok: Flag) -> None:
        if self.adamw is not None:
            self.matrices._session.changing = True
            self._set_rates()
            self.adamw.step_if(ok)

    # State.

    @property  # type: ignore[override]
    def state(self) -> State:
        """State of all parameters, made when it is first read."""
        if not self.matrices.state:  # torch.distributed.checkpoint would make a step to have it
            self.init_state()
        if self.adamw is None:
            return self.matrices.state
        self._sort_state()
        return JoinedState(self.matrices.state, self.adamw.state, parameters_in(self.adamw.param_groups))

    @state.setter
    def state(self, state: State) -> None:
        self.matrices.state = defaultdict(dict, state)
        if self.adamw is not None:
            self.adamw.state = defaultdict(dict)
            self._sort_state()

    def _sort_state(self) -> None:
        """Give AdamW the state of its parameters."""
        if self.adamw is not None:
            kept = self.matrices.state  # also of those that were in no group when their state was set
            for parameter in filter(kept.__contains__, parameters_in(self.adamw.param_groups)):
                self.adamw.state[parameter] = kept.pop(parameter)

    def init_state(self) -> None:
        """Create all state, as a checkpoint load needs it."""
        self.matrices.init_state()
        if self.adamw is not None:
            forget_replaced(self._of_adamw, self.adamw.state, parameters_in(self._adam_groups))
            self.adamw.init_state()

    def state_dict(self) -> dict[str, Any]:
        """Return both states: see the class."""
        self.matrices.refuse_half_step()
        self.init_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both states.

        Raises:
            TypeError: if it has anything else in place of a tensor.
            ValueError: as the optimizer of matrices, and for groups or state of AdamW that do not fit.

        Nothing is changed then.
        """
        state_dict = hooked(self, self._called, state_dict)
        if any("ns_coefficients" in group for group in state_dict["param_groups"]):
            raise ValueError(
                f"{self._called} cannot load a state of torch.optim.Muon, whose momentum is another: "
                "TensorParallelMuon loads it"
            )
        of_matrices, of_adamw = _by_optimizer({**state_dict, "state": apart(state_dict["state"])})
        check_writer(type(self.matrices), of_matrices)
        of_adamw["param_groups"] = self._adam_groups_to_load(of_adamw["param_groups"])
        self._check_adamw(of_adamw)
        self.matrices.load_state_dict(of_matrices)
        if self.adamw is not None:
            self.adamw.load_state_dict(of_adamw)
        hook_loaded(self)

    def _adam_groups_to_load(self, saved: Sequence[Group]) -> list[Group]:
        """AdamW's saved groups, with the present settings where they lack one."""
        groups = self._adam_groups
        own = [len(group["params"]) for group in groups]
        of_state = [len(group["params"]) for group in saved]
        if own != of_state:
            raise ValueError(
                f"{self._called} has AdamW inside with groups of {own} parameters, but the state has {of_state}: build "
                "the optimizer for the model as it was. Where another optimizer wrote the state, such as AdamW for all "
                "parameters, load the weights alone, and begin with fresh state; optimizer.matrices.load_state_dict "
                "takes a state of the matrices alone"
            )
        if self.adamw is None:
            return []
        needed = (*self.adamw.defaults, ADAM_LR_AT, LAST_LR)
        return [{key: group[key] for key in needed} | each for group, each in zip(groups, saved, strict=True)]

    def _check_adamw(self, of_adamw: Mapping[str, Any]) -> None:
        """Refuse groups and state that AdamW could not go on from."""
        for group in of_adamw["param_groups"]:
            check_values(self._of_adamw, OF_ADAMW, group)
        parameters = parameters_in(self.param_groups)
        called = dict(zip(parameters, parameter_names(self.param_groups), strict=True))
        described: dict[Tensor, list[StateTensor]] = {}
        loaded = []
        lacking = []
        for group, of_group in zip(self._adam_groups, of_adamw["param_groups"], strict=True):
            for parameter, index in zip(group["params"], of_group["params"], strict=True):
                described[parameter] = state_tensors(of_group)
                if index in of_adamw["state"]:
                    loaded.append((parameter, of_adamw["state"][index]))
                elif parameter.requires_grad:
                    lacking.append(called[parameter])
        check_loaded(self._of_adamw, loaded, described.__getitem__, self.matrices.matrix_layouts, called)
        warn_reinitialized(self._of_adamw, lacking)


class Muon(WithAdamW):
    """Muon for matrices, AdamW for the rest: one torch optimizer.

    Its updates have Jordan's size, for rates such as 0.02. ``build_optimizer(model, "muon", lr=3e-4)`` is what is
    recommended: updates as large as AdamW's.

    For a matrix ``W`` (m x n) with gradient ``g``, in this order:

    1. ``M <- momentum M + g``, kept as ``momentum_buffer``;
    2. ``W <- (1 - lr weight_decay) W``;
    3. ``W <- W - lr max(1, m/n)^0.5 O``, with ``O`` the orthogonal factor of ``M`` by ``ns_steps`` steps of
       ``X <- a X + (b A + c A^2) X``, ``A = X X^T``, from ``M / |M|_F``; (a, b, c) = (3.4445, -4.7750, 2.0315) [1].

    DTensors are orthogonalized as whole matrices. More than two dimensions are read as a matrix, the first one times
    the rest; a declared stack stays one.

    A group of matrices has its ``lr``, ``momentum``, ``weight_decay`` and ``ns_steps``. Groups, rates, state and steps
    are those of :class:`WithAdamW`, which takes another optimizer of matrices in place of Muon.

    Args:
        muon_params: matrices, named ones or groups of them; embeddings and output layers better go below.
        adam_params: all other parameters, or groups of them with their own ``lr``, ``betas``, ``eps`` or
            ``weight_decay`` (else torch's 0.01). May be empty.
        lr: of the matrices.
        momentum: in [0, 1).
        weight_decay: of the matrices, decoupled.
        adam_betas: of AdamW.
        adam_eps: of AdamW, above 0.
        ns_steps: Newton-Schulz steps, 1 to 100.
        adam_lr: of AdamW; None for ``lr``.
        adam_fused: whether AdamW uses torch's fused kernel on a CPU, too.
        **muon_settings: further arguments of
            :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon`, such as ``coefficient_type``,
            ``fp32_matmul_prec``, ``nesterov``, ``tp_mode`` (``auto`` here), and ``execution``.

    Attributes:
        matrices: the optimizer of matrices.
        adamw: ``torch.optim.AdamW``; None where it has no parameters.

    Raises:
        TypeError: for an unknown argument, with the nearest one, and for a tensor in place of a list.
        ValueError: for a setting out of its range, one of ``muon_params`` with fewer than two dimensions, no matrices
            at all, a parameter that is in both, or a DTensor of which a rank holds several separate parts.

    [1] K. Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024).
    """

    def __init__(
        self,
        muon_params: ParamsT,
        adam_params: ParamsT,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        ns_steps: int = 5,
        adam_lr: float | None = None,
        *,
        adam_fused: bool | None = False,
        **muon_settings: Any,
    ) -> None:
        taken = {**inspect.signature(Muon).parameters, **settings_of(HeavyBallMuon)}
        known = [name for name in taken if name != "muon_settings"]
        check_arguments(type(self).__name__, muon_settings, known)
        for name, params in (("muon_params", muon_params), ("adam_params", adam_params)):
            if isinstance(params, Tensor):
                raise TypeError(f"{name} must be a list of parameters or of groups, got one tensor: pass [tensor]")
        muon = HeavyBallMuon(
            muon_params,
            ns_steps,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            **muon_settings,
        )
        if "fp32_matmul_prec" not in muon_settings and any(p.is_cuda for p in muon._parameters()):
            warn(
                f"{type(self).__name__} multiplies in fp32, as its original does: fp32_matmul_prec='medium' took a "
                "twelfth of the time for 1.3B on an H200, and 'highest' says that you want it so"
            )
        adam_settings = {
            "lr": lr if adam_lr is None else adam_lr,
            "betas": adam_betas,
            "eps": adam_eps,
            "fused": adam_fused or None,  # False would also turn off what torch takes by itself
        }
        super().__init__(muon, adam_params, adam_settings)


def _adamw_of(called: str, params: list[Any], settings: Mapping[str, Any]) -> AdamW | None:
    """AdamW of parameters or groups, or None without any."""
    defaults = {key: argument.default for key, argument in inspect.signature(AdamW).parameters.items()}
    groups = params if params and isinstance(params[0], dict) else [{}]
    for group in groups:
        warn_of_idle(called, group, defaults)
        check_values(called, OF_ADAMW, {**defaults, **settings, **group})
    if not params:
        return None
    adamw = AdamW(params, **settings)
    return adamw if any(group["params"] for group in adamw.param_groups) else None


def _by_optimizer(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dicts of the matrices and of AdamW."""
    groups = state_dict["param_groups"]
    of_adamw = [group for group in groups if ADAM_LR in group]
    of_matrices = [group for group in groups if ADAM_LR not in group]
    indices = {index for group in of_adamw for index in group["params"]}
    state = state_dict["state"]
    return (
        {"state": {i: x for i, x in state.items() if i not in indices}, "param_groups": of_matrices},
        {"state": {i: x for i, x in state.items() if i in indices}, "param_groups": of_adamw},
    )
