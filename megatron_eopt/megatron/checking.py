"""Whether a run can be built as its overrides say: checked before any optimizer is built, where it can be."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_eopt.megatron.assignment import Assignment
from megatron_eopt.megatron.parameters import optimizer_parameters
from megatron_eopt.overrides import SETTINGS, OverrideError
from megatron_eopt.overrides.known import settings_of_groups
from megatron_eopt.overrides.settings import ENDS
from megatron_eopt.registry import EMERGING_OPTIMIZERS, create_emerging_optimizer, decays_weights


def refuse_other_buffers(assigned: Sequence[Assignment]) -> None:
    """Refuse parameters whose buffer was made for an optimizer of another kind, as Megatron's layer-wise layout does.

    Raises:
        OverrideError: naming the parameters.
    """
    mark = "is_managed_by_layer_wise_optimizer"
    wrong = [p for p in assigned if getattr(p.parameter.tensor, mark, None) not in (None, p.has_matrix_optimizer)]
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
        name, settings = trial = each.optimizer, _of_optimizer(each)
        if name not in EMERGING_OPTIMIZERS or not settings or trial in tried:
            continue
        tried.append(trial)
        if error(name, {}) is not None:
            continue  # whatever the overrides say: the run will meet it, or it has parameters to show
        if (together := error(name, settings)) is not None:
            alone = ((key, error(name, {key: value})) for key, value in settings.items())
            key, what = next((each for each in alone if each[1] is not None), (next(iter(settings)), together))
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
        if found is not None and (unread := sorted(_of_optimizer(each).keys() - settings_of_groups(found))):
            raise OverrideError(
                f"{each.resolved.sources[unread[0]]}: {unread[0]}: {each.optimizer} has one {unread[0]} for all its "
                f"parameters, which is set for the run alone, for {each.name}"
            )


def _of_optimizer(assigned: Assignment) -> dict[str, Any]:
    """What users set that this package knows no range of."""
    return {k: value for k, value in assigned.settings.items() if k not in SETTINGS and assigned.user_source(k)}


def _refuse_decay(assigned: Assignment, name: str, config: Any) -> None:
    settings = assigned.settings
    by_user = {key: source for key in ("weight_decay", *ENDS) if (source := assigned.user_source(key))}
    if not by_user:
        return
    wrong = None if decays_weights(name) else next((key for key in by_user if settings[key]), None)
    if wrong is not None:
        of_parameter = f"got {settings[wrong]:g} for {assigned.name}"
        raise OverrideError(f"{by_user[wrong]}: {wrong}: {name} has no weight decay, {of_parameter}: leave it out")
    start, end = (settings.get(key, settings.get("weight_decay", config.weight_decay)) for key in ENDS)
    if start != end and getattr(config, "weight_decay_incr_style", None) == "constant":
        raise OverrideError(
            f"{' and '.join(sorted({*by_user.values()}))}: {next(iter(by_user))}: the weight decay of {assigned.name} "
            f"would go from {start:g} to {end:g}, and --weight-decay-incr-style is constant: pass linear or cosine, "
            f"with --start-weight-decay and --end-weight-decay for the rest, or set the two to one value"
        )
