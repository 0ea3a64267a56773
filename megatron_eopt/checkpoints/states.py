"""The optimizers of a checkpoint: what they keep for which parameters, and whether all of it is there."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from megatron_eopt.checkpoints.contents import Contents, StoredTensor
from megatron_eopt.checkpoints.problems import Problem
from megatron_eopt.family import FAMILY, ROWS

BLOCK = "megatron_eopt"
"""Where this package writes down what it saved, in the state of each of Megatron's optimizers."""

MAIN = "fp32_param"
"""The state key of the main copy in runs with bf16 or fp16."""

# Under the distributed optimizer Megatron puts the number of the optimizer ahead.
_STATE = re.compile(r"(?:chained_\d+\.)*optimizer\.state\.([^.]+)\.(.+)")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)*optimizer\.")
_ADAM = frozenset({"exp_avg", "exp_avg_sq"})
_LION = frozenset(ROWS["lion"].state)
_FULL_SHAPE = {MAIN, *_ADAM}.union(*(row.state for row in FAMILY))
# ``moment2_buffer_1``: of the second logical matrix.
_OF_A_MATRIX = re.compile(r"_\d+$")
_FIRST_MOMENTS = ("momentum_buffer", "exp_avg")
# Buffers of the model, which no optimizer has state for.
_BUFFERS = re.compile(r"_extra_state|expert_bias$|tokens_per_expert$|running_(mean|var)$")
_INCOMPLETE = "it cannot be resumed as it is: take another checkpoint, or load with --no-load-optim"


@dataclass(frozen=True)
class OptimizerState:
    """Parameters for which the same is kept.

    Attributes:
        name: of the optimizer.
        source: who says so: what the package wrote down, or the state keys.
        settings: those that the package wrote down.
        states: state key -> the tensors of it, without the main copy.
        parameters: keys of the parameters.
    """

    name: str
    source: str
    settings: dict[str, Any]
    states: dict[str, list[StoredTensor]]
    parameters: tuple[str, ...]


def parts_of(state_dict: Any) -> Iterator[dict[Any, Any]]:
    """The state dicts of those of Megatron's optimizers that have our block."""
    if isinstance(state_dict, dict):
        if BLOCK in state_dict:
            yield state_dict
        else:
            for value in state_dict.values():
                yield from parts_of(value)


def blocks_of(state_dict: Any) -> list[dict[str, Any]]:
    """Our blocks."""
    return [part[BLOCK] for part in parts_of(state_dict)]


def blocks(contents: Contents) -> list[dict[str, Any]]:
    """What this package wrote into the common state, one for each of its optimizers."""
    return blocks_of(contents.common.get("optimizer"))


def groups(contents: Contents) -> list[tuple[str, dict[str, Any]]]:
    """Each parameter group's settings, with a label: the place of its optimizer, and its own."""
    found = []
    for label, part in _parts(contents):
        for place, group in enumerate(part.get("param_groups") or []):
            found.append((f"{label}.{place}" if label else str(place), group))
    return found


def parameters(contents: Contents) -> dict[str, StoredTensor]:
    """The model's own tensors: parameters, and buffers that it saves."""
    return {key: tensor for key, tensor in contents.tensors.items() if not _OPTIMIZER.match(key)}


def distributed_format(contents: Contents) -> str | None:
    """How Megatron's DistributedOptimizer laid its state out; None if it did not save this."""
    said = (contents.common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    flat = any(".distributed." in key for key in contents.tensors if _OPTIMIZER.match(key))
    return said or ("optimizer.distributed" if flat else None)


def split_key(key: str) -> tuple[str, str]:
    """Name of the state and key of the parameter; an empty name for what is no state of a parameter."""
    match = _STATE.fullmatch(key)
    return (match[1], match[2]) if match else ("", key)


def state_keys(contents: Contents) -> dict[str, dict[str, StoredTensor]]:
    """Parameter key -> state key -> the tensor, for all that is kept per parameter."""
    kept: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in contents.tensors.items():
        state, parameter = split_key(key)
        if state:
            kept.setdefault(parameter, {})[state] = tensor
    return kept


def optimizer_states(contents: Contents) -> list[OptimizerState]:
    """The optimizers that kept something for a parameter: as the package wrote down, the rest by what they keep."""
    rest = state_keys(contents)
    found = []
    for block in blocks(contents):
        own = {parameter: rest.pop(parameter) for parameter in _members(block, rest) if parameter in rest}
        source = f"written down by megatron_eopt {block.get('package', '')}".rstrip()
        found.append(_optimizer(str(block.get("optimizer", "?")), source, dict(block.get("settings") or {}), own))
    for signature in dict.fromkeys(_signature(states) for states in rest.values()):
        own = {parameter: states for parameter, states in rest.items() if _signature(states) == signature}
        found.append(_optimizer(_inferred(signature), "by its state keys", {}, own))
    return found


def check_states(contents: Contents, zeros: set[str] | None = None) -> list[Problem]:
    """All state of all parameters is there and fits.

    Args:
        contents: of the checkpoint.
        zeros: keys of tensors that are zero throughout; None if no data were read.
    """
    model, kept = parameters(contents), state_keys(contents)
    if not kept:
        if distributed_format(contents):
            return []
        advice = "it was saved with --no-save-optim: load it with --no-load-optim or --finetune"
        return [Problem("warning", "there is no optimizer state", advice)]
    problems = [*_orphans(model, kept), *_incomplete(contents, kept), *_main_copies(model, kept)]
    without = [key for key, tensor in model.items() if key not in kept and not _BUFFERS.search(key)]
    without = [key for key in without if model[key].dtype.is_floating_point]
    if without and not distributed_format(contents):
        what = f"no optimizer keeps anything for {_named(without)}"
        problems.append(Problem("warning", what, "right for frozen parameters and buffers, and for nothing else"))
    for state in _FIRST_MOMENTS:
        stored = [states[state].key for states in kept.values() if state in states]
        if zeros is not None and stored and zeros.issuperset(stored):
            what = f"{state} is zero in all {len(stored)} tensors"
            advice = "the optimizer had made no step, or no gradient ever reached it"
            problems.append(Problem("warning", what, advice))
    return problems


def _parts(contents: Contents) -> Iterator[tuple[str, dict[str, Any]]]:
    """State of each of Megatron's optimizers: alone, one of a chain, or inside of one with main copies."""
    whole = contents.common.get("optimizer")
    if not isinstance(whole, dict):
        return
    # By number; some of torch's utilities make text of it.
    chained = {str(place): part for place, part in whole.items() if str(place).isdecimal() and isinstance(part, dict)}
    for label, part in (chained or {"": whole}).items():
        inner = part.get("optimizer")
        yield label, {**inner, **part} if isinstance(inner, dict) else part


def _signature(states: dict[str, StoredTensor]) -> frozenset[str]:
    """What is kept for a parameter; of states that are kept for each of its logical matrices, the common name."""
    return frozenset(base(state) for state in states) - {MAIN}


def base(state: str) -> str:
    """The name of a state without the number of the logical matrix that it is kept for."""
    return _OF_A_MATRIX.sub("", state)


def _inferred(signature: frozenset[str]) -> str:
    if "momentum_buffer" in signature:
        second = any(state.startswith("moment2_buffer") for state in signature)
        return "adaptive Muon" if second else "Muon" if len(signature) == 1 else f"Muon with {_listed(signature)}"
    named = {_ADAM: "Adam", _LION: "Lion"}
    return named.get(signature, f"unknown ({_listed(signature)})")


def _orphans(model: dict[str, StoredTensor], kept: dict[str, dict[str, StoredTensor]]) -> Iterator[Problem]:
    orphans = [key for key in kept if key not in model]
    if orphans:
        yield Problem("error", f"there is optimizer state for parameters that are not there: {_named(orphans)}",
                      "the model was not saved with it: take another checkpoint")  # fmt: skip
    for key, states in kept.items():
        for state, tensor in states.items():
            if key in model and state in _FULL_SHAPE and tensor.shape != model[key].shape:
                what = f"{tensor.key} is {list(tensor.shape)}, and its parameter {list(model[key].shape)}"
                yield Problem("error", what, _INCOMPLETE)


def _incomplete(contents: Contents, kept: dict[str, dict[str, StoredTensor]]) -> Iterator[Problem]:
    rest = dict(kept)
    for block in blocks(contents):
        own = {parameter: rest.pop(parameter, {}) for parameter in _members(block, kept)}
        expected = frozenset(block.get("states") or []).union(*map(_signature, own.values()))
        without = {
            parameter: frozenset(
                state for state, names in (block.get("partly") or {}).items() if parameter not in names
            )
            for parameter in own
        }
        yield from _short_of(expected, own, str(block.get("optimizer", "?")), without)
    signatures = {_signature(states) for states in rest.values()}
    complete = {_ADAM}  # Adam's may be a part of another's, as SOAP's, beside which it serves
    if any("lion" in str(contents.args.get(name)) for name in ("optimizer", "muon_scalar_optimizer")):
        complete.add(_LION)
    for signature in sorted(signatures, key=sorted):
        wider = [other for other in signatures - {signature} if signature < other and signature not in complete]
        whole = max(wider, key=len, default=signature)
        own = {parameter: states for parameter, states in rest.items() if _signature(states) == signature}
        yield from _short_of(whole, own, _inferred(whole))


def _short_of(
    expected: frozenset[str],
    own: dict[str, dict[str, StoredTensor]],
    name: str,
    without: Mapping[str, frozenset[str]] = MappingProxyType({}),
) -> Iterator[Problem]:
    """What parameters of one optimizer lack of what it keeps, but for what it keeps ``without`` them."""
    short: dict[frozenset[str], list[str]] = {}
    for parameter, states in own.items():
        expected_here = expected - without.get(parameter, frozenset())
        if missing := (expected_here - _signature(states)) | _skipped(states):
            short.setdefault(missing, []).append(parameter)
    for missing, members in short.items():
        what = f"{_listed(missing)} is missing for {_named(members)}; {name} keeps {_listed(expected)}"
        yield Problem("error", what, _INCOMPLETE)


def _skipped(states: dict[str, StoredTensor]) -> frozenset[str]:
    """States of logical matrices that are not there, while there are some of later ones."""
    numbers: dict[str, int] = {}
    for state in states:
        if _OF_A_MATRIX.search(state):
            numbers[base(state)] = max(numbers.get(base(state), 0), int(state.rpartition("_")[2]))
    return frozenset(f"{base}_{number}" for base, last in numbers.items() for number in range(last)) - states.keys()


def _members(block: dict[str, Any], kept: dict[str, dict[str, StoredTensor]]) -> list[str]:
    """Keys of the parameters of an optimizer that the package wrote down: by name, or by what it keeps."""
    if block.get("groups"):
        return [name for group in block["groups"] for name in group.get("names", ())]
    return [parameter for parameter, states in kept.items() if _signature(states) == frozenset(block.get("states", ()))]


def _optimizer(
    name: str, source: str, settings: dict[str, Any], own: dict[str, dict[str, StoredTensor]]
) -> OptimizerState:
    keys = sorted(frozenset[str]().union(*map(_signature, own.values())))
    states = {key: [kept[state] for kept in own.values() for state in kept if base(state) == key] for key in keys}
    return OptimizerState(name, source, settings, states, tuple(own))


def _main_copies(model: dict[str, StoredTensor], kept: dict[str, dict[str, StoredTensor]]) -> Iterator[Problem]:
    half = [key for key in kept if key in model and model[key].dtype in (torch.bfloat16, torch.float16)]
    without = [key for key in half if MAIN not in kept[key]]
    if without and any(MAIN in states for states in kept.values()):
        yield Problem("error", f"{MAIN} is missing for {_named(without)}", _INCOMPLETE)


def _listed(names: frozenset[str]) -> str:
    return " and ".join(sorted(names)) or "nothing"


def _named(keys: list[str]) -> str:
    shown = ", ".join(keys[:3])
    return shown if len(keys) <= 3 else f"{shown} and {len(keys) - 3:,} more"
