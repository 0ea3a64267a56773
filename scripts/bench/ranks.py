"""Ranks of one machine over gloo, and steps that are timed on them."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """What a function of rank and number of ranks returns on the first of them, as JSON holds it."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (function, ranks, folder, sys.path, args), nprocs=ranks)
        return json.loads(Path(folder, "found.json").read_text())


def _rank(rank: int, function: Callable[..., Any], ranks: int, folder: str, path: list[str], args: Any) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=20))
    found = function(rank, ranks, *args)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def seconds_in_turns(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank in each round, which makes one step of each; one that plans is before them."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            slowest = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if round_:
                seconds[name].append(slowest.item())
    return seconds
