"""Which optimizer updates every parameter, with which settings."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from megatron_eopt.megatron.consensus import distinct, from_rank_0, of_entries, on_all_ranks, refuse_different
from megatron_eopt.megatron.model_parameters import ModelParameter
from megatron_eopt.megatron.overrides import DEFAULT, Overrides, all_entries
from megatron_eopt.megatron.support.facts import primary_of
from megatron_eopt.megatron.wrappers import optimizer_parameters
from megatron_eopt.registry import class_named, takes_matrices
from megatron_eopt.routing import OverrideError, Resolved, resolve
from megatron_eopt.routing.entries import Entry
from megatron_eopt.routing.precedence import match_counts
from megatron_eopt.routing.settings import ENDS, OF_ALL, settings_of_groups

_OF_RUN = {*OF_ALL, "split"}  # settings that are no optimizer's
NOT_REGISTERED: dict[str, Any] = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}  # Megatron builds such
_RATES = {"lr": "max_lr", "min_lr": "min_lr", "lr_mult": "lr_mult"}  # setting -> its name in Megatron's groups


@dataclass(frozen=True)
class Assignment:
    """A parameter, the optimizer that updates it, and its settings."""

    parameter: ModelParameter
    optimizer: str | None  # its name; None for a parameter that is excluded
    resolved: Resolved  # settings that anybody has set for it, with the source of each

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.parameter.name

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name."""
        return self.resolved.settings

    @property
    def has_matrix_optimizer(self) -> bool:
        """Whether its optimizer is one for matrices."""
        return self.optimizer is not None and takes_matrices(self.optimizer)

    def user_source(self, setting: str) -> str | None:
        """What set a setting; None for a default or nothing."""
        source = self.resolved.sources.get(setting, DEFAULT)
        return None if source.startswith(DEFAULT) else source


def assign(parameters: Sequence[ModelParameter], config: Any, config_overrides: Overrides | None) -> list[Assignment]:
    """Assign every parameter of this rank; all ranks together."""
    entries = on_all_ranks(lambda: all_entries(config, config_overrides))  # one may have no file to read
    refuse_different(of_entries(entries))
    sources = from_rank_0(lambda: [entry.source for entry in entries])  # files may have other paths on other nodes
    entries = [replace(entry, source=source) for entry, source in zip(entries, sources, strict=True)]
    counts = [max(of_entry) for of_entry in zip(*distinct(matches(parameters, config, entries)), strict=True)]
    return on_all_ranks(lambda: assignments(parameters, config, entries, counts))


def matches(parameters: Sequence[ModelParameter], config: Any, entries: Sequence[Entry]) -> list[int]:
    """How many parameters of this rank each entry selects."""
    return match_counts(entries, [parameter.info for parameter in parameters], primary_of(config))


def assignments(
    parameters: Sequence[ModelParameter], config: Any, entries: Sequence[Entry], counts: Sequence[int]
) -> list[Assignment]:
    """:func:`assign` on one rank; ``counts`` are matches on all ranks."""
    primary = primary_of(config)
    resolved = resolve(entries, [parameter.info for parameter in parameters], primary, counts)
    assigned = []
    for parameter in parameters:
        own = resolved[parameter.name]
        optimizer = None if own.settings.get("exclude") else own.settings.get("optimizer", primary)
        assigned.append(Assignment(parameter, optimizer, own))
    return assigned


class MegatronOverrides(dict[ParamKey, dict[str, Any]]):
    """Overrides for Megatron's builder, at most one for each parameter."""

    def __init__(self, assigned: Sequence[Assignment], config: Any) -> None:
        super().__init__()
        alike: dict[tuple[tuple[str, Any], ...], set[int]] = {}
        for each in assigned:
            settings = {} if each.optimizer is None else group_settings(each, config)
            if settings:
                alike.setdefault(tuple(sorted(settings.items())), set()).add(id(each.parameter.tensor))
        for number, (of_group, ids) in enumerate(alike.items()):
            among = ParamPredicate(f"megatron_eopt {number}", lambda parameter, ids=ids: id(parameter) in ids)
            self[ParamKey(predicate=among)] = dict(of_group)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the default routing that Megatron adds: it is included."""


def group_settings(assigned: Assignment, config: Any) -> dict[str, Any]:
    """Settings that are not the run's, in Megatron's names."""
    settings = assigned.settings
    group = {key: value for key, value in settings.items() if key not in _OF_RUN}
    if assigned.optimizer != primary_of(config):
        group["optimizer"] = assigned.optimizer
    if any(assigned.user_source(key) for key in _RATES):
        group["max_lr"], group["min_lr"] = assigned.resolved.learning_rates(config.lr, config.min_lr)
    else:  # Megatron's own need not be in order: under a constant schedule nobody reads the smallest rate
        group |= {theirs: settings[key] for key, theirs in _RATES.items() if key in settings}
    decay = {end: settings.get(end, settings.get("weight_decay")) for end in ENDS}
    decay["wd_mult"] = settings.get("wd_mult")
    return group | {key: value for key, value in decay.items() if value is not None}


@contextmanager
def excluded_hidden(assigned: Sequence[Assignment]) -> Iterator[None]:
    """Hide excluded parameters from Megatron: they require no gradient."""
    tensors = [each.parameter.tensor for each in assigned if each.optimizer is None]
    for tensor in tensors:
        tensor.requires_grad_(False)
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.requires_grad_(True)


def refuse_other_buffers(assigned: Sequence[Assignment]) -> None:
    """Refuse parameters whose buffers are for another optimizer."""
    wrong = []
    for each in assigned:
        for_matrices = getattr(each.parameter.tensor, "is_managed_by_layer_wise_optimizer", None)
        if for_matrices is not None and for_matrices != each.has_matrix_optimizer:
            wrong.append(each)
    if wrong:
        laid_out = "Adam" if wrong[0].has_matrix_optimizer else "a matrix optimizer"
        raise OverrideError(
            f"{wrong[0].name} and {len(wrong) - 1} more are given to {wrong[0].optimizer or 'nobody'}, but Megatron "
            f"laid their buffers out for {laid_out} before it read any override: leave these parameters where they "
            f"are, or pass --no-use-layer-wise-param-layout"
        )


def refuse_bad_values(assigned: Sequence[Assignment]) -> None:
    """Refuse what torch checks of no group, and decays that nothing reads.

    Optimizers of this package check the groups that they are built with. Those of torch check arguments alone.
    """
    for each in assigned:
        name = each.optimizer
        settings = _users_settings(each)
        if name in NOT_REGISTERED and settings:
            try:
                NOT_REGISTERED[name]([torch.zeros(1)], **settings)
            except ValueError as error:
                sources = " and ".join(dict.fromkeys(each.resolved.sources[key] for key in settings))
                raise OverrideError(f"{sources}: {error}, for {each.name}") from None
        for key in ("weight_decay", *ENDS):
            source = each.user_source(key)
            if name is not None and source and each.settings[key] and not class_named(name).decays_weights:
                raise OverrideError(f"{source}: {key}: {name} has no weight decay, for {each.name}: leave it out")


def refuse_unread(optimizer: Any, assigned: Sequence[Assignment]) -> None:
    """Refuse settings that a built optimizer reads from no group."""
    optimizers = {id(each.model): each.optimizer for each in optimizer_parameters(optimizer)}
    for each in assigned:
        updating = optimizers.get(id(each.parameter.tensor))
        if updating is None:
            continue
        for key in sorted(_users_settings(each).keys() - settings_of_groups(updating)):
            raise OverrideError(
                f"{each.resolved.sources[key]}: {key}: {each.optimizer} has one {key} for all its parameters, which is "
                f"set for the run alone, for {each.name}"
            )


def _users_settings(assigned: Assignment) -> dict[str, Any]:
    """What a user has set for a parameter, of settings that its optimizer reads."""
    settings = {}
    for key, value in assigned.settings.items():
        if key not in _OF_RUN and assigned.user_source(key):
            settings[key] = value
    return settings
