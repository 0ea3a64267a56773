"""What a checkpoint has to hold before anything is read from it: other optimizers' state is refused, or imported."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories

from megatron_eopt.checkpoints.contents import CheckpointError, read_contents
from megatron_eopt.checkpoints.problems import check_files
from megatron_eopt.checkpoints.states import BLOCK, MAIN, blocks_of, parts_of, split_key
from megatron_eopt.megatron.checkpoints.attach import FORMAT
from megatron_eopt.megatron.checkpoints.checksums import (
    CHECKSUMS,
    Sums,
    changed,
    checksums,
    loaded_tensors,
    saved_tensors,
)
from megatron_eopt.megatron.checkpoints.importing import FIRST_MOMENT, imports_adam, take_first_moments
from megatron_eopt.megatron.checkpoints.layers import stacked_problem
from megatron_eopt.megatron.checkpoints.parts import put_back, taken_out
from megatron_eopt.megatron.checkpoints.sharding import built
from megatron_eopt.optimizers.orthogonalized import MOMENTUM_BUFFER
from megatron_eopt.registry import EMERGING_OPTIMIZERS

FRESH = "pass --no-load-optim to load the weights alone and start with fresh optimizer state"


@dataclass
class _Held:
    """What a checkpoint holds.

    Attributes:
        shapes: by key, of every tensor, and
        dtypes: likewise.
        optimizer: the common state of ``optimizer``.
        sums: checksums, empty where the checkpoint has none.
        error: why it cannot be read.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    optimizer: Any = None
    sums: Sums = field(default_factory=dict)
    error: str | None = None


def checked_save(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``dist_checkpointing.save``: where optimizers of ours are saved, checksums of all tensors are, too."""

    @functools.wraps(save)
    def save_checked(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if any(part[BLOCK]["checksums"] for part in parts_of(sharded_state_dict)):
            apply_factories(sharded_state_dict)  # as saving does
            sharded_state_dict[CHECKSUMS] = checksums(saved_tensors(sharded_state_dict))
        return save(sharded_state_dict, *args, **kwargs)

    return save_checked


def checked_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``dist_checkpointing.load``: where optimizers of ours are asked for, the checkpoint has to have them.

    And where Megatron's own are, it must not have ours in their places.
    """

    @functools.wraps(load)
    def load_checked(sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        parts = list(parts_of(sharded_state_dict))
        if not parts:
            if "optimizer" in sharded_state_dict:
                _refuse_ours(sharded_state_dict["optimizer"], checkpoint_dir)
            return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        held = _held(checkpoint_dir)
        imports = held.error is None and imports_adam(parts, held.shapes)
        if imports:
            take_first_moments(parts)
        problem = held.error or _problem(parts, held, frozenset({"exp_avg_sq"}) if imports else frozenset())
        problem = problem or stacked_problem(key for key in held.shapes if split_key(key)[0])
        if problem:
            raise CheckpointError(f"{checkpoint_dir}: {problem}")
        request = taken_out(sharded_state_dict)
        result = load(request, checkpoint_dir, *args, **kwargs)
        loaded = result[0] if isinstance(result, tuple) else result
        if any(part[BLOCK]["checksums"] for part in parts):
            _compare(held, request, loaded, checkpoint_dir)
        loaded.pop(CHECKSUMS, None)
        put_back(sharded_state_dict, loaded, held.optimizer)
        return result

    return load_checked


def _refuse_ours(asked: Any, folder: str) -> None:
    """Refuse, for an optimizer of Megatron's own, state that one of ours wrote; of the rest Megatron judges itself."""
    wanted = [tensor.key for tensor in _sharded({"optimizer": asked})]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, wanted)
    problem = of_another(None, {key for keys in everywhere for key in keys}, blocks_of(_held(folder).optimizer))
    if problem:
        raise CheckpointError(f"{folder}: {problem}")


def _compare(held: _Held, asked: Any, loaded: dict[str, Any], folder: str) -> None:
    if not held.sums:
        return
    comparable = (
        tensor
        for tensor in loaded_tensors(asked, loaded)
        if held.shapes.get(tensor.key) == tuple(tensor.global_shape) and held.dtypes[tensor.key] == tensor.dtype
    )
    keys = changed(held.sums, checksums(comparable))
    if keys:
        raise CheckpointError(
            f"{folder}: {len(keys)} tensors are not what was saved, such as {keys[0]}: their bytes have changed since. "
            f"megatron-eopt verify-checkpoint says where; load another checkpoint, or a good copy of this one"
        )


def _held(folder: str) -> _Held:
    """Read by one rank; the same on all."""
    held = _Held()
    if dist.get_rank() == 0:
        try:
            contents = read_contents(Path(folder))
            held.shapes = {key: tensor.shape for key, tensor in contents.tensors.items()}
            held.dtypes = {key: tensor.dtype for key, tensor in contents.tensors.items()}
            held.optimizer = contents.common.get("optimizer")
            held.sums = contents.common.get(CHECKSUMS, {})
            faults = [problem for problem in check_files(contents) if problem.severity == "error"]
            held.error = f"{faults[0].what}. {faults[0].advice}" if faults else None
        except CheckpointError as error:
            held.error = str(error)
    everywhere = [held]
    dist.broadcast_object_list(everywhere, src=0)
    return everywhere[0]


def _sharded(part: Mapping[Any, Any]) -> list[ShardedTensor]:
    """The tensors that a part asks for, those of factories among them."""
    asked = (value for value in nested_values(part) if isinstance(value, (ShardedTensor, ShardedTensorFactory)))
    return [tensor for value in asked for tensor in built(value)]


def _problem(parts: list[dict[Any, Any]], held: _Held, left: Set[str]) -> str | None:
    """Why the checkpoint cannot serve; the same on every rank. States that are ``left`` need not be loaded."""
    newer = [block["format"] for block in blocks_of(held.optimizer) if block.get("format", 0) > FORMAT]
    if newer:
        return (
            f"it was written by a later release of megatron_eopt (format {newer[0]}; this one reads up to {FORMAT}): "
            f"update the package"
        )
    if not any(split_key(key)[0] for key in held.shapes):
        return f"it holds no optimizer state (it was saved with --no-save-optim, or converted): {FRESH}"
    own = [
        # a vocabulary may be padded to another size
        (part[BLOCK]["optimizer"], {t.key: None if t.allow_shape_mismatch else t.global_shape for t in _sharded(part)})
        for part in parts
    ]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    for of_ranks in zip(*everywhere, strict=True):
        wanted = {key: shape for _, keys in of_ranks for key, shape in keys.items()}
        name = of_ranks[0][0]
        problem = problem_of(name, wanted, held.shapes, left) or of_another(name, wanted, blocks_of(held.optimizer))
        if problem:
            return problem
    return None


def of_another(name: str | None, wanted: Iterable[str], blocks: Sequence[Mapping[str, Any]]) -> str | None:
    """Why state with the same names and shapes cannot serve: an optimizer of ours wrote it, and another one asks.

    What a user's own optimizer is called now, or was, says nothing.

    Args:
        name: of the optimizer; None for one of Megatron's own.
        wanted: keys of the tensors that it loads.
        blocks: what the checkpoint says of its optimizers.
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


def problem_of(
    name: str,
    wanted: Mapping[str, tuple[int, ...] | None],
    stored: Mapping[str, tuple[int, ...]],
    left: Set[str] = frozenset(),
) -> str | None:
    """Why a checkpoint cannot serve one optimizer.

    Args:
        name: of the optimizer.
        wanted: key -> global shape, of every tensor that it loads on any rank; None where any shape will do.
        stored: the same of the checkpoint, of models and of all optimizers.
        left: states that need not be loaded.
    """
    states = {key: split_key(key) for key in wanted}
    parameters = {parameter for _, parameter in states.values()}
    missing = sorted(wanted.keys() - stored.keys())
    unused = sorted(
        key
        for key in stored.keys() - wanted.keys()
        if split_key(key)[1] in parameters and split_key(key)[0] not in left | {""}
    )
    if missing or unused:
        example = split_key((missing or unused)[0])[1]
        needs = sorted({state for state, parameter in states.values() if parameter == example})
        has = sorted({split_key(key)[0] for key in stored if split_key(key)[1] == example} - {""})
        if not has and example not in stored:
            return (
                f"{example} is not in it, nor are {len(missing) - 1} other tensors that this run needs: it is of "
                f"another model"
            )
        return (
            f"it holds {_listed(has)} for {example}, and {name} needs {_listed(needs)}: {_reason(set(has), set(needs))}"
        )
    for key, shape in wanted.items():
        if shape is not None and stored[key] != shape:
            return (
                f"{key} has shape {stored[key]} in it, and this run needs {shape}: it is of another model, or of other "
                f"settings of the optimizer; {FRESH}"
            )
    return None


def _reason(has: set[str], needs: set[str]) -> str:
    if MAIN in has ^ needs:
        saved, now = ("bf16", "fp32") if MAIN in has else ("fp32", "bf16")
        return f"it is of a run in {saved}, and this one is in {now}; resume in {saved}, or {FRESH}"
    if MOMENTUM_BUFFER in needs and has - {MAIN} == {FIRST_MOMENT, "exp_avg_sq"}:
        return f"Adam wrote it. Pass --muon-momentum-from-adam to make its first moment the momentum, or {FRESH}"
    return f"another optimizer wrote it, or this one with other settings; resume with that one, or {FRESH}"


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "no state"
