"""Schedule-Free AdamW: gradients at one point, evaluation at an average."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.orthogonalize.choices import check_count
from megatron_eopt.parallel.layout import Layout, on_one_rank
from megatron_eopt.settings.groups import warn
from megatron_eopt.settings.records import ADAM, Setting
from megatron_eopt.settings.values import AT_LEAST_0, FINITE, Scalar, count
from megatron_eopt.step import foreach
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.parameters import TensorParallelGroups, local
from megatron_eopt.step.state import EXP_AVG_SQ, StateTensor

Variant = Literal["kempnerforge", "schedulefree"]

Z = "z"
X = "x"
KEPT = "y"

SCHEDULE = "schedule"  # three numbers in fp64: steps of a parameter, the sum of their weights, the largest rate so far
# Settings of a group: steps of the optimizer so far, the same in all, and whether parameters are at y.
COUNT = "k"
TRAIN_MODE = "train_mode"
WEIGHTED = ("variant", ("schedulefree",))  # with which settings of weights have an effect


class ScheduleFreeAdamW(BaseOptimizer):
    """AdamW without a schedule [1]: use a constant learning rate.

    ``z`` makes the steps; ``x`` averages its path, and is what to evaluate and export; gradients are taken at
    ``y = (1 - beta1) z + beta1 x``. **The parameter is at y while training, and at x between** :meth:`eval_params`
    **and** :meth:`train_params`; :attr:`live` says which.

    In step ``k`` with gradient ``g`` and ``l = lr * min(1, k / warmup_steps)``:

    1. ``v <- beta2 v + (1 - beta2) g^2``, ``u = g / (sqrt(v / (1 - beta2^k)) + eps)``;
    2. ``z``, decay and the weight ``w`` of the step:

       - ``kempnerforge``: ``z <- (1 - l weight_decay) (z - l u)``, ``w = l`` (times ``1 - beta1``, which cancels);
       - ``schedulefree``, the authors' package: ``z <- z - l (u + weight_decay y)``, ``w = k^r`` (largest ``l`` so
         far)^``weight_lr_power``;
    3. ``x <- x + (z - x) w / sum(w)``; ``y`` follows.

    ``z`` and ``v`` are kept in fp32 (fp64 for fp64 parameters), and ``x`` too where ``y`` is rounded (parameters of 16
    bits) or ``beta1`` is below 0.5. ``k`` counts the steps of the optimizer, also for a parameter that joins late.
    ``sum(w)`` is over the steps that the parameter took (the authors' package counts all steps of its group). All is
    elementwise: parameters of any shape, shards and DTensors. Betas stay as they are once steps were made.

    A state dict is of the mode in which it is taken, and goes with parameters saved at the same time: in evaluation it
    holds ``y`` as well, and :meth:`train_params` after a load goes on bit for bit. State dicts of KempnerForge's
    optimizer load too, after the weights: where these are at its ``x``, it was saved in evaluation.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, at least 0.
        betas: ``beta1`` of the point of gradients and ``beta2`` of their squares, each in [0, 1).
        eps: added to the root of ``v``, above 0.
        weight_decay: at least 0.
        warmup_steps: steps of the optimizer in which the rate grows linearly, at least 0.
        variant: ``kempnerforge`` or ``schedulefree``.
        r: power of ``k`` in the weights of ``schedulefree``.
        weight_lr_power: power of the largest rate there, at least 0.
        maximize: ascend instead of descend.
        pg_collection: the process groups of sharded parameters, to agree on gradients that are not finite.

    Raises:
        ValueError: for a setting out of its range, or for a group added between :meth:`eval_params` and
            :meth:`train_params`.

    [1] Defazio et al., The Road Less Scheduled, arXiv 2405.15682.
    """

    elementwise = True
    own_settings = (
        *ADAM,
        Setting("warmup_steps", "Steps in which its rate grows; take --lr-decay-style constant with it.", count(0)),
        Setting(
            "variant",
            "Weights of the average: kempnerforge takes the rate; schedulefree a power of the largest rate so far, and "
            "decays by y.",
        ),
        Setting(
            "r", "For schedulefree: power of a step's number in the weight of the step.", FINITE, only_with=WEIGHTED
        ),
        Setting(
            "weight_lr_power",
            "For schedulefree: power of the largest rate in the weight of a step.",
            AT_LEAST_0,
            only_with=WEIGHTED,
        ),
    )
    persistent_group_keys = frozenset({TRAIN_MODE, COUNT})
    counters = frozenset({COUNT})
    train_weight_key = KEPT
    weight_keys = (Z, X, KEPT)

    _first_rates: list[float | None] | None = None  # of the groups; None of one that is a tensor
    _warned: bool = False  # whether a change of them was warned of

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 0.025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        variant: Variant = "kempnerforge",
        *,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        maximize: bool = False,
        pg_collection: TensorParallelGroups | None = None,
    ) -> None:
        super().__init__(params, locals())

    def _check_group(self, group: dict[str, Any]) -> None:
        name = type(self).__name__
        if self.live == "x":
            raise ValueError(f"{name}: parameters are at x, for evaluation: call train_params() before adding a group")
        group[TRAIN_MODE] = True
        group[COUNT] = max((other[COUNT] for other in self.param_groups if other is not group), default=0)

    @property
    def live(self) -> Literal["x", "y"]:
        """Where the parameters are: ``y`` to train, ``x`` to evaluate."""
        return "y" if all(group.get(TRAIN_MODE, True) for group in self.param_groups) else "x"

    @property
    def warmup_steps(self) -> int:
        """Of the first group; setting it sets that of all."""
        return int(self.param_groups[0]["warmup_steps"])

    @warmup_steps.setter
    def warmup_steps(self, steps: int) -> None:
        check_count(f"{type(self).__name__}: warmup_steps", steps, 0)
        for group in (self.defaults, *self.param_groups):
            group["warmup_steps"] = steps

    @torch.inference_mode(False)  # whose tensors could not be state
    @torch.no_grad()
    def eval_params(self) -> None:
        """Set the parameters to ``x``, for evaluation and export."""
        for group in self.param_groups:
            if not group[TRAIN_MODE]:
                continue
            for parameter in group["params"]:
                self._begun_state(parameter)  # of all, as train_params() asks for it
                average = self.average(parameter)
                self.state[parameter][KEPT] = parameter.detach().clone()
                parameter.copy_(average)
            group[TRAIN_MODE] = False

    @torch.no_grad()
    def train_params(self) -> None:
        """Set the parameters back to ``y``, bit for bit."""
        for group in self.param_groups:
            if group[TRAIN_MODE]:
                continue
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter].pop(KEPT, parameter))  # whoever emptied the state begins at x
            group[TRAIN_MODE] = True

    # as the schedulefree package calls them
    train = train_params
    eval = eval_params

    @torch.no_grad()
    def average(self, parameter: Tensor) -> Tensor:
        """A copy of ``x``, in the parameter's dtype and layout."""
        state = self.state.get(parameter, {})
        if KEPT in state or SCHEDULE not in state:
            return parameter.detach().clone()
        state = self._begun_state(parameter)
        if X in state:
            return state[X].to(parameter.dtype, copy=True)
        beta1 = self.group_of(parameter)["betas"][0]
        return state[Z] + (parameter.detach() - state[Z]) / beta1

    def exported(self, parameter: Tensor) -> Tensor:
        """Return ``x``: see :meth:`average`."""
        return self.average(parameter)

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """``z``, ``v``, the schedule, and ``x`` or ``y`` where needed."""
        group = self.group_of(parameter)
        wide = torch.promote_types(parameter.dtype, torch.float32)
        # below 0.5 y has too little of x in it, and its rounding is multiplied by 1 / beta1
        derived = parameter.dtype == wide and group["betas"][0] >= 0.5
        tensors = [
            StateTensor(Z, dtype=wide),
            StateTensor(EXP_AVG_SQ, dtype=wide, non_negative=True),
            StateTensor(SCHEDULE, dims=(3,), dtype=torch.float64, non_negative=True),
        ]
        if not derived:
            tensors.append(StateTensor(X, dtype=wide))
        if not group[TRAIN_MODE]:
            tensors.append(StateTensor(KEPT))
        return tensors

    def matrix_layouts(self, parameter: Tensor) -> list[Layout]:
        """Return one column: all state is elementwise."""
        return [on_one_rank((parameter.numel(), 1))]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state and its mode, KempnerForge's too."""
        before = [(group, group[TRAIN_MODE]) for group in self.param_groups]
        try:
            super().load_state_dict(state_dict)
        except Exception:
            for group, mode in before:
                group[TRAIN_MODE] = mode
            raise

    def _to_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict = from_kempnerforge(state_dict, self._parameters())
        saved_groups = [{TRAIN_MODE: True, **group} for group in state_dict["param_groups"]]
        for group, saved in zip(self.param_groups, saved_groups, strict=False):
            group[TRAIN_MODE] = saved[TRAIN_MODE]  # of it depends what a state has
        return {**state_dict, "param_groups": saved_groups}

    def _loaded(self) -> None:
        for parameter in self._parameters():
            if X not in {tensor.key for tensor in self.state_tensors(parameter)}:
                self.state.get(parameter, {}).pop(X, None)

    def _check_gradients(self, parameters: Sequence[Tensor]) -> None:
        if self.live == "x":
            raise RuntimeError(
                f"{type(self).__name__} steps with gradients taken at y, but the parameters are at x, for evaluation: "
                "call train_params() before the forward pass"
            )
        super()._check_gradients(parameters)

    def _warn_of_schedule(self) -> None:
        rates = [None if isinstance(group["lr"], Tensor) else group["lr"] for group in self.param_groups]
        if self._first_rates is None or len(self._first_rates) != len(rates):
            self._first_rates = rates
        if self._warned:
            return
        for number, (first, rate) in enumerate(zip(self._first_rates, rates, strict=True)):
            if first == 0:  # torch's checkpoints make a step at that rate to begin a state
                self._first_rates[number] = rate
            if not first or rate is None or first == rate:
                continue
            self._warned = True
            warn(
                f"{type(self).__name__} needs no schedule of the learning rate, and that of group {number} went from "
                f"{first:g} to {rate:g}: take a constant rate, and its own warmup_steps"
            )
            return

    def _take(self, ok: Flag) -> None:
        self._warn_of_schedule()
        self._session.changing = True
        for group in self.param_groups:
            group[COUNT] += 1
        for group, parameters in foreach.active(self.param_groups, ok, lambda p: X in self._begun_state(p)):
            schedule_free_adamw(parameters, [self._begun_state(p) for p in parameters], ok, group)

    def _begun_state(self, parameter: Tensor) -> dict[str, Any]:
        """A parameter's state; ``z`` and ``x`` start at the parameter."""
        state = self._states.of(parameter, SCHEDULE)
        if not self._has_begun(parameter, SCHEDULE):
            new = state[SCHEDULE][0] == 0
            for key in {Z, X} & state.keys():
                point = local(state[key])
                point.copy_(torch.where(new, local(parameter).to(point.dtype), point))
            self._note_begun(parameter, SCHEDULE)
        return state


def advance_schedules(states: Sequence[dict[str, Tensor]], ok: Flag, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Advance schedules; returns rates of this step, and the share that its ``z`` has in ``x``."""
    schedules = [state[SCHEDULE] for state in states]
    count = group[COUNT]
    warmup = group["warmup_steps"]
    schedule = torch.stack(schedules)
    steps_made = torch.ones_like(schedule[:, 0]) if ok is None else ok.double().expand(len(schedule))
    rates = group["lr"] * (min(1.0, count / warmup) if warmup else 1.0) * steps_made
    largest = torch.maximum(schedule[:, 2], rates)
    weights = rates
    if group["variant"] == "schedulefree":
        weights = count ** group["r"] * largest ** group["weight_lr_power"]
    total = schedule[:, 1] + weights
    shares = torch.where(total > 0, weights / total, 0.0) * steps_made  # rates may all have been zero
    advanced = list(torch.stack([schedule[:, 0] + 1, total, largest], dim=1).unbind())
    torch._foreach_copy_(schedules, foreach.where_each(ok, advanced, schedules))
    return rates, shares


def schedule_free_adamw(
    parameters: Sequence[Tensor], states: Sequence[dict[str, Tensor]], ok: Flag, group: dict[str, Any]
) -> None:
    """One step; all parameters have an ``x``, or none.

    Without: ``y += share (z - y) - (1 - beta1 (1 - share)) step``, with ``z`` before its step. Nothing waits for a GPU.
    """
    ys = [local(p) for p in parameters]
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    zs = [local(state[Z]) for state in states]
    xs = [local(state[X]) for state in states if X in state]
    squares = [local(state[EXP_AVG_SQ]) for state in states]
    beta1, beta2 = group["betas"]
    kempnerforge = group["variant"] == "kempnerforge"
    weight_decay = group["weight_decay"]

    rates, shares = advance_schedules(states, ok, group)

    gradients = [g.to(v.dtype) for g, v in zip(gradients, squares, strict=True)]
    gradients = foreach.where_each(ok, gradients, 0.0)
    foreach.follow_squares(squares, gradients, beta2, ok)
    roots = list(torch._foreach_div(squares, 1 - beta2 ** group[COUNT]))
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, group["eps"])
    steps = list(torch._foreach_div(gradients, roots))
    if group["maximize"]:
        torch._foreach_neg_(steps)

    if weight_decay != 0 and not kempnerforge:
        # in 16 bits y is rounded, and z would decay by its rounding
        decayed = list(torch._foreach_lerp(zs, xs, beta1)) if xs else ys
        torch._foreach_add_(steps, decayed, alpha=weight_decay)
    foreach.multiply_each(steps, rates, ok)
    if weight_decay != 0 and kempnerforge:
        after = torch._foreach_sub(zs, steps)
        foreach.multiply_each(after, rates * weight_decay, ok)
        torch._foreach_add_(steps, after)

    if xs:
        torch._foreach_sub_(zs, steps)
    averages = xs or ys
    towards = torch._foreach_sub(zs, averages)
    foreach.multiply_each(towards, shares, ok)
    torch._foreach_add_(averages, towards)
    if xs:
        torch._foreach_copy_(ys, foreach.where_each(ok, torch._foreach_lerp(zs, xs, beta1), ys))
    else:
        torch._foreach_sub_(zs, steps)
        foreach.multiply_each(steps, 1 - beta1 * (1 - shares), ok)
        torch._foreach_sub_(ys, steps)


def from_kempnerforge(state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Convert KempnerForge's state dict, or return ours; writes to neither.

    It does not say whether it was saved in evaluation: then all ``parameters``, which are loaded before, are at ``x``.
    """
    if "_k" not in state_dict:  # torch's get_optimizer_state_dict drops what is beside the groups
        if any("weight_sum" in state for state in state_dict["state"].values()):
            raise ValueError(
                "these states are of KempnerForge's ScheduleFreeAdamW, but the state dict has no '_k', the steps made "
                "so far, by which rates and second moments are corrected: set state_dict['_k'], and "
                "state_dict['_warmup_steps'] if there was a warmup"
            )
        return state_dict
    count = state_dict["_k"]
    groups = []
    states = {}
    for saved in state_dict["param_groups"]:
        group = {**saved, "variant": "kempnerforge", COUNT: count}
        if "_warmup_steps" in state_dict:
            group["warmup_steps"] = state_dict["_warmup_steps"]
        groups.append(group)
        for index in group["params"]:
            state = state_dict["state"].get(index)
            if state:
                total = state["weight_sum"] / (1 - group["betas"][0])  # theirs sums l (1 - beta1)
                schedule = torch.tensor([count, total, 0.0], dtype=torch.float64)
                states[index] = {Z: state["z"], EXP_AVG_SQ: state["v"], X: state["x"], SCHEDULE: schedule}
    indices = [index for group in groups for index in group["params"]]
    own = {index: p for index, p in zip(indices, parameters, strict=False) if index in states}
    ys = {}
    for group in groups:
        for index in own.keys() & set(group["params"]):
            ys[index] = torch.lerp(states[index][Z], states[index][X], group["betas"][0])
    at_x = [_is_at(p, states[index][X]) for index, p in own.items()]
    at_y = [_is_at(p, ys[index]) for index, p in own.items()]
    if all(at_x) and not all(at_y):
        for group in groups:
            group[TRAIN_MODE] = False
        for index, y in ys.items():
            states[index][KEPT] = y
    return {"state": states, "param_groups": groups}


def _is_at(parameter: Tensor, point: Tensor) -> bool:
    weight = local(parameter.detach())
    return torch.equal(weight, local(point).to(weight.device, weight.dtype))
