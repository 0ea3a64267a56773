"""Which optimizer updates every parameter, with which settings; also in the form that Megatron makes groups from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from megatron_eopt.megatron import releases
from megatron_eopt.megatron.agreement import gathered, on_all_ranks
from megatron_eopt.megatron.entries import DEFAULT, all_entries, known_names
from megatron_eopt.megatron.parameters import ModelParameter
from megatron_eopt.orthogonalize.coefficients import get_coefficients
from megatron_eopt.overrides import Entry, OverrideError, Resolved, match_counts, resolve
from megatron_eopt.overrides.settings import ENDS, OF_ALL
from megatron_eopt.registry import takes_matrices

_RATES = {"lr": "max_lr", "min_lr": "min_lr", "lr_mult": "lr_mult"}  # setting -> its name in Megatron's groups


@dataclass(frozen=True)
class Assignment:
    """A parameter, the optimizer that updates it, and its settings.

    Attributes:
        parameter: the parameter.
        optimizer: its optimizer's name; None for a parameter that is excluded.
        resolved: its settings, and the source of each.
    """

    parameter: ModelParameter
    optimizer: str | None
    resolved: Resolved

    @property
    def name(self) -> str:
        """Of the parameter."""
        return self.parameter.name

    @property
    def settings(self) -> dict[str, Any]:
        """By name, those that anybody has set for this parameter."""
        return self.resolved.settings

    @property
    def has_matrix_optimizer(self) -> bool:
        """Whether its optimizer is one for matrices."""
        return self.optimizer is not None and takes_matrices(self.optimizer)

    def user_source(self, setting: str) -> str | None:
        """What set a setting for this parameter; None where nobody did, or a default alone."""
        source = self.resolved.sources.get(setting, DEFAULT)
        return None if source.startswith(DEFAULT) else source


def assign(
    parameters: Sequence[ModelParameter], config: Any, config_overrides: Mapping[Any, Mapping[str, Any]] | None
) -> list[Assignment]:
    """Every parameter with its optimizer and settings; all ranks call it together.

    Args:
        parameters: of this rank.
        config: Megatron's ``OptimizerConfig``, on which our flags have put ``optimizer_overrides`` and others.
        config_overrides: Megatron's, or selectors of this package instead; None for Megatron's standard ones.

    Raises:
        OverrideError: as :func:`~megatron_eopt.overrides.resolve`, on all ranks.
    """
    entries = all_entries(config, config_overrides)
    everywhere = gathered(matches(parameters, config, entries))
    counts = [sum(of_entry) for of_entry in zip(*everywhere, strict=True)]
    return on_all_ranks(lambda: assignments(parameters, config, entries, counts))


def matches(parameters: Sequence[ModelParameter], config: Any, entries: Sequence[Entry]) -> list[int]:
    """How many parameters of this rank each entry selects."""
    return match_counts(entries, [each.info for each in parameters], config.optimizer.removeprefix("dist_"))


def assignments(
    parameters: Sequence[ModelParameter], config: Any, entries: Sequence[Entry], counts: Sequence[int]
) -> list[Assignment]:
    """:func:`assign` on one rank, given how many parameters of all ranks each entry selects."""
    primary = config.optimizer.removeprefix("dist_")
    resolved = resolve(entries, [each.info for each in parameters], primary, counts, known_names())
    found = []
    for parameter in parameters:
        own = resolved[parameter.name]
        _check_iteration(parameter, own, config)
        optimizer = None if own.settings.get("exclude") else own.settings.get("optimizer", primary)
        found.append(Assignment(parameter, optimizer, own))
    return found


def _check_iteration(parameter: ModelParameter, resolved: Resolved, config: Any) -> None:
    """Check that steps and coefficients, one of which may be the run's, go together."""
    own = {key: resolved.settings[key] for key in ("num_ns_steps", "coefficient_type") if key in resolved.settings}
    if not own:
        return
    steps = own.get("num_ns_steps", config.muon_num_ns_steps)
    try:
        get_coefficients(own.get("coefficient_type", config.muon_coefficient_type), steps)
    except ValueError as error:
        sources = " and ".join(sorted({resolved.sources[key] for key in own}))
        raise OverrideError(f"{parameter.name}: {sources}: {error}") from None


class MegatronOverrides(dict[ParamKey, dict[str, Any]]):
    """Overrides for Megatron's builder that hold the settings of every parameter, each in at most one of them.

    Megatron adds the default routing of the registered optimizer to the overrides that it is given. That routing is
    among the settings already, where an override may have overruled it: so what is added is left out.

    Raises:
        OverrideError: for a smallest learning rate above the largest.
    """

    def __init__(self, assigned: Sequence[Assignment], config: Any) -> None:
        alike: dict[tuple[tuple[str, Any], ...], set[int]] = {}
        for each in assigned:
            if each.optimizer is not None and (settings := group_settings(each, config)):
                alike.setdefault(tuple(sorted(settings.items())), set()).add(id(each.parameter.tensor))
        super().__init__(
            (ParamKey(predicate=ParamPredicate(name=f"megatron_eopt {number}", fn=_among(ids))), dict(settings))
            for number, (settings, ids) in enumerate(alike.items())
        )

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add nothing."""


def _among(ids: set[int]) -> Callable[[Any], bool]:
    return lambda parameter: id(parameter) in ids


def group_settings(assigned: Assignment, config: Any) -> dict[str, Any]:
    """What the group of a parameter says that is not the run's, in Megatron's words.

    Raises:
        OverrideError: for a smallest learning rate above the largest.
    """
    settings = assigned.settings
    group = {key: value for key, value in settings.items() if key not in OF_ALL | {"split"}}
    if assigned.optimizer != config.optimizer.removeprefix("dist_") and releases.has_registry():
        group["optimizer"] = assigned.optimizer
    if any(assigned.user_source(key) for key in _RATES):
        try:
            group["max_lr"], group["min_lr"] = assigned.resolved.learning_rates(config.lr, config.min_lr)
        except OverrideError as error:
            run = f"what no override sets is --lr {config.lr:g} and --min-lr {config.min_lr:g}"
            raise OverrideError(f"{assigned.name}: {error}; {run}") from None
    else:  # Megatron's own need not be in order: under a constant schedule nobody reads the smallest rate
        group |= {theirs: settings[key] for key, theirs in _RATES.items() if key in settings}
    decay = {end: settings.get(end, settings.get("weight_decay")) for end in ENDS}
    group |= {end: value for end, value in decay.items() if value is not None}
    if "wd_mult" in settings:
        group["wd_mult"] = settings["wd_mult"]
    return group


@contextmanager
def excluded_hidden(assigned: Sequence[Assignment]) -> Iterator[None]:
    """While it is open, excluded parameters require no gradient, so that Megatron builds no optimizer for them."""
    tensors = [each.parameter.tensor for each in assigned if each.optimizer is None]
    for tensor in tensors:
        tensor.requires_grad_(False)
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.requires_grad_(True)
