"""Fit what a run requests of a torch_dist checkpoint to what is stored there.

A request is fitted in place, before it is compared: state has other keys in some checkpoints, and some need not be
there.
"""

from collections.abc import Iterable, Iterator, Sequence

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_eopt.checkpoints.states import BLOCK, MAIN, StateDict, base, split_key
from megatron_eopt.megatron.checkpoints.refusals import (
    DISTRIBUTED_MAIN,
    FIRST_MOMENT,
    imports_adam,
)
from megatron_eopt.megatron.checkpoints.sharding import Sharded, sharded_tensors, stacked_index, state_key
from megatron_eopt.megatron.checkpoints.stored import Stored
from megatron_eopt.megatron.consensus import say, union
from megatron_eopt.step.modifiers import OPTIONAL
from megatron_eopt.step.state import MOMENTUM_BUFFER


def fit(optimizers: Sequence[StateDict], stored: Stored) -> None:
    """Fit the requests of our optimizers; all ranks together."""
    _renumber(optimizers, stored.shapes)
    _leave_out_missing(optimizers, stored.shapes)
    if imports_adam(optimizers, stored):
        _ask_for_adams(optimizers, stored.shapes)


def _renumber(optimizers: Iterable[StateDict], stored: Iterable[str]) -> None:
    """Ask for state by the numbers of optimizers in ``stored``."""
    # Megatron numbers those of the layer-wise optimizer (chained_1.optimizer...); without it, experts have one more.
    numbers = {split_key(key): key.partition("optimizer.")[0] for key in stored}
    for value in _requested(optimizers):
        for tensor in sharded_tensors([value]):
            number = numbers.get(split_key(tensor.key))
            if number is not None:
                value.key = number + value.key[value.key.index("optimizer.") :]


def _leave_out_missing(optimizers: Iterable[StateDict], stored: Iterable[str]) -> None:
    """Take out of the request what modifiers keep and the checkpoint lacks, or say what they drop."""
    keys = {*stored}
    missing = set[str]()
    wanted = set[str]()
    blocks = [each[BLOCK] for each in optimizers if each[BLOCK].get("modifies")]
    for block in blocks:
        for states in block["state"].values():
            for state in states:
                if base(state) not in OPTIONAL:
                    continue
                there = [tensor for tensor in states[state] if tensor.key in keys]
                wanted |= {tensor.key for tensor in states[state]}
                if len(there) < len(states[state]):
                    missing.add(base(state))
                states[state] = there
    for state in union(missing):
        say(f"the checkpoint lacks {state} of some parameters, which modifiers of this run keep: it begins anew there")
    unused = {base(split_key(key)[0]) for key in keys - {*union(wanted)}} & {*OPTIONAL}
    for state in sorted(unused) if blocks else ():
        say(f"the checkpoint holds {state} of some parameters, which no modifier of this run keeps: it is left out")


def _ask_for_adams(optimizers: Iterable[StateDict], stored: Iterable[str]) -> None:
    """Ask for Adam's first moments in place of momenta, and say so; all ranks together."""
    parameters = set[str]()
    theirs = {MOMENTUM_BUFFER: FIRST_MOMENT}
    if any(split_key(key)[0] == DISTRIBUTED_MAIN for key in stored):
        theirs[MAIN] = DISTRIBUTED_MAIN
    for value in _requested(optimizers):
        name, parameter = split_key(value.key)
        if name in theirs:
            value.key = state_key(theirs[name], parameter)
        if name == MOMENTUM_BUFFER:
            parameters.add(f"{parameter} {stacked_index(value)}")
    say(f"--muon-momentum-from-adam: the momenta of {len(union(parameters))} parameters are Adam's first moments")


def _requested(optimizers: Iterable[StateDict]) -> Iterator[Sharded]:
    for value in nested_values(list(optimizers)):
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            yield value
