"""Averages of weights beside any optimizer, in its state."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.optimizers.loaded_state import check_finite
from megatron_eopt.optimizers.parameters import local, parameter_names, parameters_in
from megatron_eopt.settings.groups import warn

AVERAGE = "weight_average"  # in the state of a parameter, in fp32 at least
SCHEDULE = "weight_average_schedule"  # beside it, three numbers in fp64: the rule's two, and how many steps are in it
TRAINED = "weight_trained"  # in checkpoints whose model is the average: the weights in fp32 that are trained
_FORMS = "ema:DECAY with 0 < DECAY < 1, such as ema:0.999, or tail:STEPS with at least one step, such as tail:200"


@dataclass(frozen=True)
class AverageRule:
    """Which average: one of ``decay`` and ``window`` is set, the other 0."""

    decay: float = 0.0
    window: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``ema:DECAY`` or ``tail:STEPS``."""
        kind, _, number = str(text).partition(":")
        if kind == "tail" and number.isdecimal() and int(number) > 0:
            return cls(window=int(number))
        if kind == "ema":
            with suppress(ValueError):
                decay = float(number)
                if 0 < decay < 1:
                    return cls(decay=decay)
        raise ValueError(f"an average of weights is {_FORMS}, got {text!r}")

    @classmethod
    def of(cls, schedule: Sequence[float]) -> Self:
        """Read the first two numbers of a :data:`SCHEDULE`."""
        return cls(schedule[0], int(schedule[1]))

    def __str__(self) -> str:
        return f"tail:{self.window}" if self.window else f"ema:{self.decay}"

    def share(self, steps: int) -> float:
        """Share of the newest weights in an average of so many."""
        return 1 / steps if self.window else (1 - self.decay) / (1 - self.decay**steps)


class WeightAverage:
    """An average of the weights after each step of one or more optimizers.

    After step ``t`` with the weights ``w``:

    - ``ema:d``: ``a <- a + (w - a) (1 - d) / (1 - d^t)``, which is the average with weights ``d^(t - s)`` of the steps
      ``s = 1 ... t`` [1, section 7.2]: the correction of the bias leaves no trace of what was before the first step;
    - ``tail:N``: ``a <- a + (w - a) / m`` in the ``m``-th step of a window of ``N`` steps, the mean over the window so
      far. At its end this is the mean of the last ``N`` weights; the next step begins another window.

    Averages are in fp32 (fp64 of fp64 parameters), of every parameter that the optimizers step, in
    ``optimizer.state[p]["weight_average"]``: state dicts hold them, and they are cut as their parameters. All is
    elementwise. A parameter whose first gradient comes later begins then, and its first weights stand for the steps
    before. A state without an average, or with one by another rule, is loaded with a warning, and the average begins in
    the next step. An optimizer of this package without a ``WeightAverage`` drops one that it loads, with a warning.

    Copies of an optimizer (``copy.deepcopy``) have the state and no ``WeightAverage``: make one, which goes on.

    Args:
        rule: ``ema:DECAY`` or ``tail:STEPS``.
        *optimizers: any of torch; a :class:`~megatron_eopt.optimizers.with_adamw.Muon` with its AdamW.
        remaining: for ``tail``, how many steps come after the one just made, or None. A window begins where it leaves
            one step less than a window, so that one ends with the last step.

    Raises:
        ValueError: for another rule, without optimizers, for an optimizer twice or with an average already, and for
            Schedule-Free, which is one.

    [1] Kingma and Ba, Adam, arXiv 1412.6980.
    """

    def __init__(self, rule: str, *optimizers: Optimizer, remaining: Callable[[], int | None] = lambda: None) -> None:
        self.rule = AverageRule.parse(rule)
        parts = [part for optimizer in optimizers for part in _parts(optimizer)]
        if not parts or len(set(parts)) < len(parts):
            found = ", ".join(type(part).__name__ for part in parts) or "none"
            raise ValueError(f"an average of weights {rule} is beside one or more different optimizers, got {found}")
        for part in parts:
            if getattr(part, "live_key", None) is not None:
                raise ValueError(
                    f"{type(part).__name__} is an average of weights itself: leave {rule} away, or take another "
                    "optimizer"
                )
            if average_of(part) is not None:
                raise ValueError(f"{type(part).__name__} already has an average of weights, {average_of(part)}")
        self._parts = [AverageOfOne(self.rule, part, remaining) for part in parts]

    def __str__(self) -> str:
        return str(self.rule)

    @property
    def steps(self) -> int:
        """How many steps are in the average, of ``tail`` in its window."""
        return max((part.steps for part in self._parts), default=0)

    def restart(self) -> None:
        """Begin anew with the weights after the next step."""
        for part in self._parts:
            part.steps = 0

    def of(self, parameter: Tensor) -> Tensor:
        """A parameter's average, in fp32 at least; its value before the first step."""
        for part in self._parts:
            if any(p is parameter for p in part.parameters()):
                return average_in(part.optimizer.state.get(parameter, {}), parameter)
        raise ValueError(f"no optimizer of this average has the parameter of shape {tuple(parameter.shape)}")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Evaluate or export: parameters are at their averages meanwhile.

        Under torch FSDP2 with ``reshard_after_forward=False`` call ``model.reshard()`` before and after.
        """
        parameters = [p for part in self._parts for p in part.parameters()]
        for part in self._parts:
            part.at_average = True
        try:
            with swapped((p, self.of(p)) for p in parameters):
                yield
        finally:
            for part in self._parts:
                part.at_average = False


class AverageOfOne:
    """The average beside one optimizer: hooks into its steps and loads."""

    def __init__(self, rule: AverageRule, optimizer: Optimizer, remaining: Callable[[], int | None]) -> None:
        self.rule = rule
        self.optimizer = optimizer
        self.steps = 0
        self.at_average = False
        self._remaining = remaining
        self._schedule = torch.tensor([rule.decay, rule.window, 0], dtype=torch.float64)  # of all parameters
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)
        # by parameter, as a state dict has them
        self._loading: list[dict[str, Any]] = [dict(optimizer.state.get(p, {})) for p in self.parameters()]
        if any(AVERAGE in state for state in self._loading):  # a copy's, or a state that torch has cast in a load
            for state in self._loading:
                if SCHEDULE in state and state[SCHEDULE].dtype != torch.float64:
                    raise ValueError(
                        f"{type(optimizer).__name__} has loaded a state with an average, whose rule and steps torch "
                        f"has rounded to {state[SCHEDULE].dtype}: make a WeightAverage before the load"
                    )
            self._after_load(optimizer)

    def __str__(self) -> str:
        return str(self.rule)

    def parameters(self) -> list[Tensor]:
        """All of the optimizer's."""
        return parameters_in(self.optimizer.param_groups)

    def schedule(self) -> list[float]:
        """What is kept beside each average: the rule, and the steps in it."""
        return [self.rule.decay, self.rule.window, self.steps]

    def begin(self) -> None:
        """Let the state of every parameter have its average, if it lacks one."""
        for parameter in self.parameters():
            self._begin(parameter)

    def _begin(self, parameter: Tensor) -> None:
        state = self.optimizer.state[parameter]
        state.setdefault(AVERAGE, average_in(state, parameter))
        state[SCHEDULE] = self._schedule

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.at_average:
            raise RuntimeError(
                f"{type(optimizer).__name__}: parameters are at their averages, and a step would go on from there: "
                "step after the block of applied()"
            )
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(optimizer).__name__}: a CUDA graph of the step would repeat the share of one step in the "
                f"average of weights {self}: capture no step, or leave the average away"
            )

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.rule.window and (self.steps >= self.rule.window or self._remaining() == self.rule.window - 1):
            self.steps = 0
        self.steps += 1
        share = self.rule.share(self.steps)
        self._schedule[2] = self.steps
        averages = []
        weights = []
        for p in self.parameters():
            state = optimizer.state.get(p, {})
            if not state and p.grad is None:  # torch's optimizers take any state for their own, begun
                continue
            weight = local(p.detach())
            if AVERAGE not in state:
                self._begin(p)
            elif (average := local(state[AVERAGE])).dtype == weight.dtype:
                averages.append(average)
                weights.append(weight)
            else:  # one after another: the copies would take as much memory as the averages
                average.lerp_(weight.to(average.dtype), share)
        if averages:
            torch._foreach_lerp_(averages, weights, share)

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        self._loading = [dict(state_dict["state"].get(index, {})) for index in indices]
        averages = []
        several = zip(self.parameters(), parameter_names(optimizer.param_groups), self._loading, strict=False)
        for p, name, state in several:  # torch refuses other numbers
            if AVERAGE not in state:
                continue
            average = state[AVERAGE]
            if average.shape != p.shape:
                raise ValueError(
                    f"{AVERAGE!r} has shape {tuple(average.shape)}, expected {tuple(p.shape)} of its parameter: the "
                    "state is of another model"
                )
            averages.append((f"{AVERAGE!r} of {name}", average, average.dtype))
        check_finite(type(optimizer).__name__, averages)

    def _after_load(self, optimizer: Optimizer) -> None:
        loaded = self._loading
        self._loading = []
        if not loaded:  # without parameters, as a pipeline stage may be, no state tells the steps
            return
        schedules = [state[SCHEDULE] for state in loaded if AVERAGE in state and SCHEDULE in state]
        was = schedules[0].tolist() if schedules else [0.0, 0.0, 0.0]
        goes_on = AverageRule.of(was) == self.rule
        self.steps = int(was[2]) if goes_on else 0
        if not goes_on:
            found = f"the average {AverageRule.of(was)}" if schedules else "no average"
            warn(
                f"{type(optimizer).__name__} loads a state with {found} of weights, and this run's is {self}: it "
                "begins anew, with the weights after the next step"
            )
        self._schedule[2] = self.steps
        for p, saved in zip(self.parameters(), loaded, strict=True):
            state = optimizer.state.get(p, {})
            average = saved.get(AVERAGE)
            for key in {AVERAGE, SCHEDULE} & state.keys():
                del state[key]
            if goes_on and average is not None:  # which torch has cast to the dtype of the parameter
                state[AVERAGE] = average.detach().to(local(p).device, _wide(p.dtype), copy=True)
                state[SCHEDULE] = self._schedule


def average_of(optimizer: Optimizer) -> AverageOfOne | None:
    """The average beside an optimizer, if there is one."""
    hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", {}).values()
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next((owner for owner in owners if isinstance(owner, AverageOfOne)), None)


def average_in(state: Mapping[str, Any], parameter: Tensor) -> Tensor:
    """The average that a parameter's state has, else a copy of the parameter, in fp32 at least."""
    average: Tensor | None = state.get(AVERAGE)
    return parameter.detach().to(_wide(parameter.dtype), copy=True) if average is None else average


def without_unused(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict without averages if nothing goes on with them; warns."""
    states = state_dict["state"]
    if average_of(optimizer) is not None or not any(AVERAGE in state for state in states.values()):
        return dict(state_dict)
    warn(
        f"{type(optimizer).__name__} loads a state with an average of weights, which it drops: make a WeightAverage of "
        "the optimizer first to go on with it"
    )
    kept = {}
    for index, state in states.items():
        kept[index] = {key: x for key, x in state.items() if key not in (AVERAGE, SCHEDULE)}
    return {**state_dict, "state": kept}


@contextmanager
def swapped(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Parameters have other values meanwhile, and then their own, bit for bit."""
    before: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for parameter, value in pairs:
                before.append((parameter, parameter.detach().clone()))
                parameter.copy_(value)
        yield
    finally:
        with torch.no_grad():
            for parameter, own in before:
                parameter.copy_(own)


def _parts(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, or the two inside of Muon with AdamW."""
    inside = [getattr(optimizer, name, None) for name in ("matrices", "adamw")]
    return [part for part in inside if part is not None] or [optimizer]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
