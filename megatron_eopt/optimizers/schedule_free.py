"""Schedule-Free AdamW: gradients at one point, evaluation at an average."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.orthogonalize.choices import check_count
from megatron_eopt.settings.groups import warn
from megatron_eopt.settings.records import ADAM, Setting
from megatron_eopt.settings.values import AT_LEAST_0, FINITE, Scalar, count
from megatron_eopt.step import foreach
from megatron_eopt.step.elementwise_optimizer import Batch, ElementwiseOptimizer
from megatron_eopt.step.foreach import copy_where
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


class ScheduleFreeAdamW(ElementwiseOptimizer):
    """AdamW without a schedule [1]: use a constant learning rate.

    ``z`` makes the steps; ``x`` averages its path, and is what to evaluate and export; gradients are taken at
    ``y = (1 - beta1) z + beta1 x``. **The parameter is at y while training, and at x between** :meth:`eval_params`
    **and** :meth:`train_params`; :attr:`live` says which.

    In step ``k`` of the optimizer, ``t`` of the parameter, with gradient ``g`` and ``l = lr * min(1, k /
    warmup_steps)``:

    1. ``v <- beta2 v + (1 - beta2) g^2``, ``u = g / (sqrt(v / (1 - beta2^t)) + eps)``;
    2. ``z``, decay and the weight ``w`` of the step:

       - ``kempnerforge``: ``z <- (1 - l weight_decay) (z - l u)``, ``w = l`` (times ``1 - beta1``, which cancels);
       - ``schedulefree``, the authors' package: ``z <- z - l (u + weight_decay y)``, ``w = k^r`` (largest ``l`` so
         far)^``weight_lr_power``;
    3. ``x <- x + (z - x) w / sum(w)``; ``y`` follows.

    ``z`` and ``v`` are kept in fp32 (fp64 for fp64 parameters), and ``x`` too where ``y`` is rounded (parameters of 16
    bits) or ``beta1`` is below 0.5. A parameter that joins late does not begin the warm-up anew, but ``t`` and
    ``sum(w)`` are of the steps that it took (the authors' package counts all steps of its group). All is elementwise:
    parameters of any shape, shards and DTensors. Betas stay as they are once steps were made.

    A state dict is of the mode in which it is taken, and goes with parameters saved at the same time: in evaluation it
    holds ``y`` as well, and :meth:`train_params` after a load goes on bit for bit.

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

    _first_rates: Mapping[int, float] = {}  # of groups, by their numbers
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state and its mode."""
        before = [(group, group[TRAIN_MODE]) for group in self.param_groups]
        try:
            super().load_state_dict(state_dict)
        except Exception:
            for group, mode in before:
                group[TRAIN_MODE] = mode
            raise

    def _to_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            group[TRAIN_MODE] = saved.get(TRAIN_MODE, True)  # of it depends what a state has
        return state_dict

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
        """Warn once of a rate that changes."""
        if self._warned:
            return
        for number, group in enumerate(self.param_groups):
            rate = group["lr"]
            if isinstance(rate, Tensor):  # to compare it would wait for the device
                continue
            first = self._first_rates.get(number) or rate  # torch's checkpoints begin a state by a step at rate 0
            self._first_rates = {**self._first_rates, number: first}
            if rate != first:
                self._warned = True
                warn(
                    f"{type(self).__name__} needs no schedule of the learning rate, and that of group {number} went "
                    f"from {first:g} to {rate:g}: take a constant rate, and its own warmup_steps"
                )
                return

    def _take(self, ok: Flag) -> None:
        self._warn_of_schedule()
        super()._take(ok)

    def _begin_state(self) -> list[int]:
        stepping = super()._begin_state()
        parameters = self._parameters()
        for index in stepping:
            self._begun_state(parameters[index])
        return stepping

    def _begun_state(self, parameter: Tensor) -> dict[str, Any]:
        """A parameter's state; ``z`` and ``x`` start at the parameter."""
        state = self._states.of(parameter, SCHEDULE)
        if not self._has_begun(parameter, SCHEDULE):
            new = state[SCHEDULE][0] == 0
            for key in {Z, X} & state.keys():
                point = local(state[key])
                copy_where(new, local(parameter).to(point.dtype), point)
            self._note_begun(parameter, SCHEDULE)
        return state

    def update(self, batch: Batch) -> None:
        """One step of equal parameters.

        All have an ``x``, or none: ``y += share (z - y) - (1 - beta1 (1 - share)) step`` then, with ``z`` before its
        step.
        """
        group = batch.group
        ok = batch.ok
        beta1, beta2 = group["betas"]
        weight_decay = group["weight_decay"]
        y = batch.weights
        z = batch.state(Z)
        x = batch.state(X)
        v = batch.state(EXP_AVG_SQ)
        numbers, rates, shares = advanced(batch)

        g = foreach.where_each(ok, batch.gradients(like=v), 0.0)
        foreach.follow_squares(v, g, beta2, ok)
        roots = foreach.divided_each(v, 1 - beta2**numbers, ok)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        steps = list(torch._foreach_div(g, roots))
        if weight_decay != 0 and group["variant"] == "schedulefree":
            # in 16 bits y is rounded, and z would decay by its rounding
            torch._foreach_add_(steps, torch._foreach_lerp(z, x, beta1) if x else y, alpha=weight_decay)
        steps = foreach.multiplied_each(steps, rates, ok)
        if weight_decay != 0 and group["variant"] == "kempnerforge":
            after = torch._foreach_sub(z, steps)
            torch._foreach_add_(steps, foreach.multiplied_each(after, rates * weight_decay, ok))

        if x:
            torch._foreach_sub_(z, steps)
            approach(x, z, shares, ok)
            torch._foreach_copy_(y, foreach.where_each(ok, torch._foreach_lerp(z, x, beta1), y))
        else:
            approach(y, z, shares, ok)
            torch._foreach_sub_(z, steps)
            torch._foreach_sub_(y, foreach.multiplied_each(steps, 1 - beta1 * (1 - shares), ok))


def advanced(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Advance schedules; returns each parameter's number of the step, rate, and share of ``z`` in ``x``."""
    group = batch.group
    count = group[COUNT]
    warmup = group["warmup_steps"]
    kept = batch.state(SCHEDULE)
    made, total, largest = torch.stack(kept).unbind(1)
    is_made = torch.ones_like(made) if batch.ok is None else batch.ok.double().expand(len(kept))
    rates = group["lr"] * (min(1.0, count / warmup) if warmup else 1.0) * is_made
    largest = torch.maximum(largest, rates)
    weights = rates
    if group["variant"] == "schedulefree":
        weights = count ** group["r"] * largest ** group["weight_lr_power"]
    total = total + weights
    shares = torch.where(total > 0, weights / total, 0.0) * is_made  # rates may all have been zero
    number = made + 1
    new = torch.stack([number, total, largest], dim=1)
    torch._foreach_copy_(kept, foreach.where_each(batch.ok, new.unbind(), kept))
    return number, rates, shares


def approach(points: list[Tensor], ends: list[Tensor], shares: Tensor, ok: Flag) -> None:
    """``x += share (z - x)`` for each."""
    torch._foreach_add_(points, foreach.multiplied_each(torch._foreach_sub(ends, points), shares, ok))
