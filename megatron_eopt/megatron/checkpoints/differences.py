"""How a torch_dist checkpoint differs from the run loading it."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_eopt.checkpoints.contents import CheckpointError
from megatron_eopt.checkpoints.states import BLOCK, MAIN, base, blocks_of, split_key
from megatron_eopt.checkpoints.sums import CHECKSUMS
from megatron_eopt.megatron.agreement import distinct, say, union
from megatron_eopt.megatron.checkpoints.files import contents_of, damage_of
from megatron_eopt.megatron.checkpoints.matching import torch_state
from megatron_eopt.megatron.checkpoints.sharding import sharded_tensors, state_key
from megatron_eopt.optimizers.modifiers import OPTIONAL
from megatron_eopt.optimizers.orthogonalized import MOMENTUM_BUFFER
from megatron_eopt.optimizers.weight_average import AVERAGE, TRAINED
from megatron_eopt.registry import list_optimizers, optimizer_class
from megatron_eopt.routing import ParamPattern, compare, from_json, to_json

FORMAT = 1  # of what this package writes down; it grows when an older release could not read a checkpoint any more
_FIRST_MOMENT, _SECOND_MOMENT = "exp_avg", "exp_avg_sq"
_DISTRIBUTED_MAIN = "param"  # the main copy, in what Megatron's distributed optimizer saves by parameter
FRESH = "pass --no-load-optim to load the weights alone and start with fresh optimizer state"
Shapes = Mapping[str, tuple[int, ...] | None]  # key -> global shape; None is any shape
_FLAT = ".distributed."  # in keys of flat buffers
_STACKED = re.compile(r"\.layers\.(?!\d)")


class Stored(NamedTuple):
    """What a checkpoint holds, as sent to all ranks."""

    damage: str | None  # why it cannot be read
    shapes: dict[str, tuple[int, ...]]  # global, by key
    dtypes: dict[str, torch.dtype]
    optimizer: Any  # the common state of it
    checksums: Any  # as they were read; None where there are none


def read_stored(folder: Path) -> Stored:
    """What a checkpoint's metadata says that it holds."""
    try:
        contents = contents_of(folder)
    except CheckpointError as error:
        return Stored(str(error), {}, {}, None, None)
    return Stored(
        damage_of(contents),
        {key: tensor.shape for key, tensor in contents.tensors.items()},
        {key: tensor.dtype for key, tensor in contents.tensors.items()},
        contents.common.get("optimizer"),
        contents.common.get(CHECKSUMS),
    )


def problem_of(optimizers: Sequence[dict[Any, Any]], stored: Stored) -> str | None:
    """Why the checkpoint cannot serve, the same on every rank."""
    blocks = blocks_of(stored.optimizer)
    written = max((block.get("format", 0) for block in blocks), default=0)
    if problem := too_new(written):
        return problem
    if not any(split_key(key)[0] for key in stored.shapes):
        if any(_FLAT in key for key in stored.shapes):
            return (
                f"it holds the state of Adam in flat buffers of the distributed optimizer, which say nothing of "
                f"parameters: save it with --dist-ckpt-optim-fully-reshardable, or {FRESH}"
            )
        return f"it holds no optimizer state (it was saved with --no-save-optim, or converted): {FRESH}"
    optional = frozenset({AVERAGE, *(OPTIONAL if any(each[BLOCK].get("modifies") for each in optimizers) else ())})
    if any(each[BLOCK]["import_adam"] for each in optimizers) and has_adams_alone(stored.shapes):
        optional |= {_SECOND_MOMENT, _DISTRIBUTED_MAIN}
        theirs = {MOMENTUM_BUFFER: _FIRST_MOMENT}
        if any(split_key(key)[0] == _DISTRIBUTED_MAIN for key in stored.shapes):
            theirs[MAIN] = _DISTRIBUTED_MAIN
        requested = (value for each in optimizers for value in nested_values(each))
        for value in (each for each in requested if isinstance(each, ShardedTensor | ShardedTensorFactory)):
            name, parameter = split_key(value.key)
            if name in theirs:
                value.key = state_key(theirs[name], parameter)
    requested_here = [(each[BLOCK]["optimizer"], requested_of(each)) for each in optimizers]
    for of_ranks in zip(*distinct(requested_here), strict=True):
        name, wanted = of_ranks[0][0], {key: shape for _, shapes in of_ranks for key, shape in shapes.items()}
        if (
            problem := of_average(wanted, stored.shapes)
            or mismatch(name, wanted, stored.shapes, optional)
            or of_another(name, wanted, blocks)
        ):
            return problem
    return stacks_layers(stored.shapes) if any(each[BLOCK]["layers_differ"] for each in optimizers) else None


def renumber(optimizers: Iterable[dict[Any, Any]], stored: Iterable[str]) -> None:
    """Ask for state by the numbers of optimizers in ``stored``."""
    # Megatron numbers those of the layer-wise optimizer (chained_1.optimizer...); without it, experts have one more.
    numbers = {split_key(key): key.partition("optimizer.")[0] for key in stored}
    for value in (value for each in optimizers for value in nested_values(each)):
        for key in {split_key(tensor.key) for tensor in sharded_tensors([value])} & numbers.keys():
            value.key = numbers[key] + value.key[value.key.index("optimizer.") :]


def leave_out_missing(optimizers: Iterable[dict[Any, Any]], stored: Stored) -> None:
    """Take out of the request what modifiers keep and the checkpoint lacks, or say what they drop."""
    missing, wanted = set[str](), set[str]()
    blocks = [each[BLOCK] for each in optimizers if each[BLOCK].get("modifies")]
    for states in (of_parameter for block in blocks for of_parameter in block["state"].values()):
        for state in [state for state in states if base(state) in OPTIONAL]:
            wanted |= {tensor.key for tensor in states[state]}
            missing |= {base(state)} if any(tensor.key not in stored.shapes for tensor in states[state]) else set()
            states[state] = [tensor for tensor in states[state] if tensor.key in stored.shapes]
    for state in union(missing):
        say(f"the checkpoint lacks {state} of some parameters, which modifiers of this run keep: it begins anew there")
    unused = {base(split_key(key)[0]) for key in stored.shapes.keys() - {*union(wanted)}} & {*OPTIONAL}
    for state in sorted(unused) if blocks else ():
        say(f"the checkpoint holds {state} of some parameters, which no modifier of this run keeps: it is left out")


def leave_averages(optimizers: Sequence[dict[Any, Any]], stored: Iterable[str]) -> None:
    """Take averages of weights, and what belongs to them, out of a request if there are none."""
    there = {split_key(key)[0] for key in stored}
    for each in optimizers:
        states = torch_state(each).get("state")  # no dict on a rank without parameters
        for values in states.values() if isinstance(states, dict) else ():
            for key in {AVERAGE, TRAINED} - there if isinstance(values, dict) else ():
                values.pop(key, None)


def of_average(wanted: Iterable[str], stored: Iterable[str]) -> str | None:
    """Why a checkpoint whose model is an average cannot serve."""
    parameters = {split_key(key)[1] for key in wanted}
    if any(state == TRAINED and name in parameters for state, name in map(split_key, {*stored} - {*wanted})):
        return (
            f"its model is an average of weights (--save-weight-average), and this run, which has none, would go on "
            f"from it: name its --optimizer-weight-average, or {FRESH}"
        )
    return None


def of_buffers(requested: Iterable[str], stored: Iterable[str]) -> str | None:
    """Why state by parameter is none of flat buffers, on all ranks alike."""
    if any(_FLAT in key for key in stored) or not union([_FLAT] if any(_FLAT in key for key in requested) else []):
        return None
    return (
        f"it holds all state by parameter, and this run has that of what is no matrix in flat buffers, which Megatron "
        f"lays out beside those of whole matrices: pass --no-use-layer-wise-param-layout, or {FRESH}"
    )


def too_new(written: int) -> str | None:
    """Why this format cannot be read; None if it can."""
    if written <= FORMAT:
        return None
    formats = f"format {written}; this one reads up to {FORMAT}"
    return f"it was written by a later release of megatron_eopt ({formats}): update the package"


def mismatch(name: str, wanted: Shapes, stored: Shapes, optional: Set[str] = frozenset()) -> str | None:
    """Why ``stored`` cannot serve; ``optional`` states need not be loaded."""
    parameters = {split_key(key)[1] for key in wanted}
    missing = sorted(wanted.keys() - stored.keys())
    split = ((key, *split_key(key)) for key in sorted(stored.keys() - wanted.keys()))
    unused = [key for key, state, name in split if name in parameters and base(state) not in optional | {""}]
    if missing or unused:
        example = split_key((missing or unused)[0])[1]
        needs, has = ({split_key(key)[0] for key in keys if split_key(key)[1] == example} for keys in (wanted, stored))
        has.discard("")
        if not has and example not in stored:
            others = f"{len(missing) - 1} other tensors that this run needs"
            return f"{example} is not in it, nor are {others}: it is of another model"
        of_adam = has - {MAIN, _DISTRIBUTED_MAIN} == {_FIRST_MOMENT, _SECOND_MOMENT} and has_adams_alone(stored)
        reason = "another optimizer wrote it, or this one with other settings; resume with that one, or"
        if not has and any(_FLAT in key for key in stored):
            reason = (
                "it is in flat buffers of the distributed optimizer. Resume with --use-distributed-optimizer and the "
                "same sizes, and save with --dist-ckpt-optim-fully-reshardable to change them, or"
            )
        elif MAIN in has ^ needs and _DISTRIBUTED_MAIN not in has:
            saved, now = ("bf16", "fp32") if MAIN in has else ("fp32", "bf16")
            reason = f"it is of a run in {saved}, and this one is in {now}; resume in {saved}, or"
        elif of_adam and needs - {MAIN} == {MOMENTUM_BUFFER}:
            reason = "Adam wrote it. Pass --muon-momentum-from-adam to make its first moment the momentum, or"
        listed_has, listed_needs = (", ".join(sorted(states)) or "no state" for states in (has, needs))
        return f"it holds {listed_has} for {example}, and {name} needs {listed_needs}: {reason} {FRESH}"
    for key, shape in wanted.items():
        if shape is not None and stored[key] != shape:
            reason = f"it is of another model, or of other settings of the optimizer; {FRESH}"
            return f"{key} has shape {stored[key]} in it, and this run needs {shape}: {reason}"
    return None


def has_adams_alone(stored: Collection[str]) -> bool:
    """Whether there are first moments, and no momenta."""
    momentum, first_moment = state_key(MOMENTUM_BUFFER, ""), state_key(_FIRST_MOMENT, "")
    if any(key.startswith(momentum) for key in stored):
        return False
    return any(key.startswith(first_moment) for key in stored)


def of_another(name: str | None, wanted: Iterable[str], blocks: Sequence[Mapping[str, Any]]) -> str | None:
    """Why state that another of our optimizers wrote cannot serve."""
    ours = {optimizer_class(each).__name__ for each in list_optimizers()}
    parameters = {split_key(key)[1] for key in wanted}
    for block in blocks if name is None or name in ours else ():
        wrote = block["optimizer"]
        shared = sorted(parameters & {key for group in block["groups"] for key in group["names"]})
        if shared and wrote != name and wrote in ours:
            taker = name or "an optimizer of Megatron"
            taken = f"{wrote} wrote the state of {shared[0]}, and {taker} would take it for its own"
            return f"{taken}: resume with that one, or {FRESH}"
    return None


def stacks_layers(stored: Iterable[str]) -> str | None:
    """Why a checkpoint of stacked layers cannot serve."""
    stacked = next((key for key in sorted(stored) if split_key(key)[0] and _STACKED.search(key)), None)
    return stacked and (
        f"it stacks the state of all layers ({stacked}), which were treated alike when it was saved, and in this run "
        f"layers differ in their optimizers: leave away the overrides that single out layers (and what freezes some), "
        f"or {FRESH}"
    )


def requested_of(optimizer: Any) -> dict[str, tuple[int, ...] | None]:
    """Key -> shape of requested tensors; None for padded vocabularies."""
    return {t.key: None if t.allow_shape_mismatch else t.global_shape for t in sharded_tensors(optimizer)}


def other_padding(requested: Iterable[ShardedTensor], stored: Mapping[str, tuple[int, ...]]) -> str | None:
    """What becomes of a vocabulary that was padded otherwise."""
    for tensor in (t for t in requested if t.allow_shape_mismatch and t.key in stored):
        shapes = zip(stored[tensor.key], tensor.global_shape, tensor.axis_fragmentations, strict=True)
        for was, now, ranks in shapes:
            if was != now:
                flag = f"--make-vocab-size-divisible-by {was // ranks} pads the same vocabulary as it was"
                if was % ranks:
                    flag = f"no --make-vocab-size-divisible-by pads it so at a tensor-parallel size of {ranks}"
                return (
                    f"the vocabulary is padded to {now} rows, and was to {was} in the checkpoint ({tensor.key}): rows "
                    f"that only one of them has are dropped, or begin anew; {flag}"
                )
    return None


def report_converted(state: Iterable[tuple[str, torch.dtype, torch.dtype]]) -> None:
    """Say which state is converted to this run's dtype."""
    if converted := union(f"{name} from {was} to {now}" for name, was, now in state if was != now):
        say(f"the state of the checkpoint is converted: {', '.join(converted)}")


def report_changes(saved: dict[str, Any] | None, families: Sequence[ParamPattern]) -> None:
    """Say what changed since the save; an unreadable manifest passes."""
    if saved is None or dist.get_rank() != 0:
        return
    try:
        changes = compare(from_json(saved), from_json(to_json(families)))
    except ValueError as error:
        changes = [f"not known, since {error}"]
    for line in changes:
        say(f"changed since the checkpoint: {line}")
