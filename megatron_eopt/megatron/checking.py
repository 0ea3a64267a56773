"""Whether the optimizers of a run take the values that overrides give their parameters: asked before any is built."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_eopt.megatron.entries import DEFAULT
from megatron_eopt.megatron.held import held
from megatron_eopt.megatron.overriding import Owned
from megatron_eopt.overrides import SETTINGS, OverrideError
from megatron_eopt.overrides.known import settings_of_groups
from megatron_eopt.overrides.settings import ENDS
from megatron_eopt.registry import EMERGING_OPTIMIZERS, create_emerging_optimizer, decays_weights


def refuse_bad_values(owned: Sequence[Owned], config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> None:
    """Refuse values that an optimizer would refuse, or not read, and weight decays that Megatron could not follow.

    Args:
        owned: parameters with their settings.
        config: Megatron's ``OptimizerConfig``.
        model_chunks: as ``create_emerging_optimizer`` takes them.
        pg_collection: likewise.

    Raises:
        OverrideError: naming the entry and the parameter.
    """
    tried: dict[tuple[str, tuple[tuple[str, Any], ...]], None] = {}
    for each in owned:
        if each.owner is None:
            continue
        _refuse_decay(each, each.owner, config)
        own = _of_optimizer(each)
        if each.owner not in EMERGING_OPTIMIZERS or not own or (each.owner, tuple(own.items())) in tried:
            continue
        tried[each.owner, tuple(own.items())] = None
        wrong = _Trial(each.owner, config, model_chunks, pg_collection).mistake(own)
        if wrong is not None:
            key, what = wrong
            raise OverrideError(f"{each.resolved.sources[key]}: {key}: {what}, for {each.described.info.name}")


def refuse_unread(optimizer: Any, owned: Sequence[Owned]) -> None:
    """Refuse settings that the optimizer of a parameter has for all of its parameters, and reads from no group.

    Known for sure of optimizers that were built: some cannot be without parameters, to be asked before.

    Args:
        optimizer: Megatron's.
        owned: parameters with their settings.

    Raises:
        OverrideError: naming the entry and the parameter.
    """
    optimizers = {id(each.parameter): each.optimizer for each in held(optimizer)}
    for each in owned:
        found = optimizers.get(id(each.described.parameter))
        unread = sorted(_of_optimizer(each).keys() - settings_of_groups(found)) if found is not None else []
        if unread:
            raise OverrideError(
                f"{each.resolved.sources[unread[0]]}: {unread[0]}: {each.owner} has one {unread[0]} for all its "
                f"parameters, which is set for the run alone, for {each.described.info.name}"
            )


def _of_optimizer(owned: Owned) -> dict[str, Any]:
    """What users set that this package knows no range of."""
    settings, sources = owned.resolved.settings, owned.resolved.sources
    return {key: settings[key] for key in settings.keys() - SETTINGS if not sources[key].startswith(DEFAULT)}


class _Trial:
    """An optimizer without parameters, built as the run would build it."""

    def __init__(self, name: str, *run: Any) -> None:
        self._name, self._run = name, run

    def mistake(self, settings: Mapping[str, Any]) -> tuple[str, str] | None:
        """The setting that the optimizer does not take, and what it says; None where it takes all, or none at all."""
        if self._error({}) is not None:
            return None  # whatever the overrides say: the run will meet it, or it has parameters to show
        wrong = self._error(settings)
        if wrong is None:
            return None
        alone = ((key, self._error({key: value})) for key, value in settings.items())
        return next(((key, error) for key, error in alone if error is not None), (next(iter(settings)), wrong))

    def _error(self, settings: Mapping[str, Any]) -> str | None:
        config, model_chunks, pg_collection = self._run
        try:
            create_emerging_optimizer(config, [{"params": [], **settings}], self._name, model_chunks, pg_collection)
        except Exception as error:  # of whatever kind a user's optimizer raises
            return str(error)
        return None


def _refuse_decay(owned: Owned, name: str, config: Any) -> None:
    settings, sources = owned.resolved.settings, owned.resolved.sources
    set_here = [key for key in ("weight_decay", *ENDS) if not sources.get(key, DEFAULT).startswith(DEFAULT)]
    if not set_here:
        return
    where = " and ".join(sorted({sources[key] for key in set_here}))
    constant = settings.get("weight_decay", config.weight_decay)
    start, end = (settings.get(key, constant) for key in ENDS)
    wrong = None if decays_weights(name) else next((key for key in set_here if settings[key]), None)
    if wrong is not None:
        of_parameter = f"got {settings[wrong]:g} for {owned.described.info.name}"
        raise OverrideError(f"{sources[wrong]}: {wrong}: {name} has no weight decay, {of_parameter}: leave it out")
    if start != end and getattr(config, "weight_decay_incr_style", None) == "constant":
        raise OverrideError(
            f"{where}: {set_here[0]}: the weight decay of {owned.described.info.name} would go from {start:g} to "
            f"{end:g}, and --weight-decay-incr-style is constant: pass linear or cosine, with --start-weight-decay and "
            f"--end-weight-decay for the rest, or set the two to one value"
        )
