"""Fit what a run requests of a torch_dist checkpoint to what is stored there.

State has other keys in some checkpoints, and some need not be there.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_eopt.checkpoints.states import BLOCK, MAIN, StateDict, base, split_key
from megatron_eopt.megatron.checkpoints.refusals import DISTRIBUTED_MAIN, FIRST_MOMENT, imports_adam
from megatron_eopt.megatron.checkpoints.sharding import Sharded, sharded_tensors, stacked_index, state_key
from megatron_eopt.megatron.checkpoints.stored import Stored
from megatron_eopt.megatron.consensus import say, union
from megatron_eopt.step.modifiers import OPTIONAL
from megatron_eopt.step.state import MOMENTUM_BUFFER


def fitted(optimizers: Sequence[StateDict], stored: Stored) -> list[StateDict]:
    """The requests of our optimizers, by the keys of a checkpoint and without what it may lack; all ranks together."""
    requests = _with_keys(_stored_numbers(stored.shapes), optimizers)
    _leave_out_missing(requests, stored.shapes)
    if imports_adam(optimizers, stored):
        requests = _for_adams(requests, stored.shapes)
    return requests


def _with_keys(key_of: Callable[[Sharded], str], optimizers: Iterable[StateDict]) -> list[StateDict]:
    """Copies of requests, with other keys of what is sharded."""

    def renamed(value: Any) -> Any:
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            return replace(value, key=key_of(value))
        return value

    requests: list[StateDict] = dict_list_map_outplace(renamed, list(optimizers))
    return requests


def _stored_numbers(stored: Iterable[str]) -> Callable[[Sharded], str]:
    """Keys with the numbers that optimizers have in ``stored``."""
    # Megatron numbers those of the layer-wise optimizer (chained_1.optimizer...); without it, experts have one more.
    numbers = {split_key(key): key.partition("optimizer.")[0] for key in stored}

    def key_of(value: Sharded) -> str:
        own, optimizer, rest = value.key.partition("optimizer.")
        first = next(sharded_tensors([value]))
        return numbers.get(split_key(first.key), own) + optimizer + rest

    return key_of


def _leave_out_missing(requests: Iterable[StateDict], stored: Collection[str]) -> None:
    """Take out what modifiers keep and the checkpoint lacks, or say what they drop."""
    missing = set[str]()
    wanted = set[str]()
    blocks = [each[BLOCK] for each in requests if each[BLOCK].get("modifies")]
    for block in blocks:
        for states in block["state"].values():
            for state in states:
                if base(state) not in OPTIONAL:
                    continue
                there = [tensor for tensor in states[state] if tensor.key in stored]
                wanted |= {tensor.key for tensor in states[state]}
                if len(there) < len(states[state]):
                    missing.add(base(state))
                states[state] = there
    for state in union(missing):
        say(f"the checkpoint lacks {state} of some parameters, which modifiers of this run keep: it begins anew there")
    unused = {base(split_key(key)[0]) for key in {*stored} - {*union(wanted)}} & {*OPTIONAL}
    for state in sorted(unused) if blocks else ():
        say(f"the checkpoint holds {state} of some parameters, which no modifier of this run keeps: it is left out")


def _for_adams(requests: Iterable[StateDict], stored: Iterable[str]) -> list[StateDict]:
    """Requests for Adam's first moments in place of momenta, which is said; all ranks together."""
    parameters = set[str]()
    theirs = {MOMENTUM_BUFFER: FIRST_MOMENT}
    if any(split_key(key)[0] == DISTRIBUTED_MAIN for key in stored):
        theirs[MAIN] = DISTRIBUTED_MAIN

    def key_of(value: Sharded) -> str:
        name, parameter = split_key(value.key)
        if name == MOMENTUM_BUFFER:
            parameters.add(f"{parameter} {stacked_index(value)}")
        return state_key(theirs[name], parameter) if name in theirs else value.key

    found = _with_keys(key_of, requests)
    say(f"--muon-momentum-from-adam: the momenta of {len(union(parameters))} parameters are Adam's first moments")
    return found
