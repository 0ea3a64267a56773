"""Muon, or another optimizer of matrices, with AdamW inside."""

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.optimizer import Optimizer, ParamsT

from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.group_settings import check_adam_settings, plain, warn
from megatron_eopt.optimizers.heavy_ball_muon import HeavyBallMuon
from megatron_eopt.optimizers.nonfinite import check_gradients
from megatron_eopt.optimizers.parameters import NAME, check_parameters, check_scalable
from megatron_eopt.optimizers.state import (
    StateTensor,
    check_apart,
    check_finite,
    check_shape,
    check_state_dict,
    check_tensor,
    check_writer,
    note_begun_anew,
)
from megatron_eopt.optimizers.traits import STEPS
from megatron_eopt.optimizers.weight_average import average_of, without_unused
from megatron_eopt.orthogonalize.choices import check_named

ADAMW = "adamw"  # key of AdamW's settings in the first group; see also state_key()
INITIAL_LR = "initial_lr"

Group = dict[str, Any]


class Muon(Optimizer):
    """Muon for matrices, AdamW for the rest: one torch optimizer.

    For a matrix ``W`` (m x n) with gradient ``g``, in this order:

    1. ``M <- momentum M + g``, kept as ``momentum_buffer``;
    2. ``W <- (1 - lr weight_decay) W``;
    3. ``W <- W - lr max(1, m/n)^0.5 O``, with ``O`` the orthogonal factor of ``M`` by ``ns_steps`` steps of
       ``X <- a X + (b A + c A^2) X``, ``A = X X^T``, from ``M / |M|_F``; (a, b, c) = (3.4445, -4.7750, 2.0315) [1].

    DTensors are orthogonalized as whole matrices. More than two dimensions are read as a matrix, the first one times
    the rest; a declared stack stays one. :meth:`around` takes another optimizer of matrices in place of Muon.

    ``param_groups`` and ``state`` are those of the matrices: schedulers and loops see them alone. Each group has its
    ``lr``, ``momentum``, ``weight_decay`` and ``ns_steps``; a changed value is in force in the next step. AdamW's rates
    follow the first group of matrices in every step, unless that began with an lr of 0::

        lr of the group = its initial lr * (lr of the first group / initial lr of the first group)

    To change AdamW's rate by itself, set ``initial_lr`` of a group in ``optimizer.adamw.param_groups``: an ``lr`` set
    there is overwritten, with a warning.

    ``state`` and ``state_dict`` have both states. ``torch.distributed.checkpoint.state_dict`` drops all state that
    belongs to no parameter of the groups, so the state of the first matrix holds AdamW's tensors, as
    ``adamw.NAME.exp_avg`` and so on, and the first group its settings. A tensor that replaces one of them in ``state``
    is AdamW's from the next step on.

    A step leaves out matrices whose gradient is not finite. torch's AdamW does not: let a gradient clipper or scaler
    check, or its parameters become NaN. torch's ``GradScaler`` unscales both, and skips both steps.

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
        adam_fused: whether AdamW uses torch's fused kernel; otherwise torch chooses.
        **muon_settings: further arguments of
            :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon`, such as ``coefficient_type``,
            ``fp32_matmul_prec``, ``nesterov``, ``tp_mode`` (``auto`` here), and under DDP ``data_parallel_group``.

    Attributes:
        matrices: the optimizer of matrices.
        adamw: ``torch.optim.AdamW``; None where it has no parameters.
        initial_lr: of the first group.

    Raises:
        TypeError: for an unknown argument, with the nearest one, and for an ``adam_fused`` that is no bool.
        ValueError: for a setting out of its range, one of ``muon_params`` with fewer than two dimensions, no matrices
            at all, a parameter that is in both, or a DTensor of which a rank holds several separate parts.

    [1] K. Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024).
    """

    # On the class, because torch leaves the attributes of an optimizer out of its pickles and copies.
    _carried: Mapping[str, Tensor] = MappingProxyType({})  # AdamW's tensors, as the state of the first matrix got them
    _adam_rates: Sequence[Any] = ()  # of AdamW's groups, as the last step left them
    _warned: bool = False  # whether a change of them was warned of

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
        if not isinstance(adam_fused, bool | None):
            raise TypeError(f"{type(self).__name__}: adam_fused must be True or False, got {adam_fused!r}")
        if isinstance(adam_params, Real):
            raise TypeError(
                f"{type(self).__name__} takes matrices, all other parameters and then lr, got {adam_params!r} in place "
                f"of the parameters: pass [] if there are none, and settings by name"
            )
        taken = {**inspect.signature(Muon).parameters, **inspect.signature(HeavyBallMuon).parameters}
        known = [name for name in taken if name not in ("muon_settings", "params", STEPS)]
        check_named(type(self).__name__, muon_settings, known)
        settings: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "num_ns_steps": ns_steps,
        }
        as_in_the_original = {"nesterov": False, "scale_mode": "shape_scaling", "coefficient_type": "simple"}
        exact = {"fp32_matmul_prec": "highest", "tp_mode": "auto"}
        muon = HeavyBallMuon(listed(muon_params), **settings, **{**as_in_the_original, **exact, **muon_settings})
        if "fp32_matmul_prec" not in muon_settings and any(p.is_cuda for p in muon._parameters()):
            warn(
                f"{type(self).__name__} multiplies in fp32, as its original does: fp32_matmul_prec='medium' took a "
                f"twelfth of the time for 1.3B on an H200, and 'highest' says that you want it so"
            )
        # fused=False would also turn off what torch takes by itself
        adam: dict[str, Any] = {"betas": adam_betas, "eps": adam_eps, "fused": adam_fused or None}
        self._join(muon, adam_params, {"lr": lr if adam_lr is None else adam_lr, **adam})

    @classmethod
    def around(cls, matrices: BaseOptimizer, adam_params: ParamsT, adam_settings: Mapping[str, Any]) -> Self:
        """Combine an optimizer of matrices with AdamW for the rest.

        Args:
            matrices: any of this package's, with at least one parameter.
            adam_params: as for :class:`Muon`.
            adam_settings: arguments of ``torch.optim.AdamW``.

        Raises:
            TypeError: for ``matrices`` that are no optimizer of matrices of this package.
            ValueError: for a setting of AdamW out of its range, and for a parameter that is in both.
        """
        if not isinstance(matrices, BaseOptimizer):
            raise TypeError(
                f"{cls.__name__}.around takes an optimizer of matrices of this package, such as Scion, got "
                f"{type(matrices).__name__}"
            )
        made = cls.__new__(cls)
        made._join(matrices, adam_params, adam_settings)
        return made

    def _join(self, matrices: BaseOptimizer, adam_params: ParamsT, adam_settings: Mapping[str, Any]) -> None:
        self.matrices = matrices
        if not matrices._parameters():
            raise ValueError(f"{self._called} needs at least one matrix: for all else take torch.optim.AdamW")
        self.initial_lr = float(matrices.param_groups[0]["lr"])
        given = listed(adam_params)
        defaults = {key: argument.default for key, argument in inspect.signature(AdamW).parameters.items()}
        for group in given if given and isinstance(given[0], dict) else [{}]:
            check_adam_settings(f"AdamW in {self._called}", {**defaults, **adam_settings, **group})
        adamw = AdamW(given, **adam_settings) if given else None
        self.adamw = adamw if adamw is not None and any(group["params"] for group in adamw.param_groups) else None
        for index, group in enumerate(self._adam_groups):
            check_parameters(f"AdamW in {self._called}", self._adam_groups[: index + 1])
            group.setdefault(INITIAL_LR, float(group["lr"]))  # a tensor may be changed in place
        numbered = ((number, plain(group)) for number, group in enumerate(self._adam_groups))
        matrices._session.beside = {
            f"AdamW's {key} of group {n}": x for n, group in numbered for key, x in group.items()
        }
        self._adam_rates = [group["lr"] for group in self._adam_groups]
        super().__init__(matrices.param_groups, matrices.defaults)
        self.param_groups, self.state = matrices.param_groups, matrices.state  # the same objects

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, but no argument, which has no effect later."""
        if "matrices" in vars(self) and name not in vars(self) and name in _arguments():
            raise ValueError(
                f"{self._called}: the attribute {name} has no effect: set it in param_groups, or of optimizer.matrices "
                f"or optimizer.adamw"
            )
        super().__setattr__(name, value)

    @property
    def _called(self) -> str:
        return type(self if isinstance(self.matrices, HeavyBallMuon) else self.matrices).__name__

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, self._called, 1)

    @property
    def param_groups(self) -> list[Group]:
        """Groups of the matrices; for torch's GradScaler also AdamW's."""
        groups: list[Group] = self.__dict__["param_groups"]
        # it unscales what it finds here and asks nothing else before, so it is told by the function's name
        return [*groups, *self._adam_groups] if sys._getframe(1).f_code.co_name == "_unscale_grads_" else groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def _step_supports_amp_scaling(self) -> bool:
        if not self.matrices._session.scalable:
            check_scalable([*self.param_groups, *self._adam_groups], self.matrices.pg_collection)
        return self.matrices._step_supports_amp_scaling

    @property
    def _adam_groups(self) -> list[Group]:
        return [] if self.adamw is None else self.adamw.param_groups

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of matrices."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else listed(params)
        of_adamw = {p for group in self._adam_groups for p in group["params"]}
        if any((item[1] if isinstance(item, tuple) else item) in of_adamw for item in params):
            raise ValueError("some parameters appear in more than one parameter group: they are AdamW's already")
        if self.param_groups is self.matrices.param_groups:  # else torch's constructor hands on what is there
            self.matrices.add_param_group({**param_group, "params": params})

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, AdamW's too."""
        super().zero_grad(set_to_none)
        if self.adamw is not None:
            self.adamw.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the matrices, then AdamW; both check their gradients before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self._adam_groups  # AdamW would refuse its gradients when the matrices have made their step
        check_gradients(f"AdamW in {self._called}", [p for group in groups for p in group["params"]], groups, False)
        self.matrices._session.also = self._step_adamw
        try:
            self.matrices.step()
        finally:
            self.matrices._session.also = None
        return loss

    def _step_adamw(self) -> None:
        if self.adamw is not None:
            self.matrices._session.changing = True
            if self.initial_lr > 0:
                ratio = self.param_groups[0]["lr"] / self.initial_lr
                rates = [group.setdefault(INITIAL_LR, group["lr"]) * ratio for group in self._adam_groups]
                self._warn_of_rates(rates)
                for group, rate in zip(self._adam_groups, rates, strict=True):
                    group["lr"] = rate
                self._adam_rates = rates
            state = self.state.get(self._carrier, {})
            if not self._carried or any(state.get(key) is not x for key, x in self._carried.items()):
                self._carry()
            self.adamw.step()

    def _warn_of_rates(self, rates: Sequence[Any]) -> None:
        for index, (old, group) in enumerate(zip(self._adam_rates, self._adam_groups, strict=False)):
            if self._warned or isinstance(old, Tensor) or isinstance(group["lr"], Tensor) or group["lr"] == old:
                continue
            self._warned = True
            warn(
                f"{self._called}: lr of group {index} of optimizer.adamw was set to {group['lr']:g}, and the step "
                f"sets it to {rates[index]:g}, as it follows the first group of matrices: give a scheduler the "
                f"whole optimizer, or set {INITIAL_LR} of that group"
            )

    @property
    def _carrier(self) -> Tensor:
        """The matrix that carries AdamW's state; checkpoints drop frozen ones'."""
        parameters = self.matrices._parameters()
        return next((p for p in parameters if p.requires_grad), parameters[0])

    def _carry(self) -> None:
        """Put AdamW's state into the first matrix, taking replaced tensors."""
        if self.adamw is None:
            return
        self.matrices.init_state()
        groups = list(zip(self.adamw.param_groups, self._adam_names(), strict=True))
        state, carried, average = self.state[self._carrier], self._carried, average_of(self.adamw)
        replaced = {key: state[key] for key, x in carried.items() if key in state and state[key] is not x}
        for key, of_one in itertools.product(carried, self.state.values()):
            of_one.pop(key, None)
        for group, names in groups:
            for name, parameter in zip(names, group["params"], strict=True):
                of_one = self.adamw.state[parameter]
                if "step" not in of_one:  # as before AdamW's first step
                    device = parameter.device if group["capturable"] or group["fused"] else "cpu"
                    zeros = {key: torch.zeros_like(parameter) for key in _moments(group)}
                    of_one.update(step=torch.zeros((), dtype=torch.float32, device=device), **zeros)
                if average is not None:
                    average.begin(parameter)
                of_one.update({key: replaced.get(state_key(name, key), x) for key, x in of_one.items()})
                state.update({state_key(name, key): x for key, x in of_one.items()})
        self._carried = {key: x for key, x in state.items() if key.startswith(f"{ADAMW}.")}
        settings = tuple({**group, "params": names} for group, names in groups)
        self.param_groups[0][ADAMW] = {INITIAL_LR: self.initial_lr, "param_groups": settings}

    def _adam_names(self) -> list[list[str]]:
        """Names of AdamW's parameters by group, unique or indices."""
        groups = self._adam_groups
        known = [g.get("param_names") or [getattr(p, NAME, None) for p in g["params"]] for g in groups]
        flat = [name for of_group in known for name in of_group]
        if None in flat or len(set(flat)) < len(flat):
            indices = itertools.count()
            return [[str(next(indices)) for _ in of_group] for of_group in known]
        # torch's flat form of a state divides names at dots
        return [[name.replace(".", "/") for name in of_group] for of_group in known]

    def state_dict(self) -> dict[str, Any]:
        """Return both states: see the class."""
        self.matrices.refuse_half_step()
        self._carry()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both states, also from KempnerForge's Muon."""
        check_state_dict(self._called, state_dict)
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_writer(type(self.matrices), state_dict)
        of_matrices, of_adamw, initial_lr = self._apart(state_dict)
        before = [(part, dict(vars(part))) for part in (self.matrices, self.adamw) if part is not None]
        try:
            self.matrices.load_state_dict(of_matrices)
            if self.adamw is not None:
                self.adamw.load_state_dict(without_unused(self.adamw, of_adamw))
        except Exception:
            for part, attributes in before:
                vars(part).update(attributes)
            raise
        self.initial_lr = initial_lr
        self._adam_rates = [group["lr"] for group in self._adam_groups]
        self.param_groups, self.state = self.matrices.param_groups, self.matrices.state
        self._carry()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _apart(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], float]:
        groups = [{**self.defaults, **group} for group in state_dict["param_groups"]]
        settings = [group.pop(ADAMW) for group in groups if ADAMW in group]
        state = {key: dict(of_one) for key, of_one in state_dict["state"].items()}
        carried: dict[str, dict[str, Tensor]] = {}
        for of_one in state.values():
            carried |= of_one.pop(ADAMW, {})  # as earlier releases have it
            for key in [key for key in of_one if key.startswith(f"{ADAMW}.")]:
                _, name, tensor = key.split(".", 2)
                carried.setdefault(name, {})[tensor] = of_one.pop(key)
        of_adamw: dict[str, Any] = {"state": {}, "param_groups": []}
        initial_lr = self.initial_lr
        if "_adam_state" in state_dict:  # KempnerForge's
            of_adamw = dict(state_dict["_adam_state"])
            rate = {INITIAL_LR: state_dict["_initial_adam_lr"]} if "_initial_adam_lr" in state_dict else {}
            of_adamw["param_groups"] = [{**group, **rate} for group in of_adamw["param_groups"]]
            initial_lr = state_dict.get("_initial_lr", initial_lr)
        elif carried and settings:
            of_adamw = {"state": carried, "param_groups": settings[0]["param_groups"]}
            initial_lr = settings[0][INITIAL_LR]
        elif self.adamw is not None:
            raise ValueError(
                f"{self._called} has AdamW inside, but the state dict has no state of AdamW, without which it would "
                f"start anew in silence: save optimizer.state_dict() as it is, or load what there is of the matrices "
                f"by optimizer.matrices.load_state_dict"
            )
        of_adamw["param_groups"] = self._in_own_order(of_adamw["param_groups"])
        self._check_adamw(of_adamw)
        return {"state": state, "param_groups": groups}, of_adamw, float(initial_lr)

    def _check_adamw(self, of_adamw: Mapping[str, Any]) -> None:
        """Refuse a state that AdamW could not go on from."""
        layouts, called = self.matrices.matrix_layouts, f"AdamW in {self._called}"
        values: list[tuple[str, Tensor, torch.dtype]] = []
        lacking = []
        for saved, group in zip(of_adamw["param_groups"], self._adam_groups, strict=True):
            for name, parameter in zip(saved["params"], group["params"], strict=True):
                of_one = of_adamw["state"].get(name, {} if isinstance(name, str) else None)
                if of_one is None:  # KempnerForge has none of a parameter that never had a gradient
                    if parameter.requires_grad:
                        lacking.append(f"parameter {name}")
                    continue
                for key in ("step", *_moments(group)):
                    if key not in of_one:
                        raise ValueError(f"the state of AdamW's parameter {name} has no {key!r}, but {sorted(of_one)}")
                    found, of = of_one[key], f"{key!r} of parameter {name}"
                    if key == "step" and not isinstance(found, Tensor):  # a number in states of earlier torch
                        continue
                    check_tensor(called, of, found)
                    if key != "step":
                        check_shape(parameter, StateTensor(state_key(name, key)), layouts, found)
                    values.append((of, found, found.dtype if key == "step" else parameter.dtype))
        check_finite(called, values)
        check_apart(called, [(of, found) for of, found, _ in values])
        if of_adamw["state"]:
            note_begun_anew(called, lacking)

    def _in_own_order(self, saved: Sequence[Group]) -> list[Group]:
        known, of_saved = self._adam_names(), [list(group["params"]) for group in saved]
        if list(map(set, of_saved)) == list(map(set, known)):
            return [{**group, "params": names} for group, names in zip(saved, known, strict=True)]
        named = all(any(not str(name).isdigit() for group in groups for name in group) for groups in (known, of_saved))
        if named or list(map(len, of_saved)) != list(map(len, known)):
            raise ValueError(
                f"AdamW in {self._called} has groups of the parameters {known}, but the state was saved with "
                f"{of_saved}: build the optimizer for the model as it was"
            )
        return list(saved)

    def __getstate__(self) -> dict[str, Any]:
        kept = {"matrices": self.matrices, "adamw": self.adamw, "initial_lr": self.initial_lr}
        return {**super().__getstate__(), **kept}


def state_key(name: str, key: str) -> str:
    """AdamW's key in the first matrix's state."""
    return f"{ADAMW}.{name}.{key}"


def listed(params: Any) -> list[Any]:
    """List parameters or groups."""
    if isinstance(params, Tensor | set):  # a set has no order
        raise TypeError(f"parameters come as an ordered list, or as a list of groups, got a {type(params).__name__}")
    return list(params)


def _moments(group: Group) -> list[str]:
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]


@functools.cache
def _arguments() -> frozenset[str]:
    return frozenset(inspect.signature(Muon).parameters) | frozenset(inspect.signature(HeavyBallMuon).parameters)
