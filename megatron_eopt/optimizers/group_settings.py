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

from megatron_eopt.optimizers.traits import COEFFICIENTS, EXTRA_SCALE, SCALE_MODE, STEPS, UNSET, Traits
from megatron_eopt.orthogonalize.choices import check_choice, check_count, did_you_mean
from megatron_eopt.orthogonalize.coefficients import composite_range, set_length
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.scale import ScaleMode, muon_scale_factor, predicted_update_rms, validate_scale_mode

logger = logging.getLogger(__name__)

OURS = __name__.partition(".")[0]

Scalar = float | Tensor  # a tensor of one entry, on the device of the parameters
NUMBER = float | int | Tensor | Real  # those that are there mostly come first

DecayMethod = Literal["decoupled", "l2", "independent", "palm"]
"""What weight decay is: ``p -= lr * weight_decay * p`` [1]; ``g + weight_decay * p`` in place of ``g``;
``p -= weight_decay * p``, whatever the learning rate; ``p -= lr^2 * weight_decay * p``, after PaLM's of ``lr^2`` [2].

``independent`` decays at a rate of 0, too, and torch's ``get_optimizer_state_dict`` steps with that rate where there is
no state yet: call ``init_state()`` before it.

[1] Loshchilov and Hutter, arXiv 1711.05101.  [2] Chowdhery et al., arXiv 2204.02311.
"""

ELSEWHERE = {"learning_rate": ", did you mean 'lr'?", "wd": ", did you mean 'weight_decay'?", "use_muon": ""}
MISSPELT = 0.85  # how like a setting its misspelling is, by difflib; max_momentum is not that like momentum
DECOUPLED, METHOD = "use_decoupled_weight_decay", "weight_decay_method"
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
        steps, coefficients = group.get(STEPS, iteration.steps), group.get(COEFFICIENTS, iteration.coefficient_type)
        newton_schulz = replace(iteration, steps=steps, coefficient_type=coefficients)
        mode, factor = group.get(SCALE_MODE, self.scale_mode), group.get(EXTRA_SCALE, self.extra_scale_factor)
        return UpdateSettings(newton_schulz, mode, factor)

    def scale(self, rows: int, cols: int) -> float:
        """Factor of a (rows x cols) matrix's orthogonal factor."""
        return self.extra_scale_factor * muon_scale_factor(rows, cols, self.scale_mode)

    def predicted_rms(self, rows: int, cols: int) -> float:
        """RMS of a full-rank matrix's update, before the learning rate."""
        return predicted_update_rms(rows, cols, self.scale_mode, self.extra_scale_factor)


def renamed(name: str, traits: Traits, given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names of ``traits``, decay completed by ``known``."""
    group = dict(given)
    of_momentum = traits.momentum_key, "momentum", "momentum_beta"
    of_nesterov = traits.nesterov_key, "nesterov", "use_nesterov"
    for key, *both in (of_momentum, of_nesterov):
        other = both[1 - both.index(key)]
        if other in group:
            value = group.pop(other)
            if group.setdefault(key, value) != value:
                raise ValueError(
                    f"{name} reads {key!r}, of which {other!r} is another name, but a group has {key}={group[key]!r} "
                    f"and {other}={value!r}: leave {other!r} out"
                )
    method, decoupled = group.get(METHOD, known.get(METHOD)), group.get(DECOUPLED)
    if group.get(METHOD) is not None and decoupled is None:
        group[DECOUPLED] = method != "l2"
    if METHOD not in group and None not in (method, decoupled) and decoupled != (method != "l2"):
        group[METHOD] = None
    return group


def rename(name: str, traits: Traits, group: dict[str, Any], known: Mapping[str, Any]) -> None:
    """Change a group to what :func:`renamed` says."""
    other = renamed(name, traits, group, known)
    if other != group:
        group.clear()
        group.update(other)


@contextlib.contextmanager
def named(number: int, groups: Sequence[object]) -> Iterator[None]:
    """Name the group in errors, where there are several."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if len(groups) == 1 or f"group {number}" in str(error):
            raise
        raise type(error)(f"group {number}: {error}") from error


def own_settings(groups: Sequence[Mapping[str, Any]], names: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Each group's own settings, under pairs of keys and new names."""
    return [{name: group[key] for key, name in names if key in group} for group in groups]


def warn(message: str) -> None:
    """Warn on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(message)


def note_short_schedule(settings: NewtonSchulz) -> None:
    """Warn of fewer, worse steps than were fitted together."""
    if settings.steps >= set_length(settings.coefficient_type):
        return
    ends = composite_range(settings.schedule)
    if all(f"{end:.2f}" == "1.00" for end in ends):
        return
    low, high = (f"{end:.4f}" if f"{end:.2f}" == "1.00" else f"{end:.2f}" for end in ends)
    warn(
        f"{settings.steps} Newton-Schulz steps of {settings.coefficient_type} are fewer than were fitted together: "
        f"singular values in [0.01, 1] become {low} to {high} instead of 1"
    )


def check_flag(name: str, key: str, value: object) -> None:
    """Refuse, by a ``TypeError``, anything but a bool."""
    if not isinstance(value, bool):
        by_position = (
            ": the positional order of emerging-optimizers is (params, lr, momentum, weight_decay), here it is "
            "another; give all but params by name"
        )
        hint = "" if isinstance(value, str) else by_position
        raise TypeError(f"{name}: {key} must be True or False, got {value!r}{hint}")


def check_order(name: str, by_position: Mapping[str, object]) -> None:
    """Refuse a momentum and weight decay in another package's order.

    torch.optim.Muon and Keller Jordan's Muon have ``(params, lr, weight_decay, momentum)``. By name all values count.
    """
    key = next((key for key in ("momentum", "momentum_beta") if key in by_position), "")
    momentum, decay = by_position.get(key), by_position.get("weight_decay")
    if not isinstance(momentum, float | int) or momentum >= 0.5:
        return
    theirs = "torch.optim.Muon and Keller Jordan's Muon have weight_decay in the place of"
    if isinstance(decay, float | int) and decay >= 0.5:
        raise ValueError(
            f"{name}: {key} is {momentum} and weight_decay {decay}, by position: {theirs} {key}; if you mean it, give "
            f"both by name"
        )
    if list(by_position)[-1] == key:
        warn(f"{name}: {key} is {momentum}, by position: {theirs} {key}; give it by name")


@functools.cache
def arguments_of(cls: type) -> dict[str, Any]:
    """Argument -> annotation, of this package's constructors of a class."""
    classes = [vars(c) for c in reversed(cls.__mro__) if c.__module__.startswith(f"{OURS}.") and "__init__" in vars(c)]
    arguments = [
        p for cls_vars in classes for p in list(inspect.signature(cls_vars["__init__"]).parameters.values())[1:]
    ]
    return {p.name: p.annotation for p in arguments if p.kind is not p.VAR_KEYWORD}


def check_attribute(
    cls: type, name: str, value: object, traits: Traits, attributes: Collection[str], defaults: Collection[str]
) -> None:
    """Refuse what cannot be set between steps; warn of no effect."""
    called, taken = cls.__name__, arguments_of(cls)
    in_groups = f"set it in each group, optimizer.param_groups[i][{name!r}]"
    if callable(getattr(cls, name, None)) and not callable(value):
        instead = f": {in_groups}" if name in defaults else f", got {value!r} in its place"
        raise TypeError(f"{name} is a method of {called}{instead}")
    if name == "newton_schulz" and name in attributes and not isinstance(value, NewtonSchulz):
        instead = " orthogonalize_fn to a function of your own, or" if hasattr(cls, "orthogonalize_fn") else ""
        raise TypeError(
            f"{called}: newton_schulz is a NewtonSchulz, the settings of the iteration, got {value!r}: set{instead} "
            f"dataclasses.replace(optimizer.newton_schulz, ...)"
        )
    if traits.size_rule and name in (SCALE_MODE, EXTRA_SCALE):
        raise ValueError(f"{called}: {name} has no effect: the size of an update is {traits.size_rule}; set lr")
    if name in UNSET and name not in taken:
        raise ValueError(f"{called} has no {name}, got {value!r}")
    if name in taken and name in traits.settled:
        instead = in_groups if name in defaults else f"build it anew with {name}=..., and load its state"
        raise ValueError(f"{called} takes {name} at construction and not between steps: {instead}")
    known = name in attributes or name in traits.planned_by or isinstance(getattr(cls, name, None), property)
    if name in taken and not known:
        warn(f"{called}: the attribute {name} has no effect: {in_groups}")


def settings_below(base: type) -> set[str]:
    """Arguments of a class and its subclasses, and :data:`ELSEWHERE`'s."""
    own = {*arguments_of(base), *other_names_of(base), *ELSEWHERE}
    return own.union(*map(settings_below, base.__subclasses__()))


def other_names_of(cls: type) -> Mapping[str, str]:
    """Further names that a constructor takes -> its arguments."""
    return getattr(cls.__init__, "other_names", {})  # type: ignore[misc]


def note_names(cls: type, given: Iterable[object], known: Collection[str], of_others: Collection[str]) -> None:
    """Warn of a group's misspelt names; ``use_muon`` is a ``ValueError``."""
    name, other_names = cls.__name__, other_names_of(cls)
    if "use_muon" in given and "use_muon" in of_others:
        raise ValueError(
            f"{name}: a group has use_muon, which chooses no optimizer here: write Muon(matrices, rest), with the "
            f"parameters of use_muon=True and with all others"
        )
    for key in (key for key in given if isinstance(key, str) and key not in known):
        meant = ELSEWHERE.get(key) or did_you_mean(other_names.get(key, key), known)
        misspelt = difflib.get_close_matches(key, known, cutoff=MISSPELT)
        if misspelt or key in of_others:
            warn(f"{name}: {key!r} is no setting of its groups, so it has no effect{meant}")


@functools.cache
def flags_of(cls: type) -> dict[str, bool]:
    """Arguments annotated as flags -> whether each may be None."""
    return {key: kind is not bool for key, kind in arguments_of(cls).items() if kind in (bool, bool | None)}


@functools.cache
def numbers_of(cls: type) -> frozenset[str]:
    """Arguments annotated as numbers, and betas."""
    return frozenset(key for key, kind in arguments_of(cls).items() if kind in (float, Scalar) or key == "betas")


def check_flags(cls: type, given: Mapping[str, Any]) -> None:
    """Refuse values of flags that are no bool."""
    for key, may_be_none in flags_of(cls).items():
        if key in given and not (may_be_none and given[key] is None):
            check_flag(cls.__name__, key, given[key])


def decay_method(name: str, group: Mapping[str, Any]) -> DecayMethod:
    """A group's ``weight_decay_method``, else what the flag says."""
    method, decoupled = group[METHOD], group[DECOUPLED]
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
        for number in (value if isinstance(value, list | tuple) else ()) if key == "betas" else (value,):
            # numbers of numpy's have no dimensions
            if isinstance(number, bool) or (not isinstance(number, NUMBER) and getattr(number, "ndim", None) != 0):
                raise TypeError(f"{name}: {key} must be a number, or a tensor of one entry, got {number!r}")
            if isinstance(number, Tensor) and number.numel() != 1:
                raise ValueError(
                    f"{name}: {key} must be a number, or a tensor of one entry, got a tensor of shape "
                    f"{tuple(number.shape)}"
                )


def without_dimensions(value: Any) -> Any:
    """A tensor of one entry without dimensions; waits for nothing."""
    if isinstance(value, list | tuple) and any(hasattr(x, "ndim") for x in value):
        return type(value)(map(without_dimensions, value))
    if isinstance(value, Tensor):
        return value.reshape(()) if value.ndim else value
    return value.item() if getattr(value, "ndim", None) == 0 else value


def without_tensors(value: Any) -> Any:
    """Replace tensors, unread, by 0.5, which is in every range."""
    if isinstance(value, list | tuple) and any(isinstance(x, Tensor) for x in value):
        return type(value)(map(without_tensors, value))
    return 0.5 if isinstance(value, Tensor) else value


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


def also_called[**P](**spellings: str | tuple[str, dict[Any, Any]]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Let a constructor take arguments by further names.

    ``spellings`` maps such a name to the argument, or to it and a dict of values there -> values here. The constructor
    raises a ``ValueError`` for two different values of one argument, and for a value that the other package does not
    have.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        signature = inspect.signature(init)

        @functools.wraps(init)
        def accepting(*args: P.args, **kwargs: P.kwargs) -> None:
            renamed_arguments = {other: kwargs.pop(other) for other in spellings.keys() & kwargs.keys()}
            given = signature.bind_partial(*args, **kwargs).arguments if renamed_arguments else {}
            for other, value in renamed_arguments.items():
                spelling = spellings[other]
                name, values = (spelling, None) if isinstance(spelling, str) else spelling
                if values is not None and value not in values:
                    raise ValueError(f"{other} must be one of {', '.join(map(str, values))}, got {value!r}")
                here = value if values is None else values[value]
                if name not in given:
                    given[name] = kwargs[name] = here
                elif given[name] != here:
                    raise ValueError(
                        f"{other}={value!r} is another name for {name}={here!r}, but {name}={given[name]!r} was given "
                        f"too: leave one of them away"
                    )
            init(*args, **kwargs)

        arguments = {other: x if isinstance(x, str) else x[0] for other, x in spellings.items()}
        accepting.other_names = arguments  # type: ignore[attr-defined]
        return accepting

    return decorate
