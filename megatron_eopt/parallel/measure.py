"""The rates of a cost model, measured where the plan will run. All ranks of the groups call it together, at start."""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.parallel.cost import DEFAULT_RATES, Rates
from megatron_eopt.parallel.exchange import all_gather, all_reduce, lowest

_ROUNDS = 5
_SENT_BYTES = 2**22


def measured_rates(groups: Mapping[str, ProcessGroup], device: torch.device, dtype: torch.dtype) -> Rates:
    """How fast the slowest rank multiplies, sends and starts a collective: the same figures on every rank.

    Args:
        groups: over which matrices are exchanged; with none, bytes and latency stay those of the default.
        device: of the matrices.
        dtype: of the products.
    """
    rows = 4096 if device.type == "cuda" else 1024
    x = torch.randn(rows, rows, device=device).to(dtype)
    rates = [2 * rows**3 / _seconds(lambda: x @ x, device)]
    for label in sorted(groups):
        group = groups[label]
        sent = torch.zeros(_SENT_BYTES // 4, device=device)
        flag = torch.zeros(1, device=device)
        latency = _seconds(lambda flag=flag, group=group: all_reduce(flag, group).wait(), device)  # type: ignore[misc]
        gathered = _seconds(lambda sent=sent, group=group: all_gather(sent, group).wait(), device)  # type: ignore[misc]
        rates += [(group.size() - 1) * _SENT_BYTES / max(gathered - latency, 1e-9), 1 / latency]
    agreed = torch.tensor(rates, dtype=torch.float64, device=device)
    for label in sorted(groups):
        agreed = lowest(agreed, groups[label])
    flops, *others = agreed.tolist()
    if not others:
        return Rates(flops=flops, bytes=DEFAULT_RATES.bytes, latency=DEFAULT_RATES.latency)
    return Rates(flops=flops, bytes=min(others[::2]), latency=1 / min(others[1::2]))


def _seconds(run: Callable[[], Tensor], device: torch.device) -> float:
    """The median of some runs, after one that does not count."""
    taken = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return sorted(taken[1:])[_ROUNDS // 2]
