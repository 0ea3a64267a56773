"""Keys of tensors in torch_dist checkpoints: which a run asks for and writes.

Megatron stacks layers, and their state, into one tensor. Where layers have different state, it would refuse the holes
in the first save: then it is told to name every layer, which the checkpoint says.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model

from megatron_eopt.checkpoints.states import BLOCK, MAIN, StateDict, base, split_key
from megatron_eopt.megatron.consensus import log_rank0, union
from megatron_eopt.megatron.support.facts import on, training_args
from megatron_eopt.redirect import Original, around
from megatron_eopt.routing import ParamPattern, rows
from megatron_eopt.step.state import MOMENTUM_BUFFER

type Sharded = ShardedTensor | ShardedTensorFactory
"""What Megatron's model says of a parameter: a factory makes several tensors of it (gate and up of a SwiGLU's fc1)."""

FIRST_MOMENT = "exp_avg"
SECOND_MOMENT = "exp_avg_sq"
DISTRIBUTED_MAIN = "param"  # the main copy, in what Megatron's distributed optimizer saves by parameter
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)|(?<=\.weight)\d+$")
_MARK = "megatron_eopt_layers_differ"  # attribute of a model chunk


def state_key(key: str, parameter_key: str) -> str:
    """Megatron's key of a state tensor."""
    return f"optimizer.state.{key}.{parameter_key}"


def sharded_tensors(state_dict: Any) -> Iterator[ShardedTensor]:
    """The tensors of a state dict, with those of factories."""
    for value in nested_values(state_dict):
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, ShardedTensorFactory):
            yield from sharded_tensors(value.build())


def stacked_index(parameter: Sharded) -> int:
    """Index among the layers and experts stacked under a key."""
    first = next(sharded_tensors([parameter]))
    index = 0
    for axis in range(first.prepend_axis_num):
        index = index * first.global_shape[axis] + first.global_offset[axis]
    return index


def layers_differ(families: Iterable[ParamPattern], frozen: Iterable[str]) -> bool:
    """Whether layers have different optimizers or state; one layer's experts may not."""
    treated: dict[str, set[tuple[str, int, int]]] = defaultdict(set)  # by name, that of experts without their numbers
    for row in rows(families):
        name = _EXPERT.sub("*", row.name)
        treated[name].add((row.optimizer or "none", len(row.matrices), row.state_bytes))
    for name in union(_EXPERT.sub("*", name) for name in frozen):
        treated[name].add(("none", 0, 0))
    args = training_args()
    saves = on(args, "save") and getattr(args, "ckpt_format", None) == "torch_dist"
    of_layers: dict[str, set[frozenset[tuple[str, int, int]]]] = defaultdict(set)
    for name, treatments in sorted(treated.items()):
        if saves and len(treatments) > 1:
            optimizers = " and ".join(sorted({optimizer for optimizer, *_ in treatments}))
            raise ValueError(
                f"experts of one layer ({name}) are treated differently (optimizers: {optimizers}), and Megatron "
                f"stacks their state in torch_dist checkpoints: let overrides select all experts of a layer, or leave "
                f"--save away"
            )
        of_layers[_LAYER.sub("*", name)].add(frozenset(treatments))
    return any(len(different) > 1 for different in of_layers.values())


def set_per_layer_keys(model_chunks: Sequence[Any], apart: bool) -> None:
    """Set whether checkpoints name every layer of a model."""
    for chunk in unwrap_model(list(model_chunks)):
        setattr(chunk, _MARK, apart)


@around
def name_layers(generate: Original, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``generate_state_dict``: a save names the layers that :func:`set_per_layer_keys` marked."""
    given = inspect.signature(generate).bind(*args, **kwargs).arguments
    metadata = (given.get("model_sd_kwargs") or {}).get("metadata")  # None for the torch format
    is_loading = (given.get("optim_sd_kwargs") or {}).get("is_loading")  # by the names of the checkpoint
    if metadata is not None and not is_loading and any(getattr(chunk, _MARK, False) for chunk in given["model"]):
        metadata["non_homogeneous_layers"] = True
    return generate(*args, **kwargs)


def fitted(optimizers: Sequence[StateDict], stored: Collection[str]) -> list[StateDict]:
    """Requests of our optimizers by stored keys, without what may be missing; all ranks together."""
    # Megatron numbers those of the layer-wise optimizer (chained_1.optimizer...); without it, experts have one more.
    numbers = {split_key(key): key.partition("optimizer.")[0] for key in stored}

    def numbered(value: Sharded) -> str:
        own, optimizer, rest = value.key.partition("optimizer.")
        first = next(sharded_tensors([value]))
        return numbers.get(split_key(first.key), own) + optimizer + rest

    requests = _with_keys(numbered, optimizers)
    _leave_out_missing(requests, stored)
    if not imports_adam(optimizers, stored):
        return requests
    momenta = set[str]()
    theirs = {MOMENTUM_BUFFER: FIRST_MOMENT}
    if any(split_key(key)[0] == DISTRIBUTED_MAIN for key in stored):
        theirs[MAIN] = DISTRIBUTED_MAIN

    def of_adam(value: Sharded) -> str:
        state, parameter = split_key(value.key)
        if state == MOMENTUM_BUFFER:
            momenta.add(f"{parameter} {stacked_index(value)}")
        return state_key(theirs[state], parameter) if state in theirs else value.key

    requests = _with_keys(of_adam, requests)
    log_rank0(f"--muon-momentum-from-adam: the momenta of {len(union(momenta))} parameters are Adam's first moments")
    return requests


def _with_keys(key_of: Callable[[Sharded], str], optimizers: Sequence[StateDict]) -> list[StateDict]:
    """Copies of requests, with other keys of what is sharded."""

    def renamed(value: Any) -> Any:
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            return replace(value, key=key_of(value))
        return value

    requests: list[StateDict] = dict_list_map_outplace(renamed, list(optimizers))
    return requests


def _leave_out_missing(requests: Iterable[StateDict], stored: Collection[str]) -> None:
    """Take out what modifiers keep and the checkpoint lacks, and say so; or say what they drop."""
    missing = set[str]()
    requests = list(requests)
    wanted = {tensor.key for tensor in sharded_tensors(requests)}
    optional = set[str]()
    for block in (each[BLOCK] for each in requests):
        of_block = block.get("optional", [])
        optional.update(of_block)
        for states in block.get("state", {}).values():
            for state in [state for state in states if base(state) in of_block]:
                there = [tensor for tensor in states[state] if tensor.key in stored]
                if len(there) < len(states[state]):
                    missing.add(base(state))
                states[state] = there
    for state in union(missing):
        log_rank0(
            f"the checkpoint lacks {state} of some parameters, which modifiers of this run keep: it begins anew there"
        )
    unused = {base(split_key(key)[0]) for key in {*stored} - {*union(wanted)}}
    for state in sorted(unused & optional):
        log_rank0(
            f"the checkpoint holds {state} of some parameters, which no modifier of this run keeps: it is left out"
        )


def imports_adam(optimizers: Iterable[StateDict], stored: Iterable[str]) -> bool:
    """Whether Adam's first moments become momenta."""
    return any(each[BLOCK]["import_adam"] for each in optimizers) and has_adams_alone(stored)


def has_adams_alone(stored: Iterable[str]) -> bool:
    """Whether there are first moments, and no momenta."""
    states = {split_key(key)[0] for key in stored if key.startswith("optimizer.")}
    return FIRST_MOMENT in states and MOMENTUM_BUFFER not in states
