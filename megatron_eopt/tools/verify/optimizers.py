"""The optimizers of a checkpoint, and state that is missing."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_eopt.checkpoints.contents import Contents, StoredTensor
from megatron_eopt.checkpoints.faults import Problem
from megatron_eopt.checkpoints.states import MAIN, base, blocks_of, holding, split_key
from megatron_eopt.optimizers.nonfinite import listed

_OPTIMIZER = re.compile(r"(?:chained_\d+\.)*optimizer\.")
_BUFFERS = re.compile(r"_extra_state|expert_bias$|tokens_per_expert$|running_(mean|var)$")

Kept = dict[str, dict[str, StoredTensor]]  # parameter key -> state key -> the tensor


@dataclass(frozen=True)
class OptimizerState:
    """Parameters of one optimizer, with their state."""

    name: str
    source: str  # how it is known: from our block, or from the state keys
    kept: Kept  # also parameters of our block without state
    block: dict[str, Any] = field(default_factory=dict)  # ours, if there is one

    @property
    def states(self) -> dict[str, list[StoredTensor]]:
        """State key -> its tensors."""
        found: dict[str, list[StoredTensor]] = {}
        for states in self.kept.values():
            for state, tensor in states.items():
                found.setdefault(base(state), []).append(tensor)
        return {key: found[key] for key in sorted(found)}


def groups(contents: Contents) -> dict[str, dict[str, Any]]:
    """Settings of parameter groups, labelled by optimizer and index."""
    found = {}
    for number, state in enumerate(holding(contents.common.get("optimizer"), "param_groups")):
        for index, group in enumerate(state["param_groups"] or ()):
            found[f"{number}.{index}"] = group
    return found


def parameters(contents: Contents) -> dict[str, StoredTensor]:
    """The model's own tensors: parameters and saved buffers."""
    return {key: tensor for key, tensor in contents.tensors.items() if not _OPTIMIZER.match(key)}


def distributed_format(contents: Contents) -> str | None:
    """Format of Megatron's DistributedOptimizer, if it saved the state."""
    named = (contents.common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    flat = any(".distributed." in key for key in contents.tensors if _OPTIMIZER.match(key))
    return named or ("optimizer.distributed" if flat else None)


def state_keys(contents: Contents) -> Kept:
    """The optimizer state by parameter."""
    kept: Kept = {}
    for key, tensor in contents.tensors.items():
        state, parameter = split_key(key)
        if state:
            kept.setdefault(parameter, {})[state] = tensor
    return kept


def optimizer_states(contents: Contents) -> list[OptimizerState]:
    """Optimizers with state, by our blocks, else by state keys."""
    rest = state_keys(contents)
    optimizers = []
    for block in blocks_of(contents.common.get("optimizer")):
        kept = {}
        for group in block.get("groups") or ():
            for parameter in group["names"]:
                if parameter not in kept:  # layers of a stacked tensor may be in several groups
                    kept[parameter] = rest.pop(parameter, {})
        optimizers.append(OptimizerState(str(block.get("optimizer")), "written down by megatron_eopt", kept, block))
    by_keys: dict[frozenset[str], Kept] = {}
    for parameter, states in rest.items():
        by_keys.setdefault(_keys(states), {})[parameter] = states
    for keys, kept in by_keys.items():
        optimizers.append(OptimizerState(f"with {_listed(keys)}", "by its state keys", kept))
    return optimizers


def check_states(contents: Contents) -> Iterator[Problem]:
    """Check that parameters have their state, and state its parameter."""
    model = parameters(contents)
    kept = state_keys(contents)
    flat = distributed_format(contents)
    if not kept:
        if not flat:
            yield Problem(
                "warning",
                "there is no optimizer state",
                "it was saved with --no-save-optim: load it with --no-load-optim or --finetune",
            )
        return
    orphans = [key for key in kept if key not in model]
    if orphans:
        yield Problem(
            "error",
            f"there is optimizer state for parameters that are not there: {listed(orphans)}",
            "the model was not saved with it: take another checkpoint",
        )
    for optimizer in optimizer_states(contents):
        if not optimizer.block:
            continue  # nothing says what it keeps
        keys = frozenset(optimizer.block.get("states") or optimizer.states) - {MAIN}
        partly = optimizer.block.get("partly") or {}
        for parameter, states in optimizer.kept.items():
            expected = frozenset(key for key in keys if parameter in partly.get(key, [parameter]))
            missing = expected - _keys(states)
            if missing:
                yield Problem(
                    "error",
                    f"{_listed(missing)} is missing for {parameter}; {optimizer.name} keeps {_listed(keys)}",
                    "it cannot be resumed as it is: take another checkpoint, or load with --no-load-optim",
                )
    without = []
    for key, tensor in model.items():
        if tensor.dtype.is_floating_point and key not in kept and not _BUFFERS.search(key):
            without.append(key)
    if without and not flat:
        yield Problem(
            "warning",
            f"no optimizer keeps anything for {listed(without)}",
            "right for frozen parameters and buffers, and for nothing else",
        )


def _keys(states: dict[str, StoredTensor]) -> frozenset[str]:
    return frozenset(map(base, states)) - {MAIN}


def _listed(names: frozenset[str]) -> str:
    return " and ".join(sorted(names)) or "nothing"
