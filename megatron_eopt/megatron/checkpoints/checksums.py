"""Checksums of whole tensors, in torch_dist checkpoints.

torch reads its archives without looking at their CRC, so a byte that changed on a disk would be trained with. Checksums
of global tensors are sums over shards, and can be compared at another number of ranks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor

from megatron_eopt.checkpoints.contents import CheckpointError
from megatron_eopt.checkpoints.states import BLOCK, holding
from megatron_eopt.checkpoints.sums import CHECKSUMS, Sums
from megatron_eopt.megatron.checkpoints.sharding import sharded_tensors
from megatron_eopt.megatron.checkpoints.stored import Stored
from megatron_eopt.megatron.consensus import say, union
from megatron_eopt.parallel.checksum import checksum
from megatron_eopt.parallel.collectives import total
from megatron_eopt.redirect import Original, around


@around
def checked_save(save: Original, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``dist_checkpointing.save``: our checkpoints get checksums."""
    if any(each[BLOCK]["checksums"] for each in holding(sharded_state_dict, BLOCK)):
        sharded_state_dict[CHECKSUMS] = checksums(sharded_tensors(sharded_state_dict))
    return save(sharded_state_dict, *args, **kwargs)


def compare_sums(saved: Sums, stored: Stored, requested: Any, loaded: dict[str, Any], folder: str) -> None:
    """Refuse loaded tensors that are not what was saved, on all ranks together."""
    sums = checksums(t for t in loaded_tensors(requested, loaded) if _is_as_stored(t, stored))
    without = sorted(sums.keys() - saved.keys())
    if without:
        say(
            f"warning: {len(without)} tensors have no checksum in the checkpoint, such as {without[0]}: nothing says "
            f"whether they are what was saved, which is right for quantized parameters alone"
        )
    changed = []
    for key in sorted(sums.keys() & saved.keys()):
        value, entries = sums[key]
        value_saved, entries_saved = saved[key]
        # of a vocabulary with another padding, another number of entries was loaded
        if entries == entries_saved and value != value_saved:
            changed.append(key)
    if changed:
        raise CheckpointError(
            f"{folder}: {len(changed)} tensors are not what was saved, such as {changed[0]}: their bytes have changed "
            f"since. megatron-eopt verify-checkpoint says where; load another checkpoint, or a good copy of this one"
        )


def _is_as_stored(tensor: ShardedTensor, stored: Stored) -> bool:
    """Whether a loaded tensor has the stored shape and dtype."""
    if stored.shapes.get(tensor.key) != tuple(tensor.global_shape):
        return False
    return stored.dtypes[tensor.key] == tensor.dtype


def checksums(tensors: Iterable[ShardedTensor]) -> Sums:
    """Checksums of all global tensors; all ranks call it together."""
    sums: dict[str, Tensor] = {}
    entries = Counter[str]()
    for tensor in tensors:
        # a quantized tensor has no bits of its own to look at
        if is_main_replica(tensor.replica_id) and type(tensor.data) in (torch.Tensor, torch.nn.Parameter):
            shard = checksum(tensor.data, tensor.global_offset, tensor.global_shape)
            sums[tensor.key] = sums[tensor.key] + shard if tensor.key in sums else shard
            entries[tensor.key] += tensor.data.numel()
    keys = union(sums)
    here = torch.tensor([[int(sums.get(key, 0)), entries[key]] for key in keys], dtype=torch.int64)
    assert dist.group.WORLD is not None, "checkpoints are saved and loaded by ranks"
    totals = total(here, dist.group.WORLD).tolist()  # which are taken modulo 2^64, as those of shards
    return {key: (value % 2**64, count) for key, (value, count) in zip(keys, totals, strict=True)}


def loaded_tensors(requested: Any, loaded: Any) -> Iterator[ShardedTensor]:
    """What was ``loaded`` for a request, with its global offsets."""
    if isinstance(requested, ShardedTensor):
        yield replace(requested, data=loaded, dtype=loaded.dtype)
    elif isinstance(requested, ShardedTensorFactory):
        yield from sharded_tensors([replace(requested, data=loaded)])
    elif isinstance(requested, Mapping):
        for key in requested.keys() & loaded.keys():
            yield from loaded_tensors(requested[key], loaded[key])
    elif isinstance(requested, list) and requested:
        # Megatron leaves out of a list what has no tensor
        filled = [value for value in requested if not isinstance(value, list | dict) or value]
        for value, found in zip(filled, loaded if filled else [], strict=True):
            yield from loaded_tensors(value, found)
