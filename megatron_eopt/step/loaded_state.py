"""What is loaded into an optimizer: whose state it is, what is refused, and what is warned of."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.screen import listed
from megatron_eopt.settings.groups import differs, warn
from megatron_eopt.settings.modifiers import without_matrix
from megatron_eopt.settings.of_class import class_of_ours, settings_of
from megatron_eopt.settings.records import RATES, names_of
from megatron_eopt.step.parameters import local
from megatron_eopt.step.state import (
    STATE_OF,
    Described,
    Layouts,
    States,
    StateShape,
    StateTensor,
    expected_shape,
    shape_of,
)

logger = logging.getLogger(__name__)

# Settings of the optimizer as a whole with which another value makes the same steps, but for one of tp_mode.
UNMARKED = frozenset({"tp_mode", "symmetric_products", "share_over_dp", "collective_state_dict"})

Saved = Sequence[tuple[Tensor, Mapping[str, Any]]]
"""Parameters, and what a state dict has for each."""


def name_in_states(cls: type) -> str:
    """A class's name in states; users' subclasses use their base's."""
    name: str = class_of_ours(cls).__name__
    return name


def mark_of(optimizer: Any) -> str:
    """Its :func:`name_in_states`, and, as JSON, settings that groups lack and that are no default."""
    known = settings_of(type(optimizer))
    given = {key: value for key, value in _marked(optimizer).items() if value != known[key].default}
    return name_in_states(type(optimizer)) + (f" {json.dumps(given)}" if given else "")


def _marked(optimizer: Any) -> dict[str, Any]:
    return {key: value for key, value in optimizer.settings().items() if key not in UNMARKED}


def notes_of_settings(
    optimizer: Any, saved: Iterable[Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]
) -> list[str]:
    """What to warn of: settings that a load replaces by the state's, and those of the state that it goes on without."""
    name = type(optimizer).__name__
    marked = _marked(optimizer)
    of_class = settings_of(type(optimizer))
    defaults = {key: of_class[key].default for key in marked}
    without = dict[str, None]()  # in order
    replaced = dict[str, None]()
    known = {key for key, setting in of_class.items() if not setting.whole} - set(names_of(RATES))
    for was, loaded, own in zip(saved, groups, optimizer.param_groups, strict=True):
        writer, _, given = was.get(STATE_OF, "").partition(" ")
        made_with = {**defaults, **json.loads(given or "{}")} if writer else {}
        for key, value in made_with.items():
            if marked.get(key, value) != value:
                without[f"{key} {value!r} and goes on with {marked[key]!r}"] = None
        for key in sorted(known):
            if differs(loaded[key], own[key]):
                replaced[f"{key} {own[key]!r} -> {loaded[key]!r}"] = None
    notes = []
    if without:
        settings = ", with ".join(without)
        notes.append(f"{name} loads a state that was made with {settings}: build it as it was to go on alike")
    if replaced:
        notes.append(f"{name} takes the settings of the loaded state: {', '.join(replaced)}")
    return notes


def hooked(optimizer: Optimizer, name: str, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What load_state_dict pre-hooks of torch make of a dict as it was given.

    A ``ValueError``, which ``name`` begins, is for what no optimizer's ``state_dict()`` returns.
    """
    found: Any = copy(state_dict)
    if isinstance(found, Mapping):
        for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(optimizer, found)  # type: ignore[arg-type]  # torch says dict
            found = found if changed is None else changed
    if not isinstance(found, Mapping) or not {"state", "param_groups"} <= found.keys():
        got = sorted(found) if isinstance(found, Mapping) else type(found).__name__
        raise ValueError(
            f"{name}.load_state_dict takes what state_dict() returned, a dict with 'state' and 'param_groups', got "
            f"{got}"
        )
    for number, group in enumerate(found["param_groups"]):
        if "params" not in group:
            raise ValueError(
                f"{name}.load_state_dict: group {number} of the state has no 'params', the numbers of its parameters: "
                f"load a state_dict() as it was returned"
            )
    return dict(found)


def hook_loaded(optimizer: Optimizer) -> None:
    """Call load_state_dict post-hooks of torch, when all is as steps will use it."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


@contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """torch's load calls no hooks: it would call the first ones after our checks, the last ones before our casts."""
    hooks = {}
    for when in ("pre", "post"):
        name = f"_optimizer_load_state_dict_{when}_hooks"
        hooks[name] = vars(optimizer)[name]
        vars(optimizer)[name] = {}
    try:
        yield
    finally:
        vars(optimizer).update(hooks)


def check_writer(cls: type, state_dict: Mapping[str, Any], unmarked: bool = False) -> None:
    """Refuse another optimizer's state; warn of an ``unmarked`` one."""
    called = cls.__name__
    writers = {group.get(STATE_OF, "").partition(" ")[0] for group in state_dict["param_groups"]}
    others = writers - {name_in_states(cls), ""}
    if others:
        other = ", ".join(sorted(others))
        raise ValueError(
            f"{called} cannot load a state of {other}: what its tensors mean is another thing, also where keys and "
            f"shapes are the same. To go on from it, build {other}, or load the weights alone and begin with fresh "
            f"state; to take its tensors as they are, remove {STATE_OF!r} from each group of the state"
        )
    if unmarked and "" in writers and any(state_dict["state"].values()):
        warn(
            f"{called} loads a state that does not say which optimizer wrote it, and takes it for one of its own: "
            "tensors of another one with the same keys and shapes, such as torch's, would mean another thing"
        )


def check_shape(parameter: Tensor, tensor: StateTensor, layouts: Layouts, found: Tensor) -> None:
    """Refuse a state tensor of another shape or placements than its first one."""
    shape = shape_of(found)
    allowed = [expected_shape(parameter, tensor, layouts)]
    if tensor.rank is not None:  # a state of one process has all that only a compute rank needs
        whole = tensor.global_shape(layouts(parameter))
        allowed.append(StateShape(whole, whole))
    if shape not in allowed:
        raise ValueError(
            f"{tensor.key!r} has shape {shape}, expected {allowed[0]} for the parameter of shape "
            f"{tuple(parameter.shape)}: the state is of another model or layout, or ranks had dealt matrices "
            "otherwise: group parameters as before, and load a whole state into DTensors by torch's "
            "set_optimizer_state_dict"
        )


def check_loaded(
    name: str,
    states: Iterable[tuple[Tensor, Mapping[str, Any]]],
    described: Described,
    layouts: Layouts,
    called: Mapping[Tensor, str],
) -> set[str]:
    """Refuse states that no step could go on from; returns conversions.

    Values are those that the description of a tensor has: finite, and where it says so not below 0. Waits for the
    device.

    Args:
        name: of the optimizer.
        states: parameters with the states that are to be theirs.
        described: what state tensors a parameter has.
        layouts: layouts of a parameter's logical matrices.
        called: names of parameters, for messages.

    Raises:
        TypeError: for what is no tensor.
        ValueError: for a tensor that is missing, of another shape, sparse, not of real numbers, or with such values.
    """
    converted: set[str] = set()
    values: list[tuple[str, Tensor, torch.dtype, bool]] = []
    for parameter, state in states:
        for tensor in described(parameter):
            key = tensor.key
            if key not in state:
                if tensor.optional:
                    continue
                raise ValueError(
                    f"{name} needs {key!r} for the parameter of shape {tuple(parameter.shape)}, but the state has "
                    f"{sorted(state)}: it is of another optimizer, or of other settings of this one"
                )
            found = state[key]
            of = f"{key!r} of {called[parameter]}"
            if not isinstance(found, Tensor):
                raise TypeError(f"{name} loads tensors, and {of} in the state is {type(found).__name__}")
            check_shape(parameter, tensor, layouts, found)
            dtype = tensor.dtype or parameter.dtype
            if found.dtype != dtype:
                converted.add(f"{key} from {found.dtype} to {dtype}")
            values.append((of, found, dtype, tensor.non_negative))
    for of, found, dtype, non_negative in values:
        check_finite(name, [(of, found, dtype)])
        if non_negative and not found.is_meta and (local(found) < 0).any():
            raise ValueError(
                f"{name}: {of} in the state has values below 0, which no step makes of squares, norms or counts: load "
                "an earlier state, or go on with fresh state from the weights alone"
            )
    return converted


def check_finite(name: str, values: Iterable[tuple[str, Tensor, torch.dtype]]) -> None:
    """Refuse tensors that are sparse, of other numbers than real ones, or not finite in the dtypes that will keep them.

    Waits for the device.
    """
    for of, found, dtype in values:
        if found.layout != torch.strided or found.is_complex() or found.is_quantized:
            raise ValueError(
                f"{name}: {of} in the state is {found.layout} of {found.dtype}, expected a dense tensor of real "
                "numbers: convert it, by to_dense() or .real for example"
            )
        if found.is_meta:  # of a model that has no values yet
            continue
        if dtype.is_floating_point and not local(found).to(dtype).isfinite().all():
            raise ValueError(
                f"{name}: {of} in the state has values that are not finite in {dtype}, which would stay in it for "
                "ever: load an earlier state, or go on with fresh state from the weights alone"
            )


def warn_reinitialized(name: str, lacking: Sequence[str]) -> None:
    """Warn of parameters without any state, as after a save before the first step."""
    if lacking:  # on every rank, each of which may lack other ones
        logger.warning(
            f"{name} loads a state without any of {listed(lacking)}: it begins anew, as that of a parameter that never "
            "had a gradient"
        )


def note_loaded(name: str, converted: Iterable[str], lacking: Iterable[str]) -> None:
    """Warn of state that a load has converted, or that begins anew."""
    converted = sorted(converted)
    if converted:
        warn(f"{name} converts the state that it loads: {', '.join(converted)}")
    lacking = sorted(lacking)
    if lacking:
        warn(f"{name} loads a state without {' and '.join(lacking)}, which begins anew")


def apart(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copies of states, in which no tensor lies where another one or an entry of its own does."""
    storages = Counter(_storage(x) for state in states.values() for x in _tensors_of(state).values())
    made = {}
    for index, state in states.items():
        copies = {}
        for key, x in _tensors_of(state).items():
            if storages[_storage(x)] > 1 or _overlaps(local(x)):
                copies[key] = x.detach().clone(memory_format=torch.contiguous_format)
        made[index] = {**state, **copies} if copies else state
    return made


def _tensors_of(state: object) -> dict[str, Tensor]:
    if not isinstance(state, Mapping):  # of no parameter
        return {}
    return {key: x for key, x in state.items() if isinstance(x, Tensor) and x.layout == torch.strided and x.numel()}


def _storage(x: Tensor) -> int:
    return local(x).untyped_storage()._cdata


def _overlaps(x: Tensor) -> bool:
    """Whether entries may lie in one place, as those of an expanded tensor."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def with_steps(states: States, saved: Saved) -> list[tuple[Tensor, Mapping[str, Any]]]:
    """Saved states, without those of parameters that made no step."""
    loaded = []
    for p, state in saved:
        described = {tensor.key for tensor in states.described(p)}
        if state.keys() & described or state.keys() - states.kept.get(p, {}).keys():
            loaded.append((p, state))
    return loaded


def lacking(states: States, saved: Saved) -> list[Tensor]:
    """Parameters that train, and have no state."""
    without = []
    for p, state in saved:
        needed = {tensor.key for tensor in states.described(p) if not tensor.optional}
        if needed and p.requires_grad and not needed & state.keys():
            without.append(p)
    return without


def without_host(states: States, parameters: Iterable[tuple[Tensor, int]], saved: Mapping[int, Any]) -> dict[int, Any]:
    """Saved states, by index, without what is to be in host memory.

    torch moves all that it loads to the devices of the parameters, where there may be no room.
    """
    kept = {index: dict(state) for index, state in saved.items()}
    for p, index in parameters:
        for tensor in states.described(p):
            if states.is_on_host(p, tensor):
                kept.get(index, {}).pop(tensor.key, None)
    return kept


def place(states: States, loaded: Saved) -> set[str]:
    """Set what torch's load moved, cast or left out; returns optional keys that states lack."""
    begun_anew = set()
    for parameter, saved in loaded:
        state = states.kept[parameter]
        for tensor in states.described(parameter):
            key = tensor.key
            if key not in saved and tensor.optional:
                begun_anew.add(without_matrix(key))
            elif states.is_on_host(parameter, tensor):
                state[key] = states.initial(parameter, tensor).copy_(saved[key])
            elif tensor.rank is not None and tensor.is_elsewhere(states.layouts(parameter)):
                state[key] = states.initial(parameter, tensor)
            elif tensor.dtype not in (None, parameter.dtype):  # to which torch casts what it loads
                state[key] = saved[key].detach().to(local(parameter).device, tensor.dtype, copy=True)
    return begun_anew
