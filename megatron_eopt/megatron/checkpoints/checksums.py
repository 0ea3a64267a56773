"""Checksums of tensors in checkpoints, and of data-parallel replicas.

torch reads its archives without looking at their CRC, so a byte that changed on a disk would be trained with. Checksums
of global tensors are sums over shards, and can be compared at another number of ranks.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megatron_eopt.checkpoints.sums import Sums
from megatron_eopt.megatron.agreement import union
from megatron_eopt.megatron.checkpoints.sharding import sharded_tensors
from megatron_eopt.optimizers.nonfinite import to_host
from megatron_eopt.parallel.checksum import INTEGERS, checksum
from megatron_eopt.parallel.collectives import total
from megatron_eopt.parallel.layout import is_replicated

_Compared = tuple[str, list[str], Callable[[], Tensor]]  # ranks, names of parameters, minima of sums and complements
EVERY = 100  # steps: so often data-parallel ranks are compared
_DELAY = 2  # steps: by then it is on the host what was found


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
    here = torch.tensor([[int(sums[key]), entries[key]] if key in sums else [0, 0] for key in keys], dtype=torch.int64)
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


def check_replicas(model_chunks: Sequence[Any], *groups: ProcessGroup | None) -> Callable[[], None]:
    """A check that data-parallel ranks hold the same parameters.

    All ranks call it before each step. The first step waits for checksums to be compared. Before every :data:`EVERY`-th
    step, sums of bits are compared, and read :data:`_DELAY` steps later, so that nothing waits. ``groups`` are the
    data-parallel groups, dense and of experts, then the tensor-parallel ones, over which whole parameters are compared
    in the first step. A RuntimeError on all ranks of a group names a parameter that differs.
    """
    steps, begun = itertools.count(), list[_Compared]()

    def check() -> None:
        step = next(steps)
        if step % EVERY == 0:
            begun[:] = _compared(model_chunks, groups, quickly=step > 0)
        for ranks, names, extremes in begun if step == 0 or step % EVERY == _DELAY else []:
            least, complement = extremes()
            different = [name for name, differs in zip(names, (least != ~complement).tolist(), strict=True) if differs]
            if different:
                raise RuntimeError(
                    f"{len(different)} of {len(names)} parameters differ between {ranks} ranks, such as "
                    f"{different[0]}: the ranks would train different models. Found after {step} steps. Load a good "
                    f"checkpoint (verify-checkpoint), and look for what makes ranks start differently (seeds, "
                    f"--data-parallel-random-init), or else compute differently (with --use-distributed-optimizer one "
                    f"computes for all); --no-check-replicas leaves this check out"
                )

    return check


def _compared(model_chunks: Sequence[Any], groups: Sequence[ProcessGroup | None], quickly: bool) -> Iterator[_Compared]:
    parameters: list[dict[str, Tensor]] = [{}, {}, {}, {}]
    for number, chunk in enumerate(model_chunks):
        for name, parameter in chunk.named_parameters():
            if isinstance(parameter, DTensor):  # of torch FSDP2: each rank has another shard
                continue
            of_expert = not getattr(parameter, "allreduce", True)
            called = f"{number}.{name}" if len(model_chunks) > 1 else name
            parameters[of_expert][called] = parameter.detach()
            if not quickly and is_replicated(parameter):
                parameters[2 + of_expert][called] = parameter.detach()
    for index, (group, named) in enumerate(zip(groups, parameters, strict=False)):
        if group is not None and group.size() > 1 and named:
            bits = [p.view(INTEGERS[p.element_size()]) for p in named.values()]
            of_bits = [p.sum(dtype=torch.int64) if quickly else checksum(p, [0] * p.ndim, p.shape) for p in bits]
            sums = torch.stack(of_bits)
            extremes = torch.stack([sums, ~sums])  # the largest is the complement of the least complement
            dist.all_reduce(extremes, dist.ReduceOp.MIN, group=group)
            yield "tensor-parallel" if index > 1 else "data-parallel", list(named), to_host(extremes, extremes.device)
