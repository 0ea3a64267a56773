"""What is loaded is what was saved, at any layout: a checksum of every global tensor, kept in the checkpoint.

torch reads its archives without looking at their CRC, so a byte that changed on a disk would be trained with. The
checksums are sums over the parts that ranks hold, so they can be compared at another number of ranks, too.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor

from megatron_eopt.checkpoints.checksum import checksum

CHECKSUMS = "megatron_eopt_checksums"
"""Where the common state of a checkpoint has them."""

Sums = dict[str, tuple[int, int]]
"""Key -> checksum and number of entries."""


def checksums(tensors: Iterator[ShardedTensor]) -> Sums:
    """Those of all global tensors; all ranks call it with what they save or have loaded, and get the same."""
    parts: dict[str, list[Tensor]] = {}
    entries = Counter[str]()
    for tensor in tensors:
        # a quantized tensor has no bits of its own to look at
        if is_main_replica(tensor.replica_id) and type(tensor.data) in (torch.Tensor, torch.nn.Parameter):
            parts.setdefault(tensor.key, []).append(checksum(tensor.data, tensor.global_offset, tensor.global_shape))
            entries[tensor.key] += tensor.data.numel()
    own = {key: (int(torch.stack(sums).sum()), entries[key]) for key, sums in parts.items()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    totals: Sums = {}
    for sums in everywhere:
        for key, (value, count) in sums.items():
            known, counted = totals.get(key, (0, 0))
            totals[key] = ((known + value) % 2**64, counted + count)
    return totals


def saved_tensors(sharded_state_dict: Any) -> Iterator[ShardedTensor]:
    """What a state dict saves, with factories applied."""
    return (value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor))


def loaded_tensors(asked: Any, loaded: Any) -> Iterator[ShardedTensor]:
    """What was loaded, each part with where it lies.

    Args:
        asked: the state dict that was asked for, factories not applied.
        loaded: what became of it.
    """
    if isinstance(asked, ShardedTensor):
        yield replace(asked, data=loaded, dtype=loaded.dtype)
    elif isinstance(asked, ShardedTensorFactory):
        built = asked.build_fn(asked.key, loaded, asked.replica_id, asked.flattened_range)
        yield from (value for value in nested_values(built) if isinstance(value, ShardedTensor))
    elif isinstance(asked, Mapping):
        for key, value in asked.items():
            if key in loaded:
                yield from loaded_tensors(value, loaded[key])
    elif isinstance(asked, list) and asked:
        # Megatron leaves out of a list what has no tensor
        filled = [value for value in asked if not isinstance(value, list | dict) or value]
        for value, found in zip(filled, loaded if filled else [], strict=True):
            yield from loaded_tensors(value, found)


def changed(saved: Sums, loaded: Sums) -> list[str]:
    """Keys whose tensors are not what was saved, of those that were loaded whole."""
    return sorted(
        key
        for key, (value, entries) in loaded.items()
        if key in saved and saved[key][1] == entries and saved[key][0] != value
    )
