"""The optimizer state of a checkpoint, and what it lacks."""

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from megatron_eopt.checkpoints.contents import Contents, StoredTensor
from megatron_eopt.checkpoints.problems import Problem
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.optimizers.weight_average import AVERAGE, TRAINED

BLOCK = "megatron_eopt"  # key under which this package writes into each of Megatron's optimizers: our block
MAIN = "fp32_param"  # state key of the main copy in runs with bf16 or fp16
_ADAM, _LION = frozenset({"exp_avg", "exp_avg_sq"}), frozenset({"exp_avg"})
_LABELS = {  # of optimizers without our block, by state keys
    frozenset({"momentum_buffer", "moment2_buffer"}): "adaptive Muon",
    frozenset({"momentum_buffer"}): "Muon",
    _ADAM: "Adam",
    _LION: "Lion",
}

# Megatron's distributed optimizer puts the number of the optimizer ahead.
_STATE = re.compile(r"(?:chained_\d+\.)*optimizer\.state\.([^.]+)\.(.+)")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)*optimizer\.")
_OF_A_MATRIX = re.compile(r"_\d+$")  # ``moment2_buffer_1``: of the second logical matrix
_MOMENTUM = "momentum_buffer"
_BUFFERS = re.compile(r"_extra_state|expert_bias$|tokens_per_expert$|running_(mean|var)$")
_INCOMPLETE = "it cannot be resumed as it is: take another checkpoint, or load with --no-load-optim"

Kept = dict[str, dict[str, StoredTensor]]  # parameter key -> state key -> the tensor


@dataclass(frozen=True)
class OptimizerState:
    """Parameters with the same state keys."""

    name: str
    source: str  # how it is known: from our block, or from the state keys
    kept: Kept  # also parameters of our block without state
    block: dict[str, Any] = field(default_factory=dict)  # ours, if there is one

    @property
    def states(self) -> dict[str, list[StoredTensor]]:
        """State key -> its tensors, without the main copy."""
        tensors = [(base(state), tensor) for states in self.kept.values() for state, tensor in states.items()]
        keys = sorted({key for key, _ in tensors} - {MAIN})
        return {key: [tensor for state, tensor in tensors if state == key] for key in keys}

    @property
    def parameters(self) -> tuple[str, ...]:
        """Keys of the parameters with state."""
        return tuple(parameter for parameter, states in self.kept.items() if states)


def holding(state_dict: Any, key: str) -> Iterator[dict[Any, Any]]:
    """The outermost dicts in a state dict with this key."""
    if isinstance(state_dict, dict):
        if key in state_dict:
            yield state_dict
        else:
            for value in state_dict.values():
                yield from holding(value, key)


def blocks_of(state_dict: Any) -> list[dict[str, Any]]:
    """Our blocks, one for each optimizer of ours."""
    return [state[BLOCK] for state in holding(state_dict, BLOCK)]


def groups(contents: Contents) -> list[tuple[str, dict[str, Any]]]:
    """Settings of parameter groups, labelled by optimizer and index."""
    whole = contents.common.get("optimizer")
    if not isinstance(whole, dict):
        return []
    # by number, of which some of torch's utilities make text
    chained = {f"{index}.": each for index, each in whole.items() if str(index).isdecimal() and isinstance(each, dict)}
    found = []
    for label, state in (chained or {"": whole}).items():
        saved = [group for each in holding(state, "param_groups") for group in each["param_groups"] or ()]
        found += [(f"{label}{index}", group) for index, group in enumerate(saved)]
    return found


def parameters(contents: Contents) -> dict[str, StoredTensor]:
    """The model's own tensors: parameters and saved buffers."""
    return {key: tensor for key, tensor in contents.tensors.items() if not _OPTIMIZER.match(key)}


def distributed_format(contents: Contents) -> str | None:
    """Format of Megatron's DistributedOptimizer, if it saved the state."""
    said = (contents.common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    flat = any(".distributed." in key for key in contents.tensors if _OPTIMIZER.match(key))
    return said or ("optimizer.distributed" if flat else None)


def split_key(key: str) -> tuple[str, str]:
    """State and parameter of a key; empty for no state."""
    match = _STATE.fullmatch(key)
    return (match[1], match[2]) if match else ("", key)


def base(state: str) -> str:
    """A state key without the number of its logical matrix."""
    return _OF_A_MATRIX.sub("", state)


def state_keys(contents: Contents) -> Kept:
    """The optimizer state by parameter."""
    kept: Kept = {}
    for key, tensor in contents.tensors.items():
        state, parameter = split_key(key)
        if state:
            kept.setdefault(parameter, {})[state] = tensor
    return kept


@cache
def _shaped_as_parameter() -> set[str]:
    """State keys of tensors that are shaped as their parameter."""
    tensors = [tensor for row in OPTIMIZERS.values() for tensor in row.state]
    weights = {row.cls.traits.live_key for row in OPTIMIZERS.values() if row.cls.traits.live_key is not None}
    return {MAIN, AVERAGE, TRAINED, *_ADAM, _MOMENTUM, *weights, *(x.key for x in tensors)} - {
        x.key for x in tensors if x.dims is not None
    }


def optimizer_states(contents: Contents) -> list[OptimizerState]:
    """Optimizers with state, by our blocks, else by state keys."""
    rest = state_keys(contents)
    optimizers = []
    for block in blocks_of(contents.common.get("optimizer")):
        members = [name for group in block.get("groups") or () for name in group.get("names", ())]
        if not block.get("groups"):  # it lists state keys only
            states = frozenset(block.get("states", ()))
            members = [parameter for parameter, kept in rest.items() if _keys(kept) == states]
        kept = {parameter: rest.pop(parameter, {}) for parameter in members}
        source = f"written down by megatron_eopt {block.get('package', '')}".rstrip()
        optimizers.append(OptimizerState(str(block.get("optimizer", "?")), source, kept, block))
    for keys in dict.fromkeys(map(_keys, rest.values())):
        kept = {parameter: states for parameter, states in rest.items() if _keys(states) == keys}
        optimizers.append(OptimizerState(_label(keys), "by its state keys", kept))
    return optimizers


def check_states(contents: Contents, zeros: Set[str] = frozenset()) -> Iterator[Problem]:
    """Check the state; ``zeros`` are keys of all-zero tensors."""
    model, kept, flat = parameters(contents), state_keys(contents), distributed_format(contents)
    if not kept:
        if not flat:
            advice = "it was saved with --no-save-optim: load it with --no-load-optim or --finetune"
            yield Problem("warning", "there is no optimizer state", advice)
        return
    if orphans := [key for key in kept if key not in model]:
        what = f"there is optimizer state for parameters that are not there: {_named(orphans)}"
        yield Problem("error", what, "the model was not saved with it: take another checkpoint")
    for key, states in kept.items():
        for state, tensor in states.items():
            if key in model and state in _shaped_as_parameter() and tensor.shape != model[key].shape:
                what = f"{tensor.key} is {list(tensor.shape)}, and its parameter {list(model[key].shape)}"
                yield Problem("error", what, _INCOMPLETE)
    yield from _incomplete(contents)
    half = [key for key in kept if key in model and model[key].dtype in (torch.bfloat16, torch.float16)]
    uncopied = [key for key in half if MAIN not in kept[key]]
    if uncopied and any(MAIN in states for states in kept.values()):
        yield Problem("error", f"{MAIN} is missing for {_named(uncopied)}", _INCOMPLETE)
    trainable = [key for key, tensor in model.items() if tensor.dtype.is_floating_point and not _BUFFERS.search(key)]
    if (without := [key for key in trainable if key not in kept]) and not flat:
        what = f"no optimizer keeps anything for {_named(without)}"
        yield Problem("warning", what, "right for frozen parameters and buffers, and for nothing else")
    for state in (_MOMENTUM, "exp_avg"):
        stored = [states[state].key for states in kept.values() if state in states]
        if stored and zeros >= set(stored):
            what = f"{state} is zero in all {len(stored)} tensors"
            yield Problem("warning", what, "the optimizer had made no step, or no gradient ever reached it")


def _keys(states: dict[str, StoredTensor]) -> frozenset[str]:
    return frozenset(map(base, states)) - {MAIN}


def _label(keys: frozenset[str]) -> str:
    unknown = f"Muon with {_listed(keys)}" if _MOMENTUM in keys else f"unknown ({_listed(keys)})"
    return _LABELS.get(keys, unknown)


def _incomplete(contents: Contents) -> Iterator[Problem]:
    optimizers = optimizer_states(contents)
    inferred = [frozenset(state.states) for state in optimizers if not state.block]
    # Adam's may be a subset of another's, such as SOAP's.
    complete = {_ADAM}
    if any("lion" in str(contents.args.get(name)) for name in ("optimizer", "muon_scalar_optimizer")):
        complete.add(_LION)
    for state in optimizers:
        name, keys, partly = state.name, frozenset(state.states), state.block.get("partly") or {}
        if state.block:
            keys |= frozenset(state.block.get("states") or [])
        elif keys not in complete:
            keys = max((other for other in inferred if keys < other), key=len, default=keys)
            name = _label(keys)
        short: dict[frozenset[str], list[str]] = {}
        for parameter, states in state.kept.items():
            expected = frozenset(key for key in keys if parameter in partly.get(key, [parameter]))
            if missing := (expected - _keys(states)) | _skipped(states):
                short.setdefault(missing, []).append(parameter)
        for missing, members in short.items():
            what = f"{_listed(missing)} is missing for {_named(members)}; {name} keeps {_listed(keys)}"
            yield Problem("error", what, _INCOMPLETE)


def _skipped(states: dict[str, StoredTensor]) -> frozenset[str]:
    """Numbered states that are missing while later numbers exist."""
    last: dict[str, int] = {}
    for state in filter(_OF_A_MATRIX.search, states):
        last[base(state)] = max(last.get(base(state), 0), int(state.rpartition("_")[2]))
    return frozenset(f"{key}_{number}" for key, count in last.items() for number in range(count)) - states.keys()


def _listed(names: frozenset[str]) -> str:
    return " and ".join(sorted(names)) or "nothing"


def _named(keys: list[str]) -> str:
    shown = ", ".join(keys[:3])
    return shown if len(keys) <= 3 else f"{shown} and {len(keys) - 3:,} more"
