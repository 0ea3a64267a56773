"""Which settings a parameter gets when several entries are for it.

Every entry that selects a parameter claims each of its settings, with the rank ``(specificity, layer)``. For each
setting by itself the claim of the highest rank wins: the more specific selector, and between equally specific ones the
later layer. Claims of the same rank with different values are a tie, which is an error. Nothing depends on the order
of entries within a layer.

The defaults count as no more specific than a shape, among themselves excepted: their predicates would otherwise win
over what a user says of an attribute or a shape.

What follows from a winner:

- ``lr`` replaces an ``lr_mult`` ranked below it, and an ``lr_mult`` multiplies an ``lr`` ranked below it; so do
  ``weight_decay``, ``start_wd`` or ``end_wd`` and ``wd_mult``.
- ``weight_decay`` replaces a ``start_wd`` and an ``end_wd`` ranked below it, and one of these ranked above it takes its
  place at that end of the schedule.
- An ``exclude: true`` drops all settings ranked below it, and an ``optimizer`` those that it has not. Ranked above or
  beside, they are errors: they would have no effect.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

from megatron_eopt.overrides.conditions import Kind, ParameterInfo
from megatron_eopt.overrides.errors import OverrideError, SettingError, shown
from megatron_eopt.overrides.known import Known
from megatron_eopt.overrides.selectors import Selector, Specificity, no_match
from megatron_eopt.overrides.settings import (
    ENDS,
    MULTIPLIERS,
    OF_ALL,
    WEIGHT_DECAY,
    check_setting,
    does_not_apply,
    foreign,
    inconsistent,
)
from megatron_eopt.overrides.values import Value


class Layer(IntEnum):
    """Where entries come from; of two that are equally specific the later one wins."""

    DEFAULTS = 0
    PYTHON = 1
    FILE = 2
    FLAGS = 3


Order = tuple[Specificity, Layer, Specificity]

_DEFAULTS_AT_MOST: Specificity = ((Kind.SHAPE, 0),)


@dataclass(frozen=True)
class Entry:
    """Settings for the parameters that a selector takes.

    Attributes:
        selector: which parameters.
        settings: as :func:`~megatron_eopt.overrides.settings.check_settings` returns them.
        layer: where it comes from; an entry of the defaults may select nothing.
        source: the place, as in ``overrides.yaml:3``.
    """

    selector: Selector
    settings: Mapping[str, Value] = field(hash=False)
    layer: Layer
    source: str

    def order(self, info: ParameterInfo) -> Order:
        """Its rank for a parameter that it selects: of two entries the higher one wins."""
        own = self.selector.specificity(info)
        return min(own, _DEFAULTS_AT_MOST) if self.layer == Layer.DEFAULTS else own, self.layer, own


class Overruled(NamedTuple):
    """A setting that an entry has for a parameter, and that did not win."""

    key: str
    value: Value
    source: str


@dataclass(frozen=True)
class Resolved:
    """The settings of one parameter: plain data, which can be pickled and printed.

    Attributes:
        settings: in the order of their names.
        sources: for each, the place that it comes from.
        overruled: what other entries have for this parameter.
    """

    settings: dict[str, Value]
    sources: dict[str, str]
    overruled: tuple[Overruled, ...] = ()

    def as_tuple(self) -> tuple[tuple[str, Value], ...]:
        """The settings as one value that can be hashed, and sorted among others: what groups are made by."""
        return tuple(item for item in self.settings.items() if item != ("exclude", False))

    def learning_rates(self, lr: float, min_lr: float) -> tuple[float, float]:
        """Largest and smallest learning rate of the schedule, from those of the optimizer.

        Raises:
            OverrideError: if the smallest were above the largest.
        """
        own, factor = self.settings.get("lr", lr), self.settings.get("lr_mult", 1.0)
        high = own * factor
        low = self.settings.get("min_lr", min_lr * factor)
        if low > high:
            places = ", ".join(f"{key} by {self.sources[key]}" for key in self.sources if "lr" in key)
            raise OverrideError(f"min_lr {low:g} is above lr {high:g} ({places or 'no override'}): set both")
        return high, low

    def decay(self, weight_decay: float) -> float:
        """The weight decay at the end of its schedule, from that of the optimizer."""
        own = self.settings.get(WEIGHT_DECAY, weight_decay)
        return self.settings.get("end_wd", own) * self.settings.get("wd_mult", 1.0)


class _Claim(NamedTuple):
    order: Order
    value: Value
    source: str


_Claims = dict[str, list[_Claim]]


class _Mistakes:
    """Mistakes with the parameters that they are made for, so that each is said once."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}

    def add(self, what: str, name: str) -> None:
        self.names.setdefault(what, []).append(name)

    def lines(self) -> Iterator[str]:
        for what, names in sorted(self.names.items()):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield f"{what}, for {min(names)}{more}"


def resolve(
    entries: Iterable[Entry],
    parameters: Iterable[ParameterInfo],
    optimizer: str | None = None,
    matches: Sequence[int] | None = None,
    known: Known | None = None,
) -> dict[str, Resolved]:
    """Settings of each parameter, by its name.

    Args:
        entries: of all layers.
        parameters: with names that differ.
        optimizer: owner of those that no entry gives another.
        matches: number of parameters that each entry selects, on all ranks together; counted here if None.
        known: names that settings may have; those registered if None.

    Raises:
        OverrideError: for a selector that matches nothing, with the nearest name; for ties; for settings without
            effect; a line for each.
    """
    entries, known = list(entries), known or Known.registered()
    owned = _owned(entries, parameters, optimizer, mistakes := _Mistakes())
    counts = _count(entries, owned) if matches is None else matches
    resolved = {info.name: _resolve_one(entries, info, optimizer, known, mistakes) for info in owned}
    if len(resolved) < len(owned):
        names = [info.name for info in owned]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise OverrideError(f"two parameters are named {twice[0]!r}: settings are by name, so names must differ")
    unmatched = [
        f"{entry.source}: select: {no_match(entry.selector, owned)}"
        for entry, count in zip(entries, counts, strict=True)
        if not count and entry.layer != Layer.DEFAULTS
    ]
    if wrong := [*unmatched, *mistakes.lines()]:
        raise OverrideError("\n".join(wrong))
    return resolved


def match_counts(
    entries: Iterable[Entry], parameters: Iterable[ParameterInfo], optimizer: str | None = None
) -> list[int]:
    """How many parameters each entry selects: summed over the ranks, :func:`resolve` finds what matches nowhere."""
    entries = list(entries)
    return _count(entries, _owned(entries, parameters, optimizer, _Mistakes()))


def _count(entries: Sequence[Entry], owned: Sequence[ParameterInfo]) -> list[int]:
    return [sum(entry.selector.matches(info) for info in owned) for entry in entries]


def _owned(
    entries: Sequence[Entry], parameters: Iterable[ParameterInfo], optimizer: str | None, mistakes: _Mistakes
) -> list[ParameterInfo]:
    """The parameters with their owners, on which other settings may depend."""
    routing = []
    for entry in entries:
        owners = sorted({"optimizer", "exclude"} & set(entry.settings))
        if owners and entry.selector.asks_for_optimizer:
            raise OverrideError(
                f"{entry.source}: {owners[0]}: cannot be set where the optimizer is asked for, by '{entry.selector}'"
            )
        if owners:
            routing.append(entry)
    found = []
    for info in parameters:
        claims = {key: _winner(key, each, info, mistakes) for key, each in _claims(routing, info).items()}
        owner = claims["optimizer"].value if "optimizer" in claims else optimizer
        excluded = "exclude" in claims and claims["exclude"].value
        found.append(replace(info, optimizer=None if excluded else owner))
    return found


def _claims(entries: Iterable[Entry], info: ParameterInfo) -> _Claims:
    claims: _Claims = {}
    for entry in entries:
        if entry.selector.matches(info):
            order = entry.order(info)
            for key, value in entry.settings.items():
                claims.setdefault(key, []).append(_Claim(order, value, entry.source))
    return claims


def _winner(key: str, claims: Sequence[_Claim], info: ParameterInfo, mistakes: _Mistakes) -> _Claim:
    top = max(claim.order for claim in claims)
    first = sorted({(claim.source, claim.value) for claim in claims if claim.order == top})
    if len({value for _, value in first}) > 1:
        said = " and ".join(f"{shown(value)} by {source}" for source, value in first)
        mistakes.add(f"{key}: set to {said}, which are equally specific: remove one, or narrow its selector", info.name)
    return _Claim(top, first[0][1], " and ".join(sorted({source for source, _ in first})))


def _resolve_one(
    entries: Sequence[Entry], info: ParameterInfo, optimizer: str | None, known: Known, mistakes: _Mistakes
) -> Resolved:
    claims = _claims(entries, info)
    # the ties of who owns it were noted when the owner was found
    silent = {"optimizer": _Mistakes(), "exclude": _Mistakes()}
    won = {key: _winner(key, claims[key], info, silent.get(key, mistakes)) for key in sorted(claims)}
    _drop_replaced(won, info, mistakes)
    _drop_without_effect(won, info, optimizer, known, mistakes)
    _check_by_optimizer(won, info, known, mistakes)
    settings = {key: claim.value for key, claim in won.items()}
    for error in inconsistent(settings):
        places = sorted({won[key].source for key in _involved(error.key) if key in won})
        mistakes.add(f"{' and '.join(places)}: {error}", info.name)
    overruled = {
        Overruled(key, claim.value, claim.source)
        for key, each in claims.items()
        for claim in each
        if key not in won or claim.source not in won[key].source.split(" and ")
    }
    in_order = sorted(overruled, key=lambda each: (each.key, each.source))
    return Resolved(settings, {key: claim.source for key, claim in won.items()}, tuple(in_order))


def _drop_replaced(won: dict[str, _Claim], info: ParameterInfo, mistakes: _Mistakes) -> None:
    """Drop what an absolute value replaces: what multiplies it, and of a constant weight decay both ends."""
    for absolute, other in (*((WEIGHT_DECAY, end) for end in ENDS), *MULTIPLIERS.items()):
        if absolute in won and other in won:
            first, second = won[absolute], won[other]
            if first.order == second.order:
                said = f"{absolute} by {first.source} and {other} by {second.source}"
                mistakes.add(f"{other}: set are {said}, which are equally specific: keep one", info.name)
            elif first.order > second.order:
                del won[other]
    if {WEIGHT_DECAY, *ENDS} <= won.keys():
        del won[WEIGHT_DECAY]


def _drop_without_effect(
    won: dict[str, _Claim], info: ParameterInfo, optimizer: str | None, known: Known, mistakes: _Mistakes
) -> None:
    exclude = won.get("exclude")
    if exclude is not None and exclude.value:
        for key in [key for key in won if key != "exclude"]:
            claim = won.pop(key)
            if claim.order >= exclude.order:
                mistakes.add(f"{claim.source}: {key}: {exclude.source} excludes the parameter", info.name)
        return
    owner = won.get("optimizer")
    name = str(owner.value) if owner is not None else optimizer
    for key in foreign(won, name, known) if name is not None else ():
        claim = won.pop(key)
        if owner is None or claim.order >= owner.order:
            where = f" ({owner.source} makes it the owner)" if owner is not None else ""
            mistakes.add(f"{claim.source}: {does_not_apply(key, str(name), known)}{where}", info.name)


def _check_by_optimizer(won: dict[str, _Claim], info: ParameterInfo, known: Known, mistakes: _Mistakes) -> None:
    """Check the settings that not every optimizer has: each may have values of its own type."""
    for key in won.keys() - OF_ALL:
        try:
            won[key] = won[key]._replace(value=check_setting(key, won[key].value, known, info.optimizer))
        except SettingError as error:
            mistakes.add(f"{won[key].source}: {error} for {info.optimizer}", info.name)


def _involved(key: str) -> tuple[str, ...]:
    return ("lr", "min_lr") if key == "min_lr" else ("coefficient_type", "num_ns_steps")
