"""Whether a run can be built as its overrides say: checked before any optimizer is built, where it can be."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_eopt.megatron.assignment import Assignment
from megatron_eopt.megatron.parameters import optimizer_parameters
from megatron_eopt.overrides import SETTINGS, OverrideError
from megatron_eopt.overrides.known import settings_of_groups
from megatron_eopt.overrides.settings import ENDS
from megatron_eopt.registry import EMERGING_OPTIMIZERS, create_emerging_optimizer, decays_weights

_LAYER_WISE = "is_managed_by_layer_wise_optimizer"


def refuse_other_buffers(assigned: Sequence[Assignment]) -> None:
    """Refuse a parameter whose buffer was made for an optimizer of another kind, as Megatron's layer-wise layout does.

    Raises:
        OverrideError: naming the parameters.
    """
    wrong = []
    for each in assigned:
        laid_out = getattr(each.parameter.tensor, _LAYER_WISE, None)
        if laid_out is not None and laid_out != each.has_matrix_optimizer:
            wrong.append(each)
    if wrong:
        laid_out = "Adam" if wrong[0].has_matrix_optimizer else "a matrix optimizer"
        raise OverrideError(
            f"{wrong[0].name} and {len(wrong) - 1} more are given to {wrong[0].optimizer or 'nobody'}, but Megatron "
            f"laid their buffers out for {laid_out} before it read any override: leave these parameters where they "
            f"are, or pass --no-use-layer-wise-param-layout"
        )


def refuse_bad_values(
    assigned: Sequence[Assignment], config: Any, model_chunks: Sequence[Any], pg_collection: Any
) -> None:
    """Refuse values that an optimizer would refuse, or not read, and weight decays that Megatron could not follow.

    An optimizer without parameters is built as the run would build it, and checks its own arguments.

    Raises:
        OverrideError: naming the entry and the parameter.
    """

    def error(name: str, settings: Mapping[str, Any]) -> str | None:
        try:
            create_emerging_optimizer(config, [{"params": [], **settings}], name, model_chunks, pg_collection)
        except Exception as found:  # of whatever kind a user's optimizer raises
            return str(found)
        return None

    tried = []
    for each in assigned:
        if each.optimizer is None:
            continue
        _refuse_decay(each, each.optimizer, config)
        trial = each.optimizer, _of_optimizer(each)
        if each.optimizer not in EMERGING_OPTIMIZERS or not trial[1] or trial in tried:
            continue
        tried.append(trial)
        wrong = _mistake(trial[1], partial(error, each.optimizer))
        if wrong is not None:
            key, what = wrong
            raise OverrideError(f"{each.resolved.sources[key]}: {key}: {what}, for {each.name}")


def refuse_unread(optimizer: Any, assigned: Sequence[Assignment]) -> None:
    """Refuse settings that the optimizer of a parameter has for all of its parameters, and reads from no group.

    Known for sure of optimizers that were built: some cannot be built without parameters.

    Raises:
        OverrideError: naming the entry and the parameter.
    """
    optimizers = {id(each.model): each.optimizer for each in optimizer_parameters(optimizer)}
    for each in assigned:
        found = optimizers.get(id(each.parameter.tensor))
        unread = sorted(_of_optimizer(each).keys() - settings_of_groups(found)) if found is not None else []
        if unread:
            raise OverrideError(
                f"{each.resolved.sources[unread[0]]}: {unread[0]}: {each.optimizer} has one {unread[0]} for all its "
                f"parameters, which is set for the run alone, for {each.name}"
            )


def _of_optimizer(assigned: Assignment) -> dict[str, Any]:
    """What users set that this package knows no range of."""
    return {k: value for k, value in assigned.settings.items() if k not in SETTINGS and assigned.user_source(k)}


def _mistake(settings: Mapping[str, Any], error: Callable[[Mapping[str, Any]], str | None]) -> tuple[str, str] | None:
    """The setting that an optimizer does not take, and what it says; None where it takes all, or none at all.

    Args:
        settings: those that it is tried with, together and then each by itself.
        error: what the optimizer says of some settings, None where it takes them.
    """
    if error({}) is not None:
        return None  # whatever the overrides say: the run will meet it, or it has parameters to show
    wrong = error(settings)
    if wrong is None:
        return None
    alone = ((key, error({key: value})) for key, value in settings.items())
    return next(((key, said) for key, said in alone if said is not None), (next(iter(settings)), wrong))


def _refuse_decay(assigned: Assignment, name: str, config: Any) -> None:
    settings = assigned.settings
    by_user = {key: source for key in ("weight_decay", *ENDS) if (source := assigned.user_source(key))}
    if not by_user:
        return
    constant = settings.get("weight_decay", config.weight_decay)
    start, end = (settings.get(key, constant) for key in ENDS)
    wrong = None if decays_weights(name) else next((key for key in by_user if settings[key]), None)
    if wrong is not None:
        of_parameter = f"got {settings[wrong]:g} for {assigned.name}"
        raise OverrideError(f"{by_user[wrong]}: {wrong}: {name} has no weight decay, {of_parameter}: leave it out")
    if start != end and getattr(config, "weight_decay_incr_style", None) == "constant":
        raise OverrideError(
            f"{' and '.join(sorted({*by_user.values()}))}: {next(iter(by_user))}: the weight decay of {assigned.name} "
            f"would go from {start:g} to {end:g}, and --weight-decay-incr-style is constant: pass linear or cosine, "
            f"with --start-weight-decay and --end-weight-decay for the rest, or set the two to one value"
        )
