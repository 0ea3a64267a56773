"""Let all ranks of a job exchange something, and time it: before a long run, and under torchrun as it is.

A rank without a GPU ends all, but with --cpu, and so does one that cannot be reached in ten minutes.
"""

import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

MEBIBYTES = 64


def main() -> None:
    """Sum a number, then a buffer, over all ranks."""
    gpu = "--cpu" not in sys.argv[1:]
    if gpu and not torch.cuda.is_available():
        raise SystemExit(f"{socket.gethostname()}: torch {torch.__version__} finds no GPU")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=10))
    ranks = dist.get_world_size()
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    if one.item() != ranks:
        raise RuntimeError(f"{ranks} ranks of one each sum up to {one.item()}: an exchange loses something")
    buffer = torch.zeros(MEBIBYTES * 2**18, device=device)
    dist.all_reduce(buffer)  # makes its connections
    start = time.perf_counter()
    dist.all_reduce(buffer)
    buffer[0].item()  # waits for it
    seconds = time.perf_counter() - start
    if dist.get_rank() == 0:
        sent = 2 * (ranks - 1) / ranks * buffer.nbytes / seconds / 1e9
        print(f"{ranks} ranks: {MEBIBYTES} MiB are summed in {seconds * 1e3:.1f} ms, {sent:.1f} GB/s of a rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
