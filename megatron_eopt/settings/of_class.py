"""The settings of a class of optimizers: its constructors' signatures with their records."""

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

from megatron_eopt.settings.records import RECORDS, Setting
from megatron_eopt.settings.values import Check, flag, flag_or_none, one_of

OURS = f"{__name__.partition('.')[0]}."
MISSPELT = 0.85  # how like a setting its misspelling is, by difflib; max_momentum is not that like momentum


@functools.cache  # asked in every step
def is_ours(cls: Any) -> bool:
    """Whether a class is of this package."""
    return bool(cls.__module__.startswith(OURS))


def class_of_ours(cls: type) -> Any:
    """The nearest class of this package, the class itself or a base."""
    return next(filter(is_ours, cls.__mro__))


def settings_of(cls: type) -> Mapping[str, Setting]:
    """Name -> setting, of this package's constructor of a class and of that which its ``**settings`` are of."""
    return _settings_of(class_of_ours(cls))


@functools.cache
def _settings_of(ours: Any) -> Mapping[str, Setting]:
    init = ours.__init__
    found = dict(settings_of(init.settings_of)) if hasattr(init, "settings_of") else {}
    records = RECORDS | {record.name: record for record in ours.own_settings}
    for argument in inspect.signature(init).parameters.values():
        if argument.name in ("self", "params") or argument.kind is argument.VAR_KEYWORD:
            continue
        record = records.get(argument.name, Setting(argument.name))
        choices = record.choices or _choices(argument.annotation)
        found[argument.name] = replace(
            record,
            check=record.check or _check(argument.annotation, choices),
            choices=choices,
            default=argument.default,
            annotation=argument.annotation,
        )
    return types.MappingProxyType(found)


def with_settings[**P](kind: Any, base: type) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Let a constructor take ``**settings``, a ``TypedDict`` of ``kind``, of another class's constructor.

    Its signature shows them with the defaults that they have there.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        signature = inspect.signature(init)
        written = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = kind.__annotations__.keys() - {p.name for p in written}
        of_base = inspect.signature(base).parameters
        taken = [p.replace(kind=p.KEYWORD_ONLY) for name, p in of_base.items() if name in names]
        init.__signature__ = signature.replace(parameters=[*written, *taken])  # type: ignore[attr-defined]
        init.settings_of = base  # type: ignore[attr-defined]
        return init

    return decorate


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


def check_effect(settings: Mapping[str, Setting], given: Iterable[str], values: Mapping[str, Any]) -> None:
    """Refuse given settings that have an effect only with other values of another one."""
    for key in given:
        only_with = settings[key].only_with if key in settings else None
        if only_with is None:
            continue
        other, wanted = only_with
        if values[other] not in wanted:
            raise ValueError(
                f"{key} has no effect with {other} {values[other]!r}, got {values[key]!r}: it belongs to "
                f"{' and '.join(map(repr, wanted))}"
            )


def misspelt(given: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """Given names that are no known ones, but like one of these -> that one."""
    known = set(known)
    near = {key: difflib.get_close_matches(key, known, cutoff=MISSPELT) for key in given if key not in known}
    return {key: names[0] for key, names in near.items() if names}
