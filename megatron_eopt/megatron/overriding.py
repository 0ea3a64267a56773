"""Every parameter with its owner and its settings, also in the form that Megatron makes groups from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from megatron_eopt.family import SplitName
from megatron_eopt.matrices import Split, tag_declared
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.entries import DEFAULT, all_entries, known_names
from megatron_eopt.megatron.fused import fused, is_declared, split_of
from megatron_eopt.megatron.parameters import Described
from megatron_eopt.optimizers.skipping import NAME
from megatron_eopt.orthogonalize.coefficients import get_coefficients
from megatron_eopt.overrides import Entry, OverrideError, Resolved, match_counts, resolve
from megatron_eopt.overrides.known import SPLIT
from megatron_eopt.overrides.settings import ENDS, OF_ALL
from megatron_eopt.registry import EMERGING_OPTIMIZERS, EmergingOptimizerEntry, pairs_rows, takes_matrices

_LAYER_WISE = "is_managed_by_layer_wise_optimizer"
_RATES = ("lr", "min_lr", "lr_mult")
_MEGATRONS_RATES = {"lr": "max_lr", "min_lr": "min_lr", "lr_mult": "lr_mult"}


@dataclass(frozen=True)
class Owned:
    """A parameter with its settings.

    Attributes:
        described: the parameter.
        resolved: its settings, and where each is from.
        owner: name of the optimizer; None for a parameter that is excluded.
    """

    described: Described
    resolved: Resolved
    owner: str | None


def owners(
    parameters: Sequence[Described], config: Any, config_overrides: Mapping[Any, Mapping[str, Any]] | None
) -> list[Owned]:
    """Every parameter with its owner and settings; all ranks call it together.

    Args:
        parameters: of this rank.
        config: Megatron's ``OptimizerConfig``, on which our flags have put ``optimizer_overrides`` and others.
        config_overrides: Megatron's, or selectors of this package in their place; None for Megatron's standard ones.

    Raises:
        OverrideError: as :func:`~megatron_eopt.overrides.resolve`, on all ranks.
    """
    entries = all_entries(config, config_overrides)
    everywhere: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, matches(parameters, config, entries))
    counts = [sum(of_entry) for of_entry in zip(*everywhere, strict=True)]
    return on_all_ranks(lambda: owners_of(parameters, config, entries, counts))


def on_all_ranks[T](decide: Callable[[], T]) -> T:
    """What is decided on this rank; a mistake on one rank ends all, so that none waits for another.

    Raises:
        OverrideError: for that of the first rank that made one.
    """
    error = None
    try:
        decided = decide()
    except ValueError as found:
        error = str(found)
    everywhere: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, error)
    for found_there in everywhere:
        if found_there is not None:
            raise OverrideError(found_there)
    return decided


def matches(parameters: Sequence[Described], config: Any, entries: Sequence[Entry]) -> list[int]:
    """How many parameters of this rank each entry selects."""
    tag_declared((described.info.name, described.parameter) for described in parameters)
    for described in parameters:
        setattr(described.parameter, NAME, described.info.name)
    infos = [described.info for described in parameters]
    return match_counts(entries, infos, config.optimizer.removeprefix("dist_"))


def owners_of(
    parameters: Sequence[Described], config: Any, entries: Sequence[Entry], counts: Sequence[int]
) -> list[Owned]:
    """:func:`owners` of one rank, where it is known how many parameters of all ranks each entry selects."""
    primary = config.optimizer.removeprefix("dist_")
    resolved = resolve(entries, [described.info for described in parameters], primary, counts, known_names())
    found = []
    for described in parameters:
        own = resolved[described.info.name]
        _check_iteration(described, own, config)
        excluded_by_user = own.settings.get("exclude")
        found.append(Owned(described, own, None if excluded_by_user else own.settings.get("optimizer", primary)))
    return found


def _check_iteration(described: Described, resolved: Resolved, config: Any) -> None:
    """Steps and coefficients that go together, one of which may be the run's."""
    own = {key: resolved.settings[key] for key in ("num_ns_steps", "coefficient_type") if key in resolved.settings}
    if not own:
        return
    steps = own.get("num_ns_steps", config.muon_num_ns_steps)
    try:
        get_coefficients(own.get("coefficient_type", config.muon_coefficient_type), steps)
    except ValueError as error:
        places = " and ".join(sorted({resolved.sources[key] for key in own}))
        raise OverrideError(f"{described.info.name}: {places}: {error}") from None


def routed(owned: Sequence[Owned]) -> bool:
    """Whether somebody gave a parameter to an optimizer, beside the defaults."""
    return any(not each.resolved.sources.get("optimizer", DEFAULT).startswith(DEFAULT) for each in owned)


def splits(owned: Sequence[Owned], of_run: SplitName) -> list[tuple[Described, Split | None]]:
    """The split of every parameter that is orthogonalized: its own setting's, else that of the run.

    Raises:
        ValueError: if nobody has said how a fused parameter is to be orthogonalized.
    """
    return [
        (each.described, _split(each, of_run))
        for each in owned
        if each.owner is not None and takes_matrices(each.owner)
    ]


def _split(owned: Owned, of_run: SplitName) -> Split | None:
    own, described = owned.resolved.settings.get("split"), owned.described
    if own is not None and is_declared(described):
        raise OverrideError(
            f"{described.info.name}: split {own} by {owned.resolved.sources['split']} would have no effect, since its "
            f"matrices are declared: remove one of the two"
        )
    if owned.owner is None or not pairs_rows(owned.owner):
        return split_of(described, own or of_run)
    asked = own or of_run
    if (
        asked == "none"
        and not is_declared(described)
        and (found := fused(described))
        and found.matrices.order == "per_shard"
    ):
        raise OverrideError(
            f"{described.info.name} holds {found.what} in an order that follows the tensor-parallel ranks, and what "
            f"{owned.owner} keeps of its rows would be of no other size: let it be split (split: all), or give it to "
            f"another optimizer"
        )
    return split_of(described, "all" if asked == "default" else asked)


def for_megatron(owned: Sequence[Owned], config: Any) -> dict[ParamKey, dict[str, Any]]:
    """Megatron's overrides that give every parameter its settings, each in at most one of them.

    Raises:
        OverrideError: for a smallest learning rate above the largest.
    """
    primary = config.optimizer.removeprefix("dist_")
    alike: dict[tuple[tuple[str, Any], ...], set[int]] = {}
    for each in owned:
        if each.owner is not None and (settings := group_settings(each, config, primary)):
            alike.setdefault(tuple(sorted(settings.items())), set()).add(id(each.described.parameter))
    return {
        ParamKey(predicate=ParamPredicate(name=f"megatron_eopt {number}", fn=_among(places))): dict(settings)
        for number, (settings, places) in enumerate(alike.items())
    }


def group_settings(owned: Owned, config: Any, primary: str) -> dict[str, Any]:
    """What the group of a parameter says that is not the run's, in Megatron's words.

    Raises:
        OverrideError: for a smallest learning rate above the largest.
    """
    settings = owned.resolved.settings
    group = {key: value for key, value in settings.items() if key not in OF_ALL | {SPLIT}}
    if owned.owner != primary and releases.has_registry():
        group["optimizer"] = owned.owner
    rates = [key for key in _RATES if key in settings]
    if all(owned.resolved.sources[key].startswith(DEFAULT) for key in rates):
        # Megatron's own need not be in order: under a constant schedule nobody reads the smallest rate
        group |= {_MEGATRONS_RATES[key]: settings[key] for key in rates}
    else:
        try:
            group["max_lr"], group["min_lr"] = owned.resolved.learning_rates(config.lr, config.min_lr)
        except OverrideError as error:
            run = f"what no override sets is --lr {config.lr:g} and --min-lr {config.min_lr:g}"
            raise OverrideError(f"{owned.described.info.name}: {error}; {run}") from None
    decay = {end: settings.get(end, settings.get("weight_decay")) for end in ENDS}
    group |= {end: value for end, value in decay.items() if value is not None}
    if "wd_mult" in settings:
        group["wd_mult"] = settings["wd_mult"]
    return group


def _among(places: set[int]) -> Callable[[Any], bool]:
    return lambda parameter: id(parameter) in places


@contextmanager
def without_defaults(name: str) -> Iterator[None]:
    """While it is open, the registered optimizer routes nothing by itself: what it would route has been resolved."""
    entry = EMERGING_OPTIMIZERS[name]
    # by its attributes: an entry may be of another class than ours
    EMERGING_OPTIMIZERS[name] = EmergingOptimizerEntry(
        entry.optimizer_cls, entry.init_state_fn, entry.config_to_kwargs, default_param_overrides={}
    )
    try:
        yield
    finally:
        EMERGING_OPTIMIZERS[name] = entry


@contextmanager
def excluded(owned: Sequence[Owned]) -> Iterator[None]:
    """While it is open, no optimizer takes the parameters that are excluded; they get gradients, before as after."""
    parameters = [each.described.parameter for each in owned if each.owner is None]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def refuse_other_buffers(owned: Sequence[Owned]) -> None:
    """Refuse a parameter whose buffer was made for another kind of owner, as Megatron's layer-wise layout does.

    Raises:
        OverrideError: naming the parameters.
    """
    wrong = [
        each
        for each in owned
        if (tagged := getattr(each.described.parameter, _LAYER_WISE, None)) is not None
        and tagged != (each.owner is not None and takes_matrices(each.owner))
    ]
    if wrong:
        first = wrong[0].described
        laid_out = "a matrix optimizer" if getattr(first.parameter, _LAYER_WISE) else "Adam"
        raise OverrideError(
            f"{first.info.name} and {len(wrong) - 1} more are given to {wrong[0].owner or 'nobody'}, but Megatron laid "
            f"their buffers out for {laid_out} before it read any override: leave these parameters where they are, or "
            f"pass --no-use-layer-wise-param-layout"
        )
