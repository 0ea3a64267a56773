"""The entries of a run's overrides, from everything that may set something: defaults, Python, a file and flags."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from megatron_eopt.overrides import (
    Entry,
    Known,
    Layer,
    OverrideError,
    ParameterInfo,
    entries_from_dict,
    make_entry,
    read_overrides,
)
from megatron_eopt.registry import (
    decays_weights,
    get_optimizer_entry,
    is_muon_excluded,
    is_nonlinear_or_embedding,
    list_optimizers,
    takes_matrices,
)

# A way to split that Megatron's fused parameters know beyond those of every optimizer.
_SPLITS = ("per_head",)

DEFAULT = "default of"
"""Start of the source of a setting that nobody has requested."""


def all_entries(config: Any, config_overrides: Mapping[Any, Mapping[str, Any]] | None) -> list[Entry]:
    """Entries of all layers: the defaults of the optimizer and of Megatron, Python's, the file's and the flags'."""
    known, primary = known_names(), config.optimizer.removeprefix("dist_")
    standard = get_standard_config_overrides(config)
    given = standard if config_overrides is None else config_overrides
    theirs = {_signature(key): settings for key, settings in standard.items()}
    own = {
        key: settings
        for key, settings in given.items()
        if not isinstance(key, ParamKey) or (theirs.get(_signature(key)) != settings and not _of_mup(key))
    }
    defaults = {key: settings for key, settings in given.items() if key not in own}
    return [
        *_defaults(_routing(primary, config), primary, known),
        *_defaults(defaults, "Megatron", known),
        *_mup_of_others(defaults, known),
        *_without_decay(known),
        *entries_from_dict(own, Layer.PYTHON, "config_overrides", known),
        *_from_user(getattr(config, "optimizer_overrides", None), known),
        *_from_flags(primary, config, known),
    ]


def nonlinear_and_embedding_to_adam() -> dict[ParamKey, dict[str, Any]]:
    """Overrides that give embeddings, output layers and whatever is no matrix to Megatron's Adam."""
    predicate = ParamPredicate(name="nonlinear_or_embedding", fn=is_nonlinear_or_embedding)
    return {ParamKey(predicate=predicate): {"optimizer": "adam"}}


def excluded_from_muon_to_adam() -> dict[ParamKey, dict[str, Any]]:
    """The same, and those whose attribute ``use_muon`` is False."""
    predicate = ParamPredicate(name="muon_excluded", fn=is_muon_excluded)
    return {ParamKey(predicate=predicate): {"optimizer": "adam"}}


def _defaults(overrides: Mapping[Any, Mapping[str, Any]], whose: str, known: Known) -> list[Entry]:
    entries = entries_from_dict(overrides, Layer.DEFAULTS, known=known)
    return [replace(entry, source=f"{DEFAULT} {whose}") for entry in entries]


def _routing(primary: str, config: Any) -> dict[Any, dict[str, Any]]:
    scalar = getattr(config, "muon_scalar_optimizer", "adam")
    entry = get_optimizer_entry(primary)
    return {
        key: {**settings, "optimizer": scalar if settings.get("optimizer") == "adam" else settings["optimizer"]}
        if takes_matrices(primary) and "optimizer" in settings
        else dict(settings)
        for key, settings in entry.default_param_overrides.items()
    }


def _without_decay(known: Known) -> Iterator[Entry]:
    """No weight decay for parameters of optimizers that have none: the run's is for the rest."""
    for name in list_optimizers():
        if not decays_weights(name):
            yield make_entry(f"optimizer:{name}", {"weight_decay": 0.0}, Layer.DEFAULTS, f"{DEFAULT} {name}", known)


def _from_user(overrides: Any, known: Known) -> list[Entry]:
    if overrides is None:
        return []
    if isinstance(overrides, Mapping):
        return entries_from_dict(overrides, Layer.PYTHON, "optimizer_overrides", known)
    return read_overrides(overrides, known)


def _from_flags(primary: str, config: Any, known: Known) -> Iterator[Entry]:
    """``--muon-lr`` and its like, for the parameters of the run's optimizer."""
    for setting in ("lr", "min_lr", "weight_decay"):
        value = getattr(config, f"matrix_{setting}", None)
        if value is None:
            continue
        flag = f"--muon-{setting}".replace("_", "-")
        if not takes_matrices(primary):
            raise OverrideError(f"{flag} is for optimizers of matrices, and {primary} is for all: leave it away")
        yield make_entry(f"optimizer:{primary}", {setting: value}, Layer.FLAGS, flag, known)


def known_names() -> Known:
    """What settings may name: the optimizers that can be built here, and the ways to split."""
    return Known.registered(_SPLITS)


def _signature(key: Any) -> Any:
    """What a ParamKey asks, with its functions by their names: two of them are never equal."""
    if not isinstance(key, ParamKey):
        return key
    several = (_several(key.predicate), _several(key.with_name_predicate))
    return (*map(_several, (key.name, key.attr)), *(tuple(each.name for each in some) for some in several))


def _of_mup(key: ParamKey) -> bool:
    """Whether it is Megatron's, for muP."""
    predicates = (*_several(key.predicate), *_several(key.with_name_predicate))
    return bool(predicates) and all(each.name.startswith("mup_") for each in predicates)


def _mup_of_others(defaults: Mapping[Any, Mapping[str, Any]], known: Known) -> Iterator[Entry]:
    """Megatron's rates of muP, for hidden matrices that an override gives to Adam."""
    for key, settings in defaults.items():
        rates = {name: settings[name] for name in ("max_lr", "min_lr") if name in settings}
        if rates and isinstance(key, ParamKey) and _of_mup(key):
            yield from _defaults({_hidden_of_others: rates}, "Megatron", known)


def _hidden_of_others(info: ParameterInfo) -> bool:
    """A hidden matrix whose optimizer is not for matrices: Megatron's muP leaves it out, for it looks at the shape."""
    return info.is_matrix and info.optimizer is not None and not takes_matrices(info.optimizer)


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,) if value else ()
