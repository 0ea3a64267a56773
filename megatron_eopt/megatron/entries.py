"""The overrides of a run, from defaults, Python, files, flags."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from megatron_eopt import registry
from megatron_eopt.registry import takes_matrices
from megatron_eopt.routing import Entry, Known, Layer, OverrideError, ParameterInfo
from megatron_eopt.routing.entries import entries_from_dict, make_entry, read_overrides

Overrides = Mapping[Any, Mapping[str, Any]]  # selector, or Megatron's ``ParamKey`` -> settings
DEFAULT = "default of"  # start of the source of a setting that nobody has requested


def all_entries(config: Any, config_overrides: Overrides | None) -> list[Entry]:
    """Entries of all layers, each with its mistakes."""
    known, primary = known_names(), config.optimizer.removeprefix("dist_")
    without_decay = [name for name in registry.list_optimizers() if not registry.traits_of(name).decays_weights]
    user = getattr(config, "optimizer_overrides", None)
    if user is None or isinstance(user, Mapping):
        from_user = entries_from_dict(user or {}, Layer.PYTHON, "optimizer_overrides", known, keep_mistakes=True)
    else:
        from_user = read_overrides(user, known, keep_mistakes=True)
    standard = get_standard_config_overrides(config)
    given = standard if config_overrides is None else config_overrides
    theirs = {key for key in given if isinstance(key, ParamKey) and (standard.get(key) == given[key] or _of_mup(key))}
    users = {key: settings for key, settings in given.items() if key not in theirs}
    defaults = {key: settings for key, settings in given.items() if key in theirs}
    return [
        *_defaults(_routing(primary, config), primary, known),
        *_defaults(defaults, "Megatron", known),
        *_mup_of_others(defaults, known),
        # the run's weight decay is for the rest
        *chain(*(_defaults({f"optimizer:{name}": {"weight_decay": 0.0}}, name, known) for name in without_decay)),
        *entries_from_dict(users, Layer.PYTHON, "config_overrides", known, keep_mistakes=True),
        *from_user,
        *_from_flags(primary, config, known),
    ]


def _make_param_key(name: str, takes: Callable[[Any], bool]) -> ParamKey:
    return ParamKey(predicate=ParamPredicate(name=name, fn=takes))


registry.EMERGING_OPTIMIZERS.make_param_key = _make_param_key


def _defaults(overrides: Overrides, whose: str, known: Known) -> list[Entry]:
    entries = entries_from_dict(overrides, Layer.DEFAULTS, known=known)
    return [replace(entry, source=f"{DEFAULT} {whose}") for entry in entries]


def _routing(primary: str, config: Any) -> dict[Any, dict[str, Any]]:
    default = registry.get_optimizer_entry(primary).default_param_overrides
    scalar = {"optimizer": getattr(config, "muon_scalar_optimizer", "adam")} if takes_matrices(primary) else {}
    return {key: {**x, **(scalar if x.get("optimizer") == "adam" else {})} for key, x in default.items()}


def _from_flags(primary: str, config: Any, known: Known) -> Iterator[Entry]:
    for setting in ("lr", "min_lr", "weight_decay"):
        if (value := getattr(config, f"matrix_{setting}", None)) is None:
            continue
        flag = f"--muon-{setting}".replace("_", "-")
        if not takes_matrices(primary):
            raise OverrideError(f"{flag} is for optimizers of matrices, and {primary} is for all: leave it away")
        yield make_entry(f"optimizer:{primary}", {setting: value}, Layer.FLAGS, flag, known)


def known_names() -> Known:
    """Names for settings: optimizers that can be built, and splits."""
    return Known.registered(["per_head"])  # which Megatron's fused parameters know beyond those of every optimizer


def _of_mup(key: Any) -> bool:
    return isinstance(key, ParamKey) and getattr(key.with_name_predicate, "name", "").startswith("mup_")


def _mup_of_others(defaults: Overrides, known: Known) -> Iterator[Entry]:
    for key, settings in defaults.items():
        rates = {name: settings[name] for name in ("max_lr", "min_lr") if name in settings}
        if rates and _of_mup(key):
            yield from _defaults({_hidden_of_others: rates}, "Megatron", known)


def _hidden_of_others(info: ParameterInfo) -> bool:
    """Hidden matrices of element-wise optimizers, which Megatron's muP skips."""
    return info.is_matrix and info.optimizer is not None and not takes_matrices(info.optimizer)
