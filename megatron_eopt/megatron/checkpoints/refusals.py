"""Why a checkpoint cannot serve a run, where its load would go on, or say nothing that helps."""

import re
from collections.abc import Collection, Iterable, Sequence, Set

from megatron_eopt.checkpoints.states import BLOCK, BLOCK_FORMAT, MAIN, Block, StateDict, base, split_key
from megatron_eopt.megatron.checkpoints.keys import (
    DISTRIBUTED_MAIN,
    FIRST_MOMENT,
    SECOND_MOMENT,
    has_adams_alone,
    imports_adam,
    sharded_tensors,
)
from megatron_eopt.megatron.consensus import distinct
from megatron_eopt.registry import list_optimizers, optimizer_class
from megatron_eopt.step.state import MOMENTUM_BUFFER

FRESH = "pass --no-load-optim to load the weights alone and start with fresh optimizer state"
OF_ANOTHER = "another optimizer wrote it, or this one with other settings; resume with that one, or"
_OF_ADAM = "Adam wrote it. Pass --muon-momentum-from-adam to make its first moment the momentum, or"
_OF_BUFFERS = (
    "it is in flat buffers of the distributed optimizer. Resume with --use-distributed-optimizer and the same sizes, "
    "and save with --dist-ckpt-optim-fully-reshardable to change them, or"
)
_STACKED = re.compile(r"\.layers\.(?!\d)")


def problem_of(optimizers: Sequence[StateDict], stored: Collection[str], blocks: Sequence[Block]) -> str | None:
    """Why a checkpoint cannot serve our optimizers, the same on every rank.

    Args:
        optimizers: their :func:`~megatron_eopt.megatron.checkpoints.keys.fitted` requests.
        stored: the keys of what the checkpoint holds.
        blocks: what our optimizers wrote into it.
    """
    problem = too_new(max((block.get("format", 0) for block in blocks), default=0))
    if problem:
        return problem
    optional = {state for each in optimizers for state in each[BLOCK].get("optional", [])}
    if imports_adam(optimizers, stored):
        optional |= {SECOND_MOMENT, DISTRIBUTED_MAIN}
    here = [(each[BLOCK]["optimizer"], sorted(keys_of(each))) for each in optimizers]
    for of_ranks in zip(*distinct(here), strict=True):
        name = of_ranks[0][0]
        wanted = {key for _, keys in of_ranks for key in keys}
        problem = mismatch(name, wanted, stored, optional) or of_another(name, wanted, blocks)
        if problem:
            return problem
    if any(each[BLOCK]["layers_differ"] for each in optimizers):
        return stacks_layers(stored)
    return None


def keys_of(request: StateDict) -> set[str]:
    """The keys of requested tensors."""
    return {tensor.key for tensor in sharded_tensors(request)}


def too_new(written: int) -> str | None:
    """Why this format cannot be read; None if it can."""
    if written <= BLOCK_FORMAT:
        return None
    formats = f"format {written}; this one reads up to {BLOCK_FORMAT}"
    return f"it was written by a later release of megatron_eopt ({formats}): update the package"


def mismatch(name: str, wanted: set[str], stored: Collection[str], optional: Set[str] = frozenset()) -> str | None:
    """Why state under these keys cannot serve; ``optional`` states need not be loaded."""
    parameters = {split_key(key)[1] for key in wanted}
    differing = sorted(wanted.difference(stored))
    for key in sorted({*stored} - wanted):
        state, parameter = split_key(key)
        if state and parameter in parameters and base(state) not in optional:
            differing.append(key)
    if not differing:
        return None
    _, parameter = split_key(differing[0])
    needs = _states_of(parameter, wanted)
    has = _states_of(parameter, stored)
    of_adam = has - {MAIN, DISTRIBUTED_MAIN} == {FIRST_MOMENT, SECOND_MOMENT} and has_adams_alone(stored)
    reason = OF_ANOTHER
    if not has and any(".distributed." in key for key in stored):
        reason = _OF_BUFFERS
    elif of_adam and needs - {MAIN} == {MOMENTUM_BUFFER}:
        reason = _OF_ADAM
    return other_states(parameter, has, name, needs, reason)


def _states_of(parameter: str, keys: Iterable[str]) -> set[str]:
    return {state for state, of_parameter in map(split_key, keys) if of_parameter == parameter} - {""}


def other_states(parameter: str, has: Iterable[str], taker: str, needs: Iterable[str], reason: str) -> str:
    """Says which states a parameter has in a checkpoint, and needs."""
    listed = ", ".join(sorted(has)) or "no state"
    return f"it holds {listed} for {parameter}, and {taker} needs {', '.join(sorted(needs))}: {reason} {FRESH}"


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
        for shared in sorted(parameters & names):
            return taken_for_its_own(wrote, shared, name or "an optimizer of Megatron")
    return None


def taken_for_its_own(wrote: str, parameter: str, taker: str) -> str:
    """Says that state of equal names is not the same state."""
    return (
        f"{wrote} wrote the state of {parameter}, and {taker} would take it for its own: resume with that one, or "
        f"{FRESH}"
    )


def stacks_layers(stored: Iterable[str]) -> str | None:
    """Why a checkpoint of stacked layers cannot serve: Megatron would speak of counts of accesses."""
    for key in sorted(stored):
        if split_key(key)[0] and _STACKED.search(key):
            return (
                f"it stacks the state of all layers ({key}), which were treated alike when it was saved, and in this "
                f"run layers differ in their optimizers: leave away the overrides that single out layers (and what "
                f"freezes some), or {FRESH}"
            )
    return None
