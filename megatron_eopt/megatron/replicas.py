"""Whether ranks that hold the same parameters hold the same values."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megatron_eopt.optimizers.nonfinite import to_host
from megatron_eopt.parallel.attributes import is_replicated
from megatron_eopt.parallel.checksum import INTEGERS, checksum

EVERY = 100  # steps: so often data-parallel ranks are compared
_DELAY = 2  # steps: by then the result is on the host


class _Comparison(NamedTuple):
    """Sums of one group's parameters, on their way to the host."""

    ranks: str  # in words
    names: list[str]
    extremes: Callable[[], Tensor]  # the least of all ranks' sums, and of their complements; (2, parameters)

    def different(self) -> list[str]:
        """Names of the parameters whose sums are not the same on all ranks."""
        least, complement = self.extremes()
        return list(itertools.compress(self.names, (least != ~complement).tolist()))


def check_replicas(model_chunks: Sequence[Any], *groups: ProcessGroup | None) -> Callable[[], None]:
    """A check that data-parallel ranks hold the same parameters.

    All ranks call it before each step. The first step waits for checksums to be compared. Before every :data:`EVERY`-th
    step, sums of bits are compared, and read :data:`_DELAY` steps later, so that nothing waits. ``groups`` are the
    data-parallel groups, dense and of experts, then the tensor-parallel ones, over which whole parameters are compared
    in the first step. A RuntimeError on all ranks of a group names a parameter that differs.
    """
    steps = itertools.count()
    begun = list[_Comparison]()

    def check() -> None:
        step = next(steps)
        if step % EVERY == 0:
            begun[:] = _compared(model_chunks, groups, quickly=step > 0)
        if step > 0 and step % EVERY != _DELAY:
            return
        for comparison in begun:
            different = comparison.different()
            if different:
                raise RuntimeError(
                    f"{len(different)} of {len(comparison.names)} parameters differ between {comparison.ranks} ranks, "
                    f"such as {different[0]}: the ranks would train different models. Found after {step} steps. Load a "
                    f"good checkpoint (verify-checkpoint), and look for what makes ranks start differently (seeds, "
                    f"--data-parallel-random-init), or else compute differently (with --use-distributed-optimizer one "
                    f"computes for all); --no-check-replicas leaves this check out"
                )

    return check


def _compared(
    model_chunks: Sequence[Any], groups: Sequence[ProcessGroup | None], quickly: bool
) -> Iterator[_Comparison]:
    dense, experts = _parameters(model_chunks)
    compared = [("data-parallel", dense), ("data-parallel", experts)]
    if not quickly:
        compared += [("tensor-parallel", _whole(dense)), ("tensor-parallel", _whole(experts))]
    for group, (ranks, named) in zip(groups, compared, strict=False):
        if group is None or group.size() == 1 or not named:
            continue
        sums = []
        for parameter in named.values():
            bits = parameter.detach().view(INTEGERS[parameter.element_size()])
            sums.append(bits.sum(dtype=torch.int64) if quickly else checksum(bits, [0] * bits.ndim, bits.shape))
        of_rank = torch.stack(sums)
        extremes = torch.stack([of_rank, ~of_rank])  # the largest is the complement of the least complement
        dist.all_reduce(extremes, dist.ReduceOp.MIN, group=group)
        yield _Comparison(ranks, list(named), to_host(extremes, extremes.device))


def _parameters(model_chunks: Sequence[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Dense ones and those of experts, by name."""
    dense: dict[str, Tensor] = {}
    experts: dict[str, Tensor] = {}
    for number, chunk in enumerate(model_chunks):
        for name, parameter in chunk.named_parameters():
            if isinstance(parameter, DTensor):  # of torch FSDP2: each rank has another shard
                continue
            full_name = f"{number}.{name}" if len(model_chunks) > 1 else name
            of_kind = dense if getattr(parameter, "allreduce", True) else experts
            of_kind[full_name] = parameter
    return dense, experts


def _whole(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those that every tensor-parallel rank has whole."""
    return {name: parameter for name, parameter in named.items() if is_replicated(parameter)}
