"""Start several ranks over gloo on this machine and collect what they return."""

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank, function, world_size, folder, args):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        torch.save(function(rank, world_size, *args), folder / f"{rank}.pt")
        # the others may still read what this rank sent: that is lost where it closes its connections before them
        store.set(f"{rank} is done", "")
        store.wait([f"{each} is done" for each in range(world_size)], timeout)
    finally:
        dist.destroy_process_group()


def run_ranks(function, world_size, *args):
    """Call ``function(rank, world_size, *args)`` on every rank; its results in the order of the ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = (function, world_size, folder, args)
        mp.start_processes(_rank, arguments, nprocs=world_size, start_method="forkserver")
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
