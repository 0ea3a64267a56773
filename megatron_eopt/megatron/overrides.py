"""The overrides of a run, from defaults, Python, files, flags."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from megatron_eopt import registry
from megatron_eopt.megatron.support.facts import primary_of
from megatron_eopt.registry import takes_matrices
from megatron_eopt.routing import ParameterInfo, entries_from_dict, read_overrides
from megatron_eopt.routing.entries import Entry, Layer, make_entries

Overrides = Mapping[Any, Mapping[str, Any]]  # selector, or Megatron's ``ParamKey`` -> settings
DEFAULT = "default of"  # start of the source of a setting that nobody has requested


def _make_param_key(name: str, takes: Callable[[Any], bool]) -> ParamKey:
    return ParamKey(predicate=ParamPredicate(name=name, fn=takes))


registry.EMERGING_OPTIMIZERS.make_param_key = _make_param_key


def all_entries(config: Any, config_overrides: Overrides | None) -> list[Entry]:
    """Entries of all layers."""
    primary = primary_of(config)
    standard = get_standard_config_overrides(config)
    given = standard if config_overrides is None else config_overrides
    megatrons = {}
    users = {}
    for key, settings in given.items():
        is_standard = isinstance(key, ParamKey) and standard.get(key) == settings
        if is_standard or _of_mup(key):
            megatrons[key] = settings
        else:
            users[key] = settings
    entries = _defaults(_routing(primary, config), primary) + _defaults(megatrons, "Megatron")
    for key, settings in megatrons.items():
        rates = {name: settings[name] for name in ("max_lr", "min_lr") if name in settings}
        if rates and _of_mup(key):
            entries += _defaults({_hidden_of_others: rates}, "Megatron")
    for name in registry.list_optimizers():
        if not registry.class_named(name).decays_weights:  # the run's weight decay is for the rest
            entries += _defaults({f"optimizer:{name}": {"weight_decay": 0.0}}, name)
    entries += entries_from_dict(users, source="config_overrides")
    own = getattr(config, "optimizer_overrides", None)
    if isinstance(own, Mapping):
        entries += entries_from_dict(own, source="optimizer_overrides")
    elif own is not None:
        entries += read_overrides(own)
    for setting in ("lr", "min_lr", "weight_decay"):
        value = getattr(config, f"matrix_{setting}", None)
        if value is not None and takes_matrices(primary):  # with another one it is told to be without effect
            flag = f"--muon-{setting}".replace("_", "-")
            entries += make_entries([(f"optimizer:{primary}", {setting: value}, flag)], Layer.FLAGS)
    return entries


def _defaults(overrides: Overrides, whose: str) -> list[Entry]:
    entries = entries_from_dict(overrides, Layer.DEFAULTS)
    return [replace(entry, source=f"{DEFAULT} {whose}") for entry in entries]


def _routing(primary: str, config: Any) -> Overrides:
    default: Overrides = registry.get_optimizer_entry(primary).default_param_overrides
    if not takes_matrices(primary):
        return default
    scalar = getattr(config, "muon_scalar_optimizer", "adam")
    routing = {}
    for key, settings in default.items():
        is_scalars = settings.get("optimizer") == "adam"
        routing[key] = {**settings, "optimizer": scalar} if is_scalars else settings
    return routing


def _of_mup(key: Any) -> bool:
    return isinstance(key, ParamKey) and getattr(key.with_name_predicate, "name", "").startswith("mup_")


def _hidden_of_others(info: ParameterInfo) -> bool:
    """Hidden matrices of element-wise optimizers, which Megatron's muP skips."""
    return info.is_matrix and info.optimizer is not None and not takes_matrices(info.optimizer)
