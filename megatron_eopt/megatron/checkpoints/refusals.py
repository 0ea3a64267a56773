"""Why a torch_dist checkpoint cannot serve a run."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_eopt.checkpoints.states import BLOCK, MAIN, Block, StateDict, base, blocks_of, split_key
from megatron_eopt.megatron.checkpoints.sharding import sharded_tensors
from megatron_eopt.megatron.checkpoints.stored import Stored
from megatron_eopt.megatron.consensus import distinct, union
from megatron_eopt.registry import list_optimizers, optimizer_class
from megatron_eopt.step.modifiers import OPTIONAL
from megatron_eopt.step.state import MOMENTUM_BUFFER

FORMAT = 1  # of what this package writes down; it grows when an older release could not read a checkpoint any more
FRESH = "pass --no-load-optim to load the weights alone and start with fresh optimizer state"
FIRST_MOMENT = "exp_avg"
DISTRIBUTED_MAIN = "param"  # the main copy, in what Megatron's distributed optimizer saves by parameter
_SECOND_MOMENT = "exp_avg_sq"
_FLAT = ".distributed."  # in keys of flat buffers
_STACKED = re.compile(r"\.layers\.(?!\d)")

Shapes = Mapping[str, tuple[int, ...] | None]  # key -> global shape; None is any shape


def problem_of(optimizers: Sequence[StateDict], stored: Stored) -> str | None:
    """Why the checkpoint cannot serve our optimizers, the same on every rank."""
    blocks = blocks_of(stored.optimizer)
    problem = too_new(max((block.get("format", 0) for block in blocks), default=0))
    if problem:
        return problem
    optional = set[str]()
    if any(each[BLOCK].get("modifies") for each in optimizers):
        optional |= {*OPTIONAL}
    if imports_adam(optimizers, stored):
        optional |= {_SECOND_MOMENT, DISTRIBUTED_MAIN}
    requested_here = [(each[BLOCK]["optimizer"], requested_of(each)) for each in optimizers]
    for of_ranks in zip(*distinct(requested_here), strict=True):
        name = of_ranks[0][0]
        wanted: dict[str, tuple[int, ...] | None] = {}
        for _, shapes in of_ranks:
            wanted |= shapes
        problem = mismatch(name, wanted, stored.shapes, optional) or of_another(name, wanted, blocks)
        if problem:
            return problem
    if any(each[BLOCK]["layers_differ"] for each in optimizers):
        return stacks_layers(stored.shapes)
    return None


def requested_of(optimizer: Any) -> dict[str, tuple[int, ...] | None]:
    """Key -> shape of requested tensors; None for padded vocabularies."""
    return {t.key: None if t.allow_shape_mismatch else t.global_shape for t in sharded_tensors(optimizer)}


def imports_adam(optimizers: Iterable[StateDict], stored: Stored) -> bool:
    """Whether Adam's first moments become momenta."""
    return any(each[BLOCK]["import_adam"] for each in optimizers) and has_adams_alone(stored.shapes)


def has_adams_alone(stored: Collection[str]) -> bool:
    """Whether there are first moments, and no momenta."""
    states = {split_key(key)[0] for key in stored if key.startswith("optimizer.")}
    return FIRST_MOMENT in states and MOMENTUM_BUFFER not in states


def too_new(written: int) -> str | None:
    """Why this format cannot be read; None if it can."""
    if written <= FORMAT:
        return None
    formats = f"format {written}; this one reads up to {FORMAT}"
    return f"it was written by a later release of megatron_eopt ({formats}): update the package"


def mismatch(name: str, wanted: Shapes, stored: Shapes, optional: Set[str] = frozenset()) -> str | None:
    """Why ``stored`` cannot serve; ``optional`` states need not be loaded."""
    parameters = {split_key(key)[1] for key in wanted}
    differing = sorted(wanted.keys() - stored.keys())
    for key in sorted(stored.keys() - wanted.keys()):
        state, parameter = split_key(key)
        if state and parameter in parameters and base(state) not in optional:
            differing.append(key)
    if differing:
        return _other_states(name, split_key(differing[0])[1], wanted, stored)
    for key, shape in wanted.items():
        if shape is not None and stored[key] != shape:
            return (
                f"{key} has shape {stored[key]} in it, and this run needs {shape}: it is of another model, or of other "
                f"settings of the optimizer; {FRESH}"
            )
    return None


def of_another(name: str | None, wanted: Iterable[str], blocks: Sequence[Block]) -> str | None:
    """Why state that another of our optimizers wrote cannot serve."""
    ours = {optimizer_class(each).__name__ for each in list_optimizers()}
    if name is not None and name not in ours:
        return None
    parameters = {split_key(key)[1] for key in wanted}
    for block in blocks:
        wrote = block["optimizer"]
        if wrote == name or wrote not in ours:
            continue
        names = {key for group in block["groups"] for key in group["names"]}
        shared = sorted(parameters & names)
        if shared:
            taker = name or "an optimizer of Megatron"
            taken = f"{wrote} wrote the state of {shared[0]}, and {taker} would take it for its own"
            return f"{taken}: resume with that one, or {FRESH}"
    return None


def stacks_layers(stored: Iterable[str]) -> str | None:
    """Why a checkpoint of stacked layers cannot serve."""
    for key in sorted(stored):
        if split_key(key)[0] and _STACKED.search(key):
            return (
                f"it stacks the state of all layers ({key}), which were treated alike when it was saved, and in this "
                f"run layers differ in their optimizers: leave away the overrides that single out layers (and what "
                f"freezes some), or {FRESH}"
            )
    return None


def of_buffers(requested: Iterable[ShardedTensor], stored: Iterable[str]) -> str | None:
    """Why state by parameter is none of flat buffers, on all ranks alike."""
    if _has_flat(stored) or not union(_FLAT for tensor in requested if _FLAT in tensor.key):
        return None
    return (
        f"it holds all state by parameter, and this run has that of what is no matrix in flat buffers, which Megatron "
        f"lays out beside those of whole matrices: pass --no-use-layer-wise-param-layout, or {FRESH}"
    )


def _other_states(name: str, parameter: str, wanted: Shapes, stored: Shapes) -> str:
    needs = _states_of(parameter, wanted)
    has = _states_of(parameter, stored)
    if not has and parameter not in stored:
        return f"{parameter} is not in it: it is of another model"
    reason = "another optimizer wrote it, or this one with other settings; resume with that one, or"
    of_adam = has - {MAIN, DISTRIBUTED_MAIN} == {FIRST_MOMENT, _SECOND_MOMENT} and has_adams_alone(stored)
    if not has and _has_flat(stored):
        reason = (
            "it is in flat buffers of the distributed optimizer. Resume with --use-distributed-optimizer and the "
            "same sizes, and save with --dist-ckpt-optim-fully-reshardable to change them, or"
        )
    elif of_adam and needs - {MAIN} == {MOMENTUM_BUFFER}:
        reason = "Adam wrote it. Pass --muon-momentum-from-adam to make its first moment the momentum, or"
    listed = ", ".join(sorted(has)) or "no state"
    return f"it holds {listed} for {parameter}, and {name} needs {', '.join(sorted(needs))}: {reason} {FRESH}"


def _states_of(parameter: str, keys: Iterable[str]) -> set[str]:
    states = set[str]()
    for key in keys:
        state, of_parameter = split_key(key)
        if of_parameter == parameter:
            states.add(state)
    return states - {""}


def _has_flat(keys: Iterable[str]) -> bool:
    return any(_FLAT in key for key in keys)
