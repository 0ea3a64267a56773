"""The settings of a class of optimizers: its constructor's arguments with their records."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter
from typing import Any, Literal, Unpack, get_args, get_origin

from megatron_eopt.settings.records import RECORDS, Setting
from megatron_eopt.settings.values import Check, flag, flag_or_none, one_of

OURS = f"{__name__.partition('.')[0]}."


@functools.cache  # asked in every step
def is_ours(cls: Any) -> bool:
    """Whether a class is of this package."""
    return bool(cls.__module__.startswith(OURS))


def class_of_ours(cls: type) -> Any:
    """The nearest class of this package, the class itself or a base."""
    return next(filter(is_ours, cls.__mro__))


def arguments_of(function: Callable[..., Any]) -> list[Parameter]:
    """Arguments of a function, with each key of a ``**settings: Unpack[TypedDict]``."""
    found = []
    for argument in inspect.signature(function).parameters.values():
        if get_origin(argument.annotation) is Unpack:
            [keys] = get_args(argument.annotation)
            for name, annotation in keys.__annotations__.items():
                found.append(Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation))
        else:
            found.append(argument)
    return found


def settings_of(cls: type) -> Mapping[str, Setting]:
    """Name -> setting, for each argument of this package's constructor of a class."""
    return _settings_of(class_of_ours(cls))


@functools.cache
def _settings_of(ours: Any) -> Mapping[str, Setting]:
    found = {}
    inherited = _settings_of(ours.__base__) if hasattr(ours.__base__, "own_settings") else {}
    records = RECORDS | {record.name: record for record in ours.own_settings}
    for argument in arguments_of(ours.__init__):
        name = argument.name
        if name in ("self", "params") or argument.kind is Parameter.VAR_KEYWORD:
            continue
        record = records.get(name, Setting(name))
        default = argument.default
        if default is Parameter.empty:  # a key of a TypedDict has the default of the class above, or of the record
            default = inherited.get(name, record).default
        choices = record.choices or _choices(argument.annotation)
        found[name] = replace(
            record,
            check=record.check or _check(argument.annotation, choices),
            choices=choices,
            default=default,
        )
    return types.MappingProxyType(found)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The names that a type allows, empty where it is no choice."""
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is Literal:
            return get_args(kind)
    return ()


def _check(annotation: Any, choices: tuple[Any, ...]) -> Check | None:
    """What a type says of values, where no record does."""
    kinds = (annotation, *get_args(annotation))
    others = (None,) if types.NoneType in kinds else ()
    if bool in kinds:
        return flag_or_none if others else flag
    return one_of(choices, *others) if choices else None


def check_values(owner: str, settings: Mapping[str, Setting], values: Mapping[str, Any]) -> None:
    """Refuse values that settings cannot have, whatever other settings are."""
    for key, value in values.items():
        check = settings[key].check if key in settings else None
        if check is not None:
            check(f"{owner}: {key}", value)


def check_effect(
    settings: Mapping[str, Setting],
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Refuse values unlike the defaults that have an effect only with other values of another setting of groups."""
    for key, setting in settings.items():
        if setting.only_with is None or values[key] == defaults[key]:
            continue
        other, wanted = setting.only_with
        found = dict.fromkeys(group[other] for group in groups)
        if found.keys().isdisjoint(wanted):
            raise ValueError(
                f"{key} has no effect with {other} {' and '.join(map(repr, found))}, got {values[key]!r}: it belongs "
                f"to {' and '.join(map(repr, wanted))}"
            )
