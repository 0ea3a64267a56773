"""Where a checkpoint has the state of optimizers, and our blocks."""

import re
from collections.abc import Iterator
from typing import Any

BLOCK = "megatron_eopt"  # key under which this package writes into each of Megatron's optimizers: our block
BLOCK_FORMAT = 1  # of our blocks; it grows when an older release could not read a checkpoint any more
MAIN = "fp32_param"  # state key of the main copy in runs with bf16 or fp16
# Megatron's distributed optimizer puts the number of the optimizer ahead.
_STATE = re.compile(r"(?:chained_\d+\.)*optimizer\.state\.([^.]+)\.(.+)")
_OF_A_MATRIX = re.compile(r"_\d+$")  # ``moment2_buffer_1``: of the second logical matrix

StateDict = dict[Any, Any]  # an optimizer's, or one with several inside
Block = dict[str, Any]  # ours, of one optimizer
Settings = dict[str, Any]  # of a group of parameters, by name


def holding(state_dict: Any, key: str) -> Iterator[StateDict]:
    """The outermost dicts in a state dict with this key."""
    if isinstance(state_dict, dict):
        if key in state_dict:
            yield state_dict
        else:
            for value in state_dict.values():
                yield from holding(value, key)


def blocks_of(state_dict: Any) -> list[Block]:
    """Our blocks, one for each optimizer of ours."""
    return [state[BLOCK] for state in holding(state_dict, BLOCK)]


def split_key(key: str) -> tuple[str, str]:
    """State and parameter of a key; empty for no state."""
    match = _STATE.fullmatch(key)
    return (match[1], match[2]) if match else ("", key)


def base(state: str) -> str:
    """A state key without the number of its logical matrix."""
    return _OF_A_MATRIX.sub("", state)
