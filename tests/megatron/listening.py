"""A rank that says where it, and the processes that it comes from, listen: run by test_loopback.py."""

import ipaddress
import os
import sys
from pathlib import Path

import torch


def listeners(until):
    """The addresses on which this process and its ancestors up to ``until`` listen, by inode of the socket."""
    of_inode = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A":
                raw = bytes.fromhex(local.partition(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]  # each of them is little-endian
                of_inode[inode] = str(ipaddress.ip_address(b"".join(words)))
    found, process = [], os.getpid()
    while True:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            try:
                kind, _, inode = os.readlink(descriptor).partition(":")
            except FileNotFoundError:  # of the listing itself
                continue
            if kind == "socket" and inode.strip("[]") in of_inode:
                found.append(of_inode[inode.strip("[]")])
        if process in (until, 1):
            return sorted(found)
        status = Path(f"/proc/{process}/status").read_text()
        process = int(status.partition("PPid:")[2].split()[0])


def main(backend, until):
    torch.distributed.init_process_group(backend)
    torch.distributed.all_reduce(torch.ones(1))
    # at once, as print would not: the ranks write into one pipe
    os.write(sys.stdout.fileno(), f"listens on {' '.join(listeners(until))}\n".encode())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
