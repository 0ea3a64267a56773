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

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_eopt.overrides.conditions import Attribute, Condition, Name, OfOptimizer, ParameterInfo, Regex
from megatron_eopt.overrides.entries import Entry, Layer, Order, Selector
from megatron_eopt.overrides.known import Known, OverrideError, SettingError, did_you_mean, shown
from megatron_eopt.overrides.settings import (
    ENDS,
    OF_ALL,
    REPLACED,
    WEIGHT_DECAY,
    Value,
    check_setting,
    does_not_apply,
    foreign,
    inconsistent,
)


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
        sources: setting -> source of the entry that it comes from.
        overruled: what other entries have for this parameter.
    """

    settings: dict[str, Value]
    sources: dict[str, str]
    overruled: tuple[Overruled, ...] = ()

    def learning_rates(self, lr: float, min_lr: float) -> tuple[float, float]:
        """Largest and smallest learning rate of the schedule, from those of the optimizer.

        Raises:
            OverrideError: if the smallest were above the largest.
        """
        own, factor = self.settings.get("lr", lr), self.settings.get("lr_mult", 1.0)
        high = own * factor
        low = self.settings.get("min_lr", min_lr * factor)
        if low > high:
            sources = ", ".join(f"{key} by {self.sources[key]}" for key in self.sources if "lr" in key)
            raise OverrideError(f"min_lr {low:g} is above lr {high:g} ({sources or 'no override'}): set both")
        return high, low


class _Claim(NamedTuple):
    order: Order
    value: Value
    source: str


_Claims = dict[str, list[_Claim]]
_Mistakes = dict[str, list[str]]  # mistake -> names of the parameters it is made for, so that it is printed once


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
        optimizer: of the parameters that no entry gives another.
        matches: number of parameters that each entry selects, on all ranks together; counted here if None.
        known: names that settings may have; those registered if None.

    Raises:
        OverrideError: for a selector that matches nothing, with the nearest name; for ties; for settings without
            effect; a line for each.
    """
    entries, known = list(entries), known or Known.registered()
    mistakes: _Mistakes = {}
    infos = _with_optimizers(entries, parameters, optimizer, mistakes)
    counts = _count(entries, infos) if matches is None else matches
    resolved = {info.name: _resolve_one(entries, info, optimizer, known, mistakes) for info in infos}
    if len(resolved) < len(infos):
        names = [info.name for info in infos]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise OverrideError(f"two parameters are named {twice[0]!r}: settings are by name, so names must differ")
    wrong = [
        f"{entry.source}: select: {_no_match(entry.selector, infos)}"
        for entry, count in zip(entries, counts, strict=True)
        if not count and entry.layer != Layer.DEFAULTS
    ]
    for what, names in sorted(mistakes.items()):
        wrong.append(f"{what}, for {min(names)}" + (f" and {len(names) - 1} more" if len(names) > 1 else ""))
    if wrong:
        raise OverrideError("\n".join(wrong))
    return resolved


def match_counts(
    entries: Iterable[Entry], parameters: Iterable[ParameterInfo], optimizer: str | None = None
) -> list[int]:
    """How many parameters each entry selects: summed over the ranks, :func:`resolve` finds what matches nowhere."""
    entries = list(entries)
    return _count(entries, _with_optimizers(entries, parameters, optimizer, {}))


def _count(entries: Sequence[Entry], infos: Sequence[ParameterInfo]) -> list[int]:
    return [sum(entry.selector.matches(info) for info in infos) for entry in entries]


def _with_optimizers(
    entries: Sequence[Entry], parameters: Iterable[ParameterInfo], optimizer: str | None, mistakes: _Mistakes
) -> list[ParameterInfo]:
    """The parameters with their optimizers, on which other settings may depend."""
    routing = []
    for entry in entries:
        keys = sorted({"optimizer", "exclude"} & set(entry.settings))
        if keys and entry.selector.optimizer is not None:
            raise OverrideError(
                f"{entry.source}: {keys[0]}: cannot be set for the parameters of an optimizer, by '{entry.selector}'"
            )
        if keys:
            routing.append(entry)
    found = []
    for info in parameters:
        won = {key: _winner(key, each, info, mistakes) for key, each in _claims(routing, info).items()}
        own = won["optimizer"].value if "optimizer" in won else optimizer
        excluded = "exclude" in won and won["exclude"].value
        found.append(replace(info, optimizer=None if excluded else own))
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
        what = f"{key}: set to {said}, which are equally specific: remove one, or narrow its selector"
        mistakes.setdefault(what, []).append(info.name)
    return _Claim(top, first[0][1], " and ".join(sorted({source for source, _ in first})))


def _resolve_one(
    entries: Sequence[Entry], info: ParameterInfo, optimizer: str | None, known: Known, mistakes: _Mistakes
) -> Resolved:
    claims = _claims(entries, info)
    wrong: list[str] = []
    # ties of optimizers and exclusions were noted when the optimizer was found
    noted: dict[str, _Mistakes] = {"optimizer": {}, "exclude": {}}
    won = {key: _winner(key, claims[key], info, noted.get(key, mistakes)) for key in sorted(claims)}
    wrong += _drop_replaced(won)
    wrong += _drop_without_effect(won, optimizer, known)
    wrong += _check_by_optimizer(won, info.optimizer, known)
    settings = {key: claim.value for key, claim in won.items()}
    for error in inconsistent(settings):
        involved = ("lr", "min_lr") if error.key == "min_lr" else ("coefficient_type", "num_ns_steps")
        by = sorted({won[key].source for key in involved if key in won})
        wrong.append(f"{' and '.join(by)}: {error}")
    for what in wrong:
        mistakes.setdefault(what, []).append(info.name)
    sources = {key: claim.source for key, claim in won.items()}
    overruled = {
        Overruled(key, claim.value, claim.source)
        for key, each in claims.items()
        for claim in each
        if key not in won or claim.source not in won[key].source.split(" and ")
    }
    in_order = sorted(overruled, key=lambda each: (each.key, each.source))
    return Resolved(settings, sources, tuple(in_order))


def _drop_replaced(won: dict[str, _Claim]) -> list[str]:
    """Drop what an absolute value replaces: what multiplies it, and of a constant weight decay both ends."""
    wrong = []
    for absolute, other in REPLACED:
        if absolute in won and other in won:
            first, second = won[absolute], won[other]
            if first.order == second.order:
                said = f"{absolute} by {first.source} and {other} by {second.source}"
                wrong.append(f"{other}: set are {said}, which are equally specific: keep one")
            elif first.order > second.order:
                del won[other]
    if {WEIGHT_DECAY, *ENDS} <= won.keys():
        del won[WEIGHT_DECAY]
    return wrong


def _drop_without_effect(won: dict[str, _Claim], optimizer: str | None, known: Known) -> list[str]:
    """Drop settings of an excluded parameter, and those that its optimizer has not: they would have no effect."""
    wrong = []
    exclude = won.get("exclude")
    if exclude is not None and exclude.value:
        for key in [key for key in won if key != "exclude"]:
            claim = won.pop(key)
            if claim.order >= exclude.order:
                wrong.append(f"{claim.source}: {key}: {exclude.source} excludes the parameter")
        return wrong
    given = won.get("optimizer")
    name = optimizer if given is None else str(given.value)
    for key in [] if name is None else foreign(won, name, known):
        claim = won.pop(key)
        if given is None or claim.order >= given.order:
            where = "" if given is None else f" ({given.source} gives it the parameter)"
            wrong.append(f"{claim.source}: {does_not_apply(key, str(name), known)}{where}")
    return wrong


def _check_by_optimizer(won: dict[str, _Claim], optimizer: str | None, known: Known) -> list[str]:
    """Check the settings that not every optimizer has: each may have values of its own type."""
    wrong = []
    for key in won.keys() - OF_ALL:
        try:
            won[key] = won[key]._replace(value=check_setting(key, won[key].value, known, optimizer))
        except SettingError as error:
            wrong.append(f"{won[key].source}: {error} for {optimizer}")
    return wrong


def _no_match(selector: Selector, infos: Sequence[ParameterInfo]) -> str:
    """Why a selector takes none of the parameters: the condition that fails, and what is near it."""
    for condition in selector.conditions:
        if not any(condition.matches(info) for info in infos):
            return f"'{condition}' matches no parameter{_near(condition, infos)}"
    return f"no parameter is matched by all of '{selector}', though some are by each"


def _near(condition: Condition, infos: Sequence[ParameterInfo]) -> str:
    """The nearest that there is: of names and their ends after a dot, of attributes that are true, of optimizers."""
    if isinstance(condition, Attribute):
        return did_you_mean(
            condition.text, {name for info in infos for name, value in info.attributes.items() if value}
        )
    if isinstance(condition, OfOptimizer):
        optimizers = sorted({info.optimizer for info in infos if info.optimizer})
        return f": their optimizers are {', '.join(optimizers)}" if optimizers else ""
    if isinstance(condition, Name):
        wanted = condition.text.removeprefix("*.")
    elif isinstance(condition, Regex):
        wanted = re.sub(r"[\\^$*+?()\[\]{}|]", "", condition.text).replace("..", ".").strip(".")
    else:
        return ""
    numbered = re.search(r"\d+(\.|$)", wanted) is not None
    ends: dict[str, None] = {}
    for info in infos:
        # layers differ in their number only: without this, a model of many makes as many ends of names
        words = (info.name if numbered else re.sub(r"(?<=\.)\d+(?=\.)", "*", info.name)).split(".")
        ends |= dict.fromkeys(".".join(words[start:]) for start in range(len(words)))
    return did_you_mean(wanted, ends)
