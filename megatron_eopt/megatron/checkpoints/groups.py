"""Which settings a group of parameters has after a load: groups are found by the names of their parameters.

What the user sets comes from the run that loads, whatever the checkpoint says, and a difference is reported. What the
run itself made of a group (a step count, where the schedule stood) comes from the checkpoint.
"""

from collections.abc import Mapping, Sequence, Set
from itertools import pairwise
from typing import Any

Settings = dict[str, Any]
Names = dict[str, list[list[int]]]
"""Key of the model in the checkpoint -> runs ``[first, last + 1]`` of the places (layers, experts) that are stacked
under it, those of a key with nothing stacked being ``[[0, 1]]``."""

SCHEDULED = frozenset({"lr", "weight_decay"})
"""Where the schedule stands: Megatron's scheduler computes them anew after a load, a loop without one goes on from
them."""

SCHEDULE = frozenset({"max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult"})
"""What the schedule starts from."""

OVERRIDES = frozenset(
    {"optimizer", "betas", "eps", "momentum", "num_ns_steps", "coefficient_type", "scale_mode", "extra_scale_factor"}
)
"""What a user gives to single groups: where a run no longer has one of them, it goes on without."""

_PARAMETERS = frozenset({"params", "param_names"})
_STRUCTURE = frozenset({"is_expert_parallel", "default_config"})  # of the layout, and of how Megatron logs


def compressed(places: Mapping[str, Set[int]]) -> Names:
    """Names in the short form in which a checkpoint holds them."""
    return {key: _runs(sorted(found)) for key, found in sorted(places.items())}


def _runs(places: Sequence[int]) -> list[list[int]]:
    edges = [0, *(i for i, (a, b) in enumerate(pairwise(places), 1) if b != a + 1), len(places)]
    return [[places[first], places[last - 1] + 1] for first, last in pairwise(edges)] if places else []


def merged(names: Sequence[Names]) -> Names:
    """The names of all ranks together."""
    places: dict[str, set[int]] = {}
    for each in names:
        for key, runs in each.items():
            places.setdefault(key, set()).update(place for first, end in runs for place in range(first, end))
    return compressed(places)


def has(names: Names, key: str, place: int) -> bool:
    """Whether a parameter is among the names."""
    return any(first <= place < end for first, end in names.get(key, ()))


def settings_after_load(
    current: Settings, saved: Sequence[Settings], carried: Set[str], from_checkpoint: bool = False
) -> tuple[Settings, dict[str, tuple[Any, Any]]]:
    """The settings with which a group goes on.

    Args:
        current: of the group, as this run has built it.
        saved: of the groups in which the checkpoint has its parameters; none for a group that is empty here.
        carried: settings that the optimizer itself makes, which come from the checkpoint.
        from_checkpoint: the user asked for the schedule of the checkpoint.

    Returns:
        The settings, and those that the user has changed: name -> (in the checkpoint, now).

    Raises:
        ValueError: if the groups of the checkpoint differ in what would be carried over.
    """
    result = {key: value for key, value in current.items() if key not in _PARAMETERS}
    if not saved:
        return result, {}
    gone = {key for group in saved for key in group if key not in current} - _PARAMETERS
    carried = carried | {"step"} | (gone - OVERRIDES - SCHEDULE)
    for key in sorted(carried):
        values = [group[key] for group in saved if key in group]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"parameters of one group come from groups of the checkpoint with different {key!r}: {values}; keep "
                f"the groups of the run that saved, or pass --no-load-optim to start with fresh state"
            )
        if values:
            result[key] = values[0]
    changed: dict[str, tuple[Any, Any]] = {
        key: (next(group[key] for group in saved if key in group), "the optimizer's own")
        for key in sorted(gone & OVERRIDES)
    }
    for key, value in result.items():
        values = [group[key] for group in saved if key in group]
        if key not in carried | SCHEDULED | _STRUCTURE and any(_differs(value, other) for other in values):
            changed[key] = (values[0], value)
    if from_checkpoint:
        for key in SCHEDULE & changed.keys():
            result[key] = changed.pop(key)[0]
    if not SCHEDULE & changed.keys():
        result |= {key: saved[0][key] for key in SCHEDULED & saved[0].keys()}
    return result, changed


def _differs(a: Any, b: Any) -> bool:
    # a list comes back from a file where a tuple went in
    return list(a) != list(b) if isinstance(a, list | tuple) and isinstance(b, list | tuple) else bool(a != b)
