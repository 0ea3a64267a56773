"""Which of several entries wins, by the rules of docs/overrides.md.

Every entry that selects a parameter claims each of its settings with the rank ``(specificity, layer, position)``; the
highest rank wins. Defaults are no more specific than a shape: their predicates would otherwise win over what a user
says of an attribute.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_eopt.orthogonalize.choices import LIKE, MISSPELT, did_you_mean
from megatron_eopt.routing.entries import Entry, Layer
from megatron_eopt.routing.selectors import Kind, OverrideError, ParameterInfo, Selector
from megatron_eopt.routing.settings import ENDS, OF_ALL, REPLACED, check_setting, settings_of
from megatron_eopt.screen import listed


class Overruled(NamedTuple):
    """A setting of an entry that did not win."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True)
class Resolved:
    """The settings of one parameter, as plain data."""

    settings: dict[str, Any]  # by name, sorted
    sources: dict[str, str]  # setting -> source of its entry
    overruled: tuple[Overruled, ...] = ()

    def learning_rates(self, lr: float | None, min_lr: float | None) -> tuple[float | None, float | None]:
        """Largest and smallest learning rate of the schedule.

        None is for one that neither the optimizer nor an override sets: a loop without a schedule needs none. A
        smallest above the largest is an :class:`OverrideError`.
        """
        factor = self.settings.get("lr_mult", 1.0)
        high = self.settings.get("lr", lr)
        if high is not None:
            high *= factor
        low = self.settings.get("min_lr", None if min_lr is None else min_lr * factor)
        if low is not None and high is not None and low > high:
            sources = ", ".join(f"{key} by {source}" for key, source in self.sources.items() if "lr" in key)
            raise OverrideError(f"min_lr {low:g} is above lr {high:g} ({sources or 'no override'}): set both")
        return high, low


class _Claim(NamedTuple):
    order: tuple[Any, ...]  # that of its entry, and its position among all
    value: Any
    source: str
    layer: Layer


_Claims = dict[str, list[_Claim]]  # by setting


def resolve(
    entries: Iterable[Entry],
    parameters: Iterable[ParameterInfo],
    optimizer: str | None = None,
    matches: Sequence[int] | None = None,
) -> dict[str, Resolved]:
    """Settings of each parameter, by its name.

    Args:
        parameters: with distinct names.
        optimizer: of parameters to which no entry gives another.
        matches: number of parameters that each entry selects, on all ranks together; counted here if None.

    Raises:
        OverrideError: with a line for each mistake: a selector that matches nothing, with the nearest name;
            settings without effect, or of another type than those of the parameter's optimizer.
    """
    entries = list(entries)
    infos = _with_optimizers(entries, parameters, optimizer)
    resolved: dict[str, Resolved] = {}
    mistakes = defaultdict[str, list[str]](list)  # mistake -> names of its parameters, so that it is printed once
    for info in infos:
        if info.name in resolved:
            raise OverrideError(f"two parameters are named {info.name!r}: settings are by name, so names must differ")
        resolved[info.name], wrong = _resolve_one(entries, info)
        for mistake in wrong:
            mistakes[mistake].append(info.name)
    lines = unmatched(entries, infos, optimizer, matches)
    for mistake in sorted(mistakes):
        lines.append(f"{mistake}, for {listed(sorted(mistakes[mistake]), most=1)}")
    if lines:
        raise OverrideError("\n".join(lines))
    return resolved


def unmatched(
    entries: Iterable[Entry],
    parameters: Iterable[ParameterInfo],
    optimizer: str | None,
    matches: Sequence[int] | None = None,
) -> list[str]:
    """Mistakes of selectors that match nothing; arguments as for :func:`resolve`."""
    entries = list(entries)
    infos = _with_optimizers(entries, parameters, optimizer)
    if matches is None:
        matches = match_counts(entries, infos, optimizer)
    lines = []
    for entry, count in zip(entries, matches, strict=True):
        if not count and entry.layer != Layer.DEFAULTS:
            lines.append(f"{entry.source}: select: {_no_match(entry.selector, infos)}")
    return lines


def match_counts(entries: Iterable[Entry], parameters: Iterable[ParameterInfo], optimizer: str | None) -> list[int]:
    """Parameters that each entry selects; summed over ranks for :func:`resolve`."""
    entries = list(entries)
    infos = _with_optimizers(entries, parameters, optimizer)
    return [sum(entry.selector.matches(info) for info in infos) for entry in entries]


def _with_optimizers(
    entries: Sequence[Entry], parameters: Iterable[ParameterInfo], optimizer: str | None
) -> list[ParameterInfo]:
    routing = [entry for entry in entries if entry.settings.keys() & {"optimizer", "exclude"}]
    infos = []
    for info in parameters:
        own = optimizer
        won = _winners(_claims(routing, info))
        if "optimizer" in won:
            own = won["optimizer"].value
        if "exclude" in won and won["exclude"].value:
            own = None
        infos.append(replace(info, optimizer=own))
    return infos


def _claims(entries: Iterable[Entry], info: ParameterInfo) -> _Claims:
    claims: _Claims = defaultdict(list)
    for position, entry in enumerate(entries):
        if entry.selector.matches(info):
            order = (*entry.order(info), position)
            for key, value in entry.settings.items():
                claims[key].append(_Claim(order, value, entry.source, entry.layer))
    return claims


def _winners(claims: _Claims) -> dict[str, _Claim]:
    """The highest claim of each setting."""
    return {key: max(claims[key], key=lambda claim: claim.order) for key in sorted(claims)}


def _resolve_one(entries: Sequence[Entry], info: ParameterInfo) -> tuple[Resolved, list[str]]:
    """Settings of one parameter, and what is wrong with them."""
    claims = _claims(entries, info)
    won = _winners(claims)
    wrong = _drop_replaced(won)
    wrong += _drop_without_effect(won, info.optimizer)
    overruled = set()
    for key, of_key in claims.items():
        for claim in of_key:
            if key not in won or claim.order < won[key].order:
                overruled.add(Overruled(key, claim.value, claim.source))
    return Resolved(
        settings={key: claim.value for key, claim in won.items()},
        sources={key: claim.source for key, claim in won.items()},
        overruled=tuple(sorted(overruled, key=lambda each: (each.key, each.source))),
    ), wrong


def _drop_replaced(won: dict[str, _Claim]) -> list[str]:
    wrong = []
    for absolute, other in REPLACED:
        if absolute in won and other in won:
            first = won[absolute]
            second = won[other]
            if first.order == second.order:
                wrong.append(f"{first.source}: {absolute} replaces {other}: keep one of the two")
            elif first.order > second.order:
                del won[other]
    if all(end in won for end in ENDS):
        won.pop("weight_decay", None)
    return wrong


def _drop_without_effect(won: dict[str, _Claim], optimizer: str | None) -> list[str]:
    """Drop settings of excluded parameters, and those the optimizer lacks.

    What is ranked below the entry that excludes the parameter, or gives it the optimizer, is dropped without an error.
    """
    wrong = []
    exclude = won.get("exclude")
    if exclude is not None and exclude.value:
        for key in won.keys() - {"exclude"}:
            claim = won.pop(key)
            if claim.order >= exclude.order and claim.layer != Layer.DEFAULTS:
                wrong.append(f"{claim.source}: {key}: {exclude.source} excludes the parameter")
        return wrong
    given = won.get("optimizer")
    for key in won.keys() - OF_ALL:
        claim = won[key]
        try:
            won[key] = claim._replace(value=check_setting(key, claim.value, optimizer))
        except ValueError as error:
            del won[key]
            if given is None or claim.order >= given.order or key in settings_of(given.value):
                wrong.append(f"{claim.source}: {key}: {error}")
    return wrong


def _no_match(selector: Selector, infos: Sequence[ParameterInfo]) -> str:
    for condition in selector.conditions:
        if not any(condition.matches(info) for info in infos):
            likeness = MISSPELT if condition.kind == Kind.NAME else LIKE  # many names end alike
            return f"'{condition}' matches no parameter{did_you_mean(condition.text, _words(infos), likeness)}"
    return f"no parameter is matched by all of '{selector}', though some are by each"


def _words(infos: Sequence[ParameterInfo]) -> list[str]:
    """Ends of names, attributes and optimizers, which a condition may mean."""
    known = set[str]()
    for info in infos:
        words = re.sub(r"(?<=\.)\d+(?=\.)", "*", info.name).split(".")  # layers differ in their number only
        known.update(".".join(words[start:]) for start in range(len(words)))
        known.update(info.attributes)
        known.add(info.optimizer or "none")
    return sorted(known)
