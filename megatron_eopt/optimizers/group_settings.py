"""Settings of parameter groups: names, ranges and meaning."""

import contextlib
import difflib
import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from numbers import Real
from typing import Any, Literal, cast, get_args

import torch.distributed as dist
from torch import Tensor

from megatron_eopt.optimizers.traits import COEFFICIENTS, EXTRA_SCALE, SCALE_MODE, STEPS, Traits
from megatron_eopt.orthogonalize.choices import check_choice, check_count
from megatron_eopt.orthogonalize.coefficients import composite_range, set_length
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.scale import ScaleMode, muon_scale_factor, predicted_update_rms, validate_scale_mode

logger = logging.getLogger(__name__)

OURS = f"{__name__.partition('.')[0]}."

Scalar = float | Tensor  # a tensor of one entry, on the device of the parameters

DecayMethod = Literal["decoupled", "l2", "independent", "palm"]
"""What weight decay is: ``p -= lr * weight_decay * p`` [1]; ``g + weight_decay * p`` in place of ``g``;
``p -= weight_decay * p``, whatever the learning rate; ``p -= lr^2 * weight_decay * p``, after PaLM's of ``lr^2`` [2].

``independent`` decays at a rate of 0, too, and torch's ``get_optimizer_state_dict`` steps with that rate where there is
no state yet: call ``init_state()`` before it.

[1] Loshchilov and Hutter, arXiv 1711.05101.  [2] Chowdhery et al., arXiv 2204.02311.
"""

OTHER_NAMES = {
    "momentum": "momentum_beta",
    "momentum_beta": "momentum",
    "nesterov": "use_nesterov",
    "use_nesterov": "nesterov",
}
MISSPELT = 0.85  # how like a setting its misspelling is, by difflib; max_momentum is not that like momentum
DECOUPLED = "use_decoupled_weight_decay"
METHOD = "weight_decay_method"
MOMENTUM_STEPS = "momentum_steps"  # how many steps the momenta of a group have made, where that is counted


@dataclass(frozen=True)
class UpdateSettings:
    """The iteration and the scale of updates, checked at construction."""

    newton_schulz: NewtonSchulz
    scale_mode: ScaleMode
    extra_scale_factor: float

    def __post_init__(self) -> None:
        validate_scale_mode(self.scale_mode)
        factor = self.extra_scale_factor
        if not isinstance(factor, Real) or not 0 < factor < inf:
            raise ValueError(f"extra_scale_factor is a finite number above 0, got {factor!r}")

    def of_group(self, group: Mapping[str, Any]) -> "UpdateSettings":
        """These settings, with what a group says itself."""
        iteration = self.newton_schulz
        steps = group.get(STEPS, iteration.steps)
        coefficients = group.get(COEFFICIENTS, iteration.coefficient_type)
        newton_schulz = replace(iteration, steps=steps, coefficient_type=coefficients)
        mode = group.get(SCALE_MODE, self.scale_mode)
        factor = group.get(EXTRA_SCALE, self.extra_scale_factor)
        return UpdateSettings(newton_schulz, mode, factor)

    def scale(self, rows: int, cols: int) -> float:
        """Factor of a (rows x cols) matrix's orthogonal factor."""
        return self.extra_scale_factor * muon_scale_factor(rows, cols, self.scale_mode)

    def predicted_rms(self, rows: int, cols: int) -> float:
        """RMS of a full-rank matrix's update, before the learning rate."""
        return predicted_update_rms(rows, cols, self.scale_mode, self.extra_scale_factor)


def rename(name: str, traits: Traits, group: dict[str, Any], known: Mapping[str, Any]) -> None:
    """Rename a group's settings as ``traits`` have them; complete its decay by ``known``."""
    for key in (traits.momentum_key, traits.nesterov_key):
        other = OTHER_NAMES[key]
        if other not in group or other in known:
            continue
        if group.get(key, group[other]) != group[other]:
            raise ValueError(
                f"{name}: a group has {key}={group[key]!r} and {other}={group[other]!r}, two names of one setting: "
                f"leave {other!r} out"
            )
        group[key] = group.pop(other)
    if DECOUPLED not in known:
        return
    method = group.get(METHOD, known[METHOD])
    if method is not None and group.get(METHOD) == method:
        group.setdefault(DECOUPLED, method != "l2")
    elif method is not None and group.get(DECOUPLED, method != "l2") != (method != "l2"):
        group.setdefault(METHOD, None)  # the group's flag says otherwise


@contextlib.contextmanager
def named(number: int, groups: Sequence[object]) -> Iterator[None]:
    """Name the group in errors, where there are several."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if len(groups) == 1 or f"group {number}" in str(error):
            raise
        raise type(error)(f"group {number}: {error}") from error


def own_settings(groups: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Each group's own settings under some keys."""
    return [{key: group[key] for key in keys if key in group} for group in groups]


def warn(message: str) -> None:
    """Warn on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(message)


def note_short_schedule(settings: NewtonSchulz) -> None:
    """Warn of fewer, worse steps than were fitted together."""
    if settings.steps >= set_length(settings.coefficient_type):
        return
    low, high = composite_range(settings.schedule)
    if max(1 - low, high - 1) >= 0.005:
        warn(
            f"{settings.steps} Newton-Schulz steps of {settings.coefficient_type} are fewer than were fitted together: "
            f"singular values in [0.01, 1] become {low:.2f} to {high:.2f} instead of 1"
        )


def warn_of_misspelt(name: str, given: Iterable[str], known: Collection[str]) -> None:
    """Warn of a group's keys that are like a known setting."""
    for key in given:
        meant = difflib.get_close_matches(key, known, cutoff=MISSPELT)
        if meant and key not in known:
            warn(f"{name}: {key!r} is no setting of its groups, so it has no effect, did you mean {meant[0]!r}?")


def is_ours(cls: type) -> bool:
    """Whether a class is of this package."""
    return cls.__module__.startswith(OURS)


def check_flag(name: str, key: str, value: object) -> None:
    """Refuse, by a ``TypeError``, anything but a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {key} must be True or False, got {value!r}")


def class_of_ours(cls: type) -> Any:
    """The nearest class of this package, the class itself or a base."""
    return next(filter(is_ours, cls.__mro__))


@functools.cache
def arguments_of(cls: type) -> dict[str, Any]:
    """Argument -> annotation, of this package's constructors of a class."""
    found = dict[str, Any]()
    for base in reversed(cls.__mro__):
        if is_ours(base) and "__init__" in vars(base):
            for argument in inspect.signature(base.__init__).parameters.values():  # type: ignore[misc]
                if argument.kind is not argument.VAR_KEYWORD:
                    found[argument.name] = argument.annotation
    return found


@functools.cache
def numbers_of(cls: type) -> frozenset[str]:
    """Arguments annotated as numbers, and betas."""
    return frozenset(key for key, kind in arguments_of(cls).items() if kind in (float, Scalar) or key == "betas")


def check_flags(cls: type, given: Mapping[str, Any]) -> None:
    """Refuse values of arguments annotated as flags that are no bool."""
    for key, kind in arguments_of(cls).items():
        if key in given and (kind is bool or (kind == bool | None and given[key] is not None)):
            check_flag(cls.__name__, key, given[key])


def decay_method(name: str, group: Mapping[str, Any]) -> DecayMethod:
    """A group's ``weight_decay_method``, else what the flag says."""
    method = group[METHOD]
    decoupled = group[DECOUPLED]
    if method is None:
        return "decoupled" if decoupled else "l2"
    check_choice(f"{METHOD} of {name}", method, get_args(DecayMethod))
    if decoupled != (method != "l2"):
        raise ValueError(
            f"{name}: {METHOD} {method!r} contradicts {DECOUPLED} {decoupled}, which is False for 'l2' and True for "
            f"every other method: set both, or {DECOUPLED} alone"
        )
    return cast(DecayMethod, method)


def check_scalars(name: str, group: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Refuse settings that are no numbers or one-entry tensors."""
    for key in keys:
        value = group[key]
        of_pair = key == "betas" and isinstance(value, list | tuple)
        for number in value if of_pair else [value]:
            if isinstance(number, Tensor):
                fits = number.numel() == 1
            else:  # numbers of numpy's have no dimensions
                fits = isinstance(number, Real) or getattr(number, "ndim", None) == 0
            if isinstance(number, bool) or not fits:
                raise TypeError(f"{name}: {key} must be a number, or a tensor of one entry, got {number!r}")


def without_dimensions(value: Any) -> Any:
    """A tensor of one entry without dimensions; waits for nothing."""
    if isinstance(value, list | tuple) and any(hasattr(x, "ndim") for x in value):
        return type(value)(map(without_dimensions, value))
    if isinstance(value, Tensor):
        return value.reshape(()) if value.ndim else value
    return value.item() if getattr(value, "ndim", None) == 0 else value


def without_tensors(value: Any) -> Any:
    """Replace tensors of a device, unread, by 0.5, which is in every range."""
    if isinstance(value, list | tuple):
        return type(value)(map(without_tensors, value))
    return 0.5 if isinstance(value, Tensor) and value.device.type != "cpu" else value


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that ranks can compare; scalar tensors become numbers."""
    numbers = {k: x.item() if isinstance(x, Tensor) and x.numel() == 1 else x for k, x in settings.items()}
    return {key: value for key, value in numbers.items() if is_plain(value)}


def by_parameter(
    groups: Sequence[Mapping[str, Any]], keys: Iterable[str], of_all: Mapping[str, Any], users: Collection[str]
) -> dict[Tensor, dict[str, Any]]:
    """Plain settings of each parameter, for ranks to compare.

    Those of its group under ``keys`` win over those ``of_all``. What users added, ``users``, may differ between ranks,
    and the plan has the coefficients.
    """
    settings_of: dict[Tensor, dict[str, Any]] = {}
    for group in groups:
        settings = {**of_all, **{key: group[key] for key in sorted(keys) if key in group}}
        compared = plain({key: x for key, x in settings.items() if key != "coefficients" and key not in users})
        settings_of |= dict.fromkeys(group["params"], compared)
    return settings_of


def is_plain(value: Any) -> bool:
    """Whether a value is plain: scalars, None, lists thereof."""
    return all(map(is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, str | int | float | None)


def check_rates(name: str, group: Mapping[str, Any], *averages: str) -> None:
    """Refuse rates, betas and counts of steps out of their range."""
    for key in ("lr", "weight_decay"):
        if key in group and not 0 <= group[key] < inf:
            raise ValueError(f"{name}: {key} must be a finite number of at least 0, got {group[key]}")
    for key in averages:
        if not 0 <= group[key] < 1:
            raise ValueError(f"{name}: {key} must lie in [0, 1), got {group[key]}")
    if MOMENTUM_STEPS in group:
        check_count(f"{name}: {MOMENTUM_STEPS} of a group", group[MOMENTUM_STEPS], least=0)


def check_betas(name: str, betas: Any) -> None:
    """Refuse what is no pair of numbers in [0, 1)."""
    pair = isinstance(betas, Sequence) and not isinstance(betas, str) and len(betas) == 2
    if not pair or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{name}: betas must be two numbers in [0, 1), got {betas}")


def check_adam_settings(name: str, group: Mapping[str, Any], *averages: str) -> None:
    """Refuse Adam's settings out of their range."""
    check_scalars(name, group, group.keys() & {"lr", "weight_decay", "eps", "betas"})
    check_rates(name, group, *averages)
    if not 0 < group["eps"] < inf:
        raise ValueError(f"{name}: eps must be a finite number above 0, got {group['eps']}")
    check_betas(name, group["betas"])


def also_called[**P](**names: str | tuple[str, dict[Any, Any]]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Let a constructor take arguments by further names.

    ``names`` maps such a name to the argument, or to it and a dict of values there -> values here.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(init)
        def accepting(*args: P.args, **kwargs: P.kwargs) -> None:
            for other, meant in names.items():
                if other not in kwargs:
                    continue
                name, values = (meant, {}) if isinstance(meant, str) else meant
                if name in kwargs:
                    raise TypeError(f"{other} is another name for {name}: give one of the two")
                value = kwargs.pop(other)
                kwargs[name] = values.get(value, value)
            init(*args, **kwargs)

        return accepting

    return decorate
