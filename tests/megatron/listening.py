"""A rank that says where it, and the processes that it comes from, listen: run by test_loopback.py."""

import os
import sys

import psutil
import torch


def listeners(until):
    """The addresses on which this process and its ancestors up to ``until`` listen."""
    process, found = psutil.Process(), []
    while True:
        connections = process.net_connections("inet")
        found += [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN]
        if process.pid in (until, 1):
            return sorted(found)
        process = process.parent()


def main(backend, until):
    torch.distributed.init_process_group(backend)
    torch.distributed.all_reduce(torch.ones(1))
    # at once, as print would not: the ranks write into one pipe
    os.write(sys.stdout.fileno(), f"listens on {' '.join(listeners(until))}\n".encode())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
