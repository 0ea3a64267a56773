"""Whether what is loaded is what was saved: no harmful pickles, and tensors with their checksums.

torch reads its archives without looking at their CRC, so a byte that changed on a disk would be trained with. Checksums
of global tensors are sums over shards, and can be compared at another number of ranks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_eopt.checkpoints.checksum import checksum
from megatron_eopt.checkpoints.contents import (
    METADATA,
    TRACKER,
    CheckpointError,
    Contents,
    StoredTensor,
    load_metadata,
    newest,
    read_contents,
)
from megatron_eopt.checkpoints.faults import check_extra_states
from megatron_eopt.checkpoints.gate import reading, readings
from megatron_eopt.checkpoints.states import BLOCK, holding
from megatron_eopt.checkpoints.sums import CHECKSUMS, Sums
from megatron_eopt.megatron.checkpoints.keys import sharded_tensors
from megatron_eopt.megatron.consensus import from_rank_0, log_rank0, union
from megatron_eopt.megatron.support.facts import primary_of
from megatron_eopt.parallel.collectives import total
from megatron_eopt.redirect import Original, around
from megatron_eopt.registry import list_optimizers


def _is_our_run(args: Any) -> bool:
    return primary_of(args) in list_optimizers()


def _reading(args: Any) -> AbstractContextManager[None]:
    return reading(*(getattr(args, "trust_checkpoint_globals", None) or "").split(","))


@around
def checked_base(load_base: Original, load_dir: Any, args: Any, rank0: bool = False, *rest: Any, **kwargs: Any) -> Any:
    """Replaces ``_load_base_checkpoint``: refuses pipes, and pickles with foreign names."""
    if not _is_our_run(args):
        return load_base(load_dir, args, rank0, *rest, **kwargs)
    if rank0 and load_dir is not None:
        for folder, step in _loaded(Path(load_dir), args):
            find = partial(refuse_pipes, folder, step)
            from_rank_0(find) if dist.is_initialized() else find()
    try:
        with _reading(args):
            base = load_base(load_dir, args, rank0, *rest, **kwargs)
            check_extra_states(base[0])
    except (CheckpointException, UnpicklingError) as error:  # which names no flag, and seldom a file
        error.add_note(
            f"Where it says GLOBAL NAME, a pickle wants NAME to be called: if you know what that does, pass "
            f"--trust-checkpoint-globals NAME. `megatron-eopt verify-checkpoint {load_dir}` says what is damaged in a "
            f"torch_dist checkpoint, and --ckpt-step loads another one"
        )
        raise
    return base


@around
def gated_metadata(read: Original, reader: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``FileSystemReader.read_metadata``, which unpickles whatever is there."""
    if not readings or not isinstance(reader.path, Path):  # which is of object storage
        return read(reader, *args, **kwargs)
    return load_metadata(reader.path / METADATA)


def _loaded(load_dir: Path, args: Any) -> Iterator[tuple[Path, int | None]]:
    """The folders from which Megatron loads, with the iteration that a flag names."""
    yield load_dir, getattr(args, "ckpt_step", None)
    if getattr(args, "non_persistent_ckpt_type", None) == "global":
        yield Path(args.non_persistent_global_ckpt_dir or load_dir / "non_persistent"), None


def refuse_pipes(folder: Path, step: int | None) -> None:
    """Refuse a checkpoint with a file for whose end a reader would wait for ever."""
    path = resumed(folder, step)
    for file in path.rglob("*") if path is not None else ():
        if file.exists() and not file.is_file() and not file.is_dir():
            raise CheckpointError(f"{file} is no regular file: take another checkpoint, or a copy")


def resumed(folder: Path, step: int | None) -> Path | None:
    """The checkpoint that Megatron will take, if there is one."""
    if step:
        return folder / f"iter_{step:07d}"
    return newest(folder) if (folder / TRACKER).exists() else None


def read_stored(folder: Path) -> Contents:
    """What a checkpoint says that it holds, without where, as sent to all ranks."""
    contents = read_contents(folder)
    tensors = {key: replace(tensor, chunks=()) for key, tensor in contents.tensors.items()}
    common = {key: contents.common.get(key) for key in ("optimizer", CHECKSUMS)}
    return replace(contents, tensors=tensors, blobs={}, common=common)


@around
def checked_save(save: Original, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``dist_checkpointing.save``: our checkpoints get checksums."""
    if any(each[BLOCK]["checksums"] for each in holding(sharded_state_dict, BLOCK)):
        sharded_state_dict[CHECKSUMS] = checksums(sharded_tensors(sharded_state_dict))
    return save(sharded_state_dict, *args, **kwargs)


def compare_sums(
    saved: Sums, stored: Mapping[str, StoredTensor], requested: Any, loaded: dict[str, Any], folder: str
) -> None:
    """Refuse loaded tensors that are not what was saved, on all ranks together."""
    sums = checksums(t for t in loaded_tensors(requested, loaded) if _is_as(t, stored.get(t.key)))
    without = sorted(sums.keys() - saved.keys())
    if without:
        log_rank0(
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


def _is_as(tensor: ShardedTensor, stored: StoredTensor | None) -> bool:
    """Whether a loaded tensor has the stored shape and dtype."""
    return stored is not None and (stored.shape, stored.dtype) == (tuple(tensor.global_shape), tensor.dtype)


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
