"""Whether the optimizer state of a checkpoint can serve a run: what it must hold, and what may be taken for it."""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_eopt.checkpoints.states import BLOCK, MAIN, split_key
from megatron_eopt.megatron.checkpoints.sharding import state_key
from megatron_eopt.optimizers.orthogonalized import MOMENTUM_BUFFER
from megatron_eopt.registry import EMERGING_OPTIMIZERS

FORMAT = 1
"""Of what this package writes down. It grows when an older release could not read a checkpoint any more."""

FIRST_MOMENT, SECOND_MOMENT = "exp_avg", "exp_avg_sq"
FRESH = "pass --no-load-optim to load the weights alone and start with fresh optimizer state"
_STACKED = re.compile(r"\.layers\.(?!\d)")


def unreadable(stored: Iterable[str], blocks: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a checkpoint with these tensors, which says this of its optimizers, cannot serve any optimizer."""
    newest = max((block.get("format", 0) for block in blocks), default=0)
    if newest > FORMAT:
        return (
            f"it was written by a later release of megatron_eopt (format {newest}; this one reads up to {FORMAT}): "
            f"update the package"
        )
    if not any(split_key(key)[0] for key in stored):
        return f"it holds no optimizer state (it was saved with --no-save-optim, or converted): {FRESH}"
    return None


def mismatch(
    name: str,
    wanted: Mapping[str, tuple[int, ...] | None],
    stored: Mapping[str, tuple[int, ...]],
    optional: Set[str] = frozenset(),
) -> str | None:
    """Why a checkpoint cannot serve the optimizer of this name.

    Args:
        name: of its class.
        wanted: key -> global shape, of every tensor that it loads on any rank; None where any shape will do.
        stored: the same of the checkpoint, of models and of all optimizers.
        optional: states that need not be loaded.
    """
    parameters = {split_key(key)[1] for key in wanted}
    missing = sorted(wanted.keys() - stored.keys())
    unused = sorted(
        key
        for key in stored.keys() - wanted.keys()
        if split_key(key)[1] in parameters and split_key(key)[0] not in optional | {""}
    )
    if missing or unused:
        example = split_key((missing or unused)[0])[1]
        needs, has = ({split_key(key)[0] for key in keys if split_key(key)[1] == example} for keys in (wanted, stored))
        has.discard("")
        if not has and example not in stored:
            return (
                f"{example} is not in it, nor are {len(missing) - 1} other tensors that this run needs: it is of "
                f"another model"
            )
        reason = "another optimizer wrote it, or this one with other settings; resume with that one, or"
        if MAIN in has ^ needs:
            saved, now = ("bf16", "fp32") if MAIN in has else ("fp32", "bf16")
            reason = f"it is of a run in {saved}, and this one is in {now}; resume in {saved}, or"
        elif needs - {MAIN} == {MOMENTUM_BUFFER} and has - {MAIN} == {FIRST_MOMENT, SECOND_MOMENT} and _of_adam(stored):
            reason = "Adam wrote it. Pass --muon-momentum-from-adam to make its first moment the momentum, or"
        listed_has, listed_needs = (", ".join(sorted(states)) or "no state" for states in (has, needs))
        return f"it holds {listed_has} for {example}, and {name} needs {listed_needs}: {reason} {FRESH}"
    for key, shape in wanted.items():
        if shape is not None and stored[key] != shape:
            return (
                f"{key} has shape {stored[key]} in it, and this run needs {shape}: it is of another model, or of other "
                f"settings of the optimizer; {FRESH}"
            )
    return None


def _of_adam(stored: Iterable[str]) -> bool:
    """Whether there are first moments of Adam that can be imported: a checkpoint with momenta goes on with those."""
    momentum, first_moment = (
        any(key.startswith(state_key(name, "")) for key in stored) for name in (MOMENTUM_BUFFER, FIRST_MOMENT)
    )
    return first_moment and not momentum


def of_another(name: str | None, wanted: Iterable[str], blocks: Sequence[Mapping[str, Any]]) -> str | None:
    """Why state with the same names and shapes cannot serve: one of our optimizers wrote it, and another one loads it.

    The name is None for one of Megatron's own. What a user's own optimizer is called now, or was, says nothing.
    """
    ours = {entry.optimizer_cls.__name__ for entry in EMERGING_OPTIMIZERS.values()}
    parameters = {split_key(key)[1] for key in wanted}
    for block in blocks if name is None or name in ours else ():
        wrote = block["optimizer"]
        shared = sorted(parameters & {key for group in block["groups"] for key in group["names"]})
        if shared and wrote != name and wrote in ours:
            return (
                f"{wrote} wrote the state of {shared[0]}, and {name or 'an optimizer of Megatron'} would take it for "
                f"its own: resume with that one, or {FRESH}"
            )
    return None


def stacks_layers(stored: Iterable[str]) -> str | None:
    """Why a checkpoint cannot serve a run that keeps its layers apart; None where it keeps them apart, too."""
    stacked = next((key for key in sorted(stored) if split_key(key)[0] and _STACKED.search(key)), None)
    return stacked and (
        f"it stacks the state of all layers ({stacked}), which were treated alike when it was saved, and in this run "
        f"layers differ in their optimizers: leave away the overrides that single out layers (and what freezes some), "
        f"or {FRESH}"
    )


def imports_adam(optimizers: Iterable[Mapping[Any, Any]], stored: Iterable[str]) -> bool:
    """Whether the user requested Adam's first moments as momenta, and the checkpoint has those and no momentum."""
    return any(each[BLOCK]["import_adam"] for each in optimizers) and _of_adam(stored)


def take_first_moments(optimizers: Iterable[Mapping[Any, Any]]) -> None:
    """Let every momentum be read from where Adam's first moment is."""
    for value in (value for each in optimizers for value in nested_values(each)):
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            name = value.key.removeprefix(state_key(MOMENTUM_BUFFER, ""))
            if name != value.key:
                value.key = state_key(FIRST_MOMENT, name)
