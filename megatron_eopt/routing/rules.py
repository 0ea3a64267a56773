"""Which of several entries wins, by the rules of docs/reference/overrides.md.

Every entry that selects a parameter claims each of its settings with the rank ``(specificity, layer)``; the highest
rank wins, whatever the order of entries in a layer. Against other layers, defaults are no more specific than a shape:
their predicates would otherwise win over what a user says of an attribute.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_eopt.orthogonalize.choices import close, did_you_mean, near_or_all
from megatron_eopt.routing.entries import UNREADABLE, Entry, Layer, Order
from megatron_eopt.routing.known import Known, OverrideError, SettingError, shown
from megatron_eopt.routing.limits import MAX_MISTAKES
from megatron_eopt.routing.selectors import Condition, Kind, ParameterInfo, Selector
from megatron_eopt.routing.settings import ENDS, OF_ALL, REPLACED, check_setting, foreign, inconsistent, refusal


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
        factor, high = self.settings.get("lr_mult", 1.0), self.settings.get("lr", lr)
        high = None if high is None else high * factor
        low = self.settings.get("min_lr", None if min_lr is None else min_lr * factor)
        if low is not None and high is not None and low > high:
            sources = ", ".join(f"{key} by {self.sources[key]}" for key in self.sources if "lr" in key)
            raise OverrideError(f"min_lr {low:g} is above lr {high:g} ({sources or 'no override'}): set both")
        return high, low


class _Claim(NamedTuple):
    order: Order
    value: Any
    source: str


_ROUTING = {"optimizer", "exclude"}  # settings that choose the optimizer
_Mistakes = defaultdict[str, set[str]]  # mistake -> names of its parameters, so that it is printed once


def resolve(
    entries: Iterable[Entry],
    parameters: Iterable[ParameterInfo],
    optimizer: str | None = None,
    matches: Sequence[int] | None = None,
    known: Known | None = None,
) -> dict[str, Resolved]:
    """Settings of each parameter, by its name.

    Args:
        parameters: with distinct names.
        optimizer: of parameters to which no entry gives another.
        matches: number of parameters that each entry selects, on all ranks together; counted here if None.

    Raises:
        OverrideError: with a line for each mistake: those that entries keep; a selector that matches nothing, with the
            nearest name; ties; settings without effect. What depends on a parameter's optimizer is left out beside
            mistakes of entries, which may have set another one.
    """
    entries, known = list(entries), known or Known.registered()
    mistakes: _Mistakes = defaultdict(set)
    infos = _with_optimizers(entries, parameters, optimizer, mistakes)
    kept = [line for entry in entries for line in (*entry.mistakes, *_misrouted(entry))]
    resolved: dict[str, Resolved] = {}
    for info in infos:
        if info.name in resolved:
            raise OverrideError(f"two parameters are named {info.name!r}: settings are by name, so names must differ")
        resolved[info.name] = _resolve_one(entries, info, optimizer, known, mistakes, whole=not kept)
    counts = match_counts(entries, infos, optimizer) if matches is None else matches
    unmatched = [entry for entry, count in zip(entries, counts, strict=True) if not count]
    wrong = kept + [
        f"{entry.source}: select: {_no_match(entry.selector, infos if number < MAX_MISTAKES else [])}"
        for number, entry in enumerate(unmatched)
        if entry.layer != Layer.DEFAULTS
        and entry.selector is not UNREADABLE
        and not (kept and entry.selector.optimizer in known.optimizers)
    ]
    for what, names in sorted(mistakes.items()):
        wrong.append(f"{what}, for {min(names)}" + (f" and {len(names) - 1} more" if len(names) > 1 else ""))
    if wrong:
        raise OverrideError("\n".join(wrong))
    return resolved


def match_counts(entries: Iterable[Entry], parameters: Iterable[ParameterInfo], optimizer: str | None) -> list[int]:
    """Parameters that each entry selects; summed over ranks for :func:`resolve`."""
    entries = list(entries)
    infos = _with_optimizers(entries, parameters, optimizer, defaultdict(set))
    return [sum(entry.selector.matches(info) for info in infos) for entry in entries]


def _with_optimizers(
    entries: Sequence[Entry], parameters: Iterable[ParameterInfo], optimizer: str | None, mistakes: _Mistakes
) -> list[ParameterInfo]:
    routing = [entry for entry in entries if _ROUTING & entry.settings.keys() and not _misrouted(entry)]
    infos = []
    for info in parameters:
        won = {key: _winner(key, claims, info, mistakes) for key, claims in _claims(routing, info).items()}
        own = won["optimizer"].value if "optimizer" in won else optimizer
        infos.append(replace(info, optimizer=None if "exclude" in won and won["exclude"].value else own))
    return infos


def _misrouted(entry: Entry) -> list[str]:
    keys = sorted(_ROUTING & entry.settings.keys()) if entry.selector.optimizer is not None else []
    of_optimizer = f"cannot be set for the parameters of an optimizer, by '{entry.selector}'"
    return [f"{entry.source}: {key}: {of_optimizer}" for key in keys]


def _claims(entries: Iterable[Entry], info: ParameterInfo) -> dict[str, list[_Claim]]:
    claims: dict[str, list[_Claim]] = defaultdict(list)
    for entry in entries:
        if entry.selector.matches(info):
            order = entry.order(info)
            for key, value in entry.settings.items():
                claims[key].append(_Claim(order, value, entry.source))
    return claims


def _winner(key: str, claims: Sequence[_Claim], info: ParameterInfo, mistakes: _Mistakes) -> _Claim:
    top = max(claim.order for claim in claims)
    first = sorted({(claim.source, claim.value) for claim in claims if claim.order == top})
    if len({value for _, value in first}) > 1:
        said = " and ".join(f"{shown(value)} by {source}" for source, value in first)
        what = f"{key}: set to {said}, which are equally specific: remove one, or narrow its selector"
        mistakes[what].add(info.name)
    return _Claim(top, first[0][1], " and ".join(sorted({source for source, _ in first})))


def _resolve_one(
    entries: Sequence[Entry], info: ParameterInfo, optimizer: str | None, known: Known, mistakes: _Mistakes, whole: bool
) -> Resolved:
    """Settings of one parameter; ``whole``: refuse those without effect."""
    claims = _claims(entries, info)
    won = {key: _winner(key, claims[key], info, mistakes) for key in sorted(claims)}
    wrong, without_effect = list(_drop_replaced(won)), list(_drop_without_effect(won, optimizer, known))
    for key in won.keys() - OF_ALL:  # each optimizer may have values of its own type
        try:
            won[key] = won[key]._replace(value=check_setting(key, won[key].value, known, info.optimizer))
        except SettingError as error:
            without_effect.append(f"{won[key].source}: {error} for {info.optimizer}")
    wrong += without_effect if whole else []
    settings = {key: claim.value for key, claim in won.items()}
    for each in inconsistent(settings):
        involved = ("lr", "min_lr") if each.key == "min_lr" else ("coefficient_type", "num_ns_steps")
        wrong.append(f"{' and '.join(sorted({won[key].source for key in involved}))}: {each}")
    for what in wrong:
        mistakes[what].add(info.name)
    sources = {key: claim.source for key, claim in won.items()}
    overruled = {
        Overruled(key, claim.value, claim.source)
        for key, each in claims.items()
        for claim in each
        if claim.source not in sources.get(key, "").split(" and ")
    }
    return Resolved(settings, sources, tuple(sorted(overruled, key=lambda each: (each.key, each.source))))


def _drop_replaced(won: dict[str, _Claim]) -> Iterator[str]:
    for absolute, other in REPLACED:
        if absolute in won and other in won:
            first, second = won[absolute], won[other]
            if first.order == second.order:
                said = f"{absolute} by {first.source} and {other} by {second.source}"
                yield f"{other}: set are {said}, which are equally specific: keep one"
            elif first.order > second.order:
                del won[other]
    if {"weight_decay", *ENDS} <= won.keys():
        del won["weight_decay"]


def _drop_without_effect(won: dict[str, _Claim], optimizer: str | None, known: Known) -> Iterator[str]:
    """Drop settings of excluded parameters, and those the optimizer lacks."""
    exclude, given = won.get("exclude"), won.get("optimizer")
    if exclude is not None and exclude.value:
        for key in won.keys() - {"exclude"}:
            claim = won.pop(key)
            if claim.order >= exclude.order:
                yield f"{claim.source}: {key}: {exclude.source} excludes the parameter"
        return
    name = optimizer if given is None else given.value
    for key in foreign(won, name, known):
        claim = won.pop(key)
        if given is None or claim.order >= given.order:
            where = "" if given is None else f" ({given.source} gives it the parameter)"
            yield f"{claim.source}: {refusal(key, name, known)}{where}"


def _no_match(selector: Selector, infos: Sequence[ParameterInfo]) -> str:
    if selector.any_of or not infos:
        return f"'{selector}' matches no parameter{_near(selector.conditions[0], infos)}"
    for condition in selector.conditions:
        if not any(condition.matches(info) for info in infos):
            return f"'{condition}' matches no parameter{_near(condition, infos)}"
    return f"no parameter is matched by all of '{selector}', though some are by each"


def _near(condition: Condition, infos: Sequence[ParameterInfo]) -> str:
    """A hint at near names, true attributes, or optimizers."""
    match condition.kind:
        case Kind.ATTR:
            having = {name for info in infos for name, value in info.attributes.items() if value}
            return near_or_all(condition.text, sorted(having)) if having else ""
        case Kind.OPTIMIZER:
            optimizers = sorted({info.optimizer for info in infos if info.optimizer})
            return f": their optimizers are {', '.join(optimizers)}" if optimizers else ""
        case Kind.NAME:
            wanted = condition.text.removeprefix("*.")
            # with wildcards, word by word
            known = {word for info in infos for word in info.name.split(".")}
            near = ((word, close(word, known)) for word in wanted.split("."))
            mended = ".".join(word if word in known or "*" in word or not like else like[0] for word, like in near)
            if "*" in wanted and mended != wanted:
                return f", did you mean {condition.text.replace(wanted, mended)!r}?"
        case Kind.REGEX:
            wanted = re.sub(r"[\\^$*+?()\[\]{}|]", "", condition.text).replace("..", ".").strip(".")
        case _:
            return ""
    numbered = re.search(r"\d+(\.|$)", wanted) is not None
    ends: dict[str, None] = {}
    for info in infos:
        # layers differ in their number only
        words = (info.name if numbered else re.sub(r"(?<=\.)\d+(?=\.)", "*", info.name)).split(".")
        ends |= dict.fromkeys(".".join(words[start:]) for start in range(len(words)))
    return did_you_mean(wanted, ends)
