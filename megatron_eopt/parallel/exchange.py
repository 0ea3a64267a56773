"""The collectives, each counted: tests and benchmarks read :data:`counters`."""

from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.parallel.layout import Layout


@dataclass
class Counters:
    """Collectives of this process since the last :meth:`reset`, by name.

    Attributes:
        calls: how many were made.
        bytes: bytes of the tensors that this rank handed to them.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def count(self, name: str, tensor: Tensor) -> None:
        """Add one call."""
        self.calls[name] += 1
        self.bytes[name] += tensor.numel() * tensor.element_size()

    def reset(self) -> None:
        """Start again from zero."""
        self.calls.clear()
        self.bytes.clear()


counters = Counters()


def gather(shard: Tensor, layout: Layout) -> Tensor:
    """The global matrix of ``layout.shape`` on every rank, from the equal shards of its group."""
    shard = shard.contiguous()
    if not layout.sharded:
        return shard
    counters.count("all_gather", shard)
    rows, cols = shard.shape
    gathered = shard.new_empty(layout.ranks * rows, cols)
    dist.all_gather_into_tensor(gathered, shard, group=layout.group)
    if layout.dim == 0:
        return gathered
    return gathered.view(layout.ranks, rows, cols).transpose(0, 1).reshape(rows, layout.ranks * cols)


def own_shard(matrix: Tensor, layout: Layout) -> Tensor:
    """This rank's shard of a global matrix, contiguous: the inverse of :func:`gather`."""
    if layout.dim is None:
        return matrix
    size = matrix.size(layout.dim) // layout.ranks
    return matrix.narrow(layout.dim, layout.rank * size, size).contiguous()


def all_reduce(x: Tensor, layout: Layout) -> Tensor:
    """Sum over the ranks of a layout; bf16 and fp16 cross in fp32 and come back in their own dtype.

    ``x`` may be written to: it is what is sent, where it is contiguous and needs no wider dtype.
    """
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x.contiguous()
    counters.count("all_reduce", wide)
    dist.all_reduce(wide, group=layout.group)
    return wide.to(x.dtype)
