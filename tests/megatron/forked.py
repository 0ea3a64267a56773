"""Runs of pretrain.py in forks of a process that has imported Megatron: it takes longer than the runs do.

For each line of standard input, a JSON object with ``ranks``, ``arguments``, ``environment``, ``output`` and
``seconds``, it forks one process for each rank, waits for them, and prints the exit status: 0, or that of the first
that failed, after which the others are ended.
"""

import json
import os
import runpy
import signal
import sys
from functools import partial
from pathlib import Path

import megatron.training.training  # noqa: F401
import torch._dynamo  # noqa: F401
from megatron.core.dist_checkpointing.strategies import filesystem_async

# Megatron would start a new interpreter for it, and import all once more, in every run that saves.
filesystem_async.get_write_results_queue = partial(filesystem_async.get_write_results_queue, "fork")


def rank_of(run, rank):
    signal.alarm(run["seconds"])  # what hangs ends
    output = os.open(run["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(run["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv[1:] = run["arguments"]
    runpy.run_path(str(Path(__file__).with_name("pretrain.py")), run_name="__main__")


def wait_for(children):
    """The exit status of the first that fails, or 0."""
    failed = 0
    while children:
        child, status = os.wait()
        children.discard(child)
        if status and not failed:
            failed = os.waitstatus_to_exitcode(status)
            for other in children:
                os.kill(other, signal.SIGTERM)
    return failed


def main():
    for line in sys.stdin:
        run = json.loads(line)
        children = set()
        for rank in range(run["ranks"]):
            child = os.fork()
            if child == 0:
                rank_of(run, rank)
                return
            children.add(child)
        print(wait_for(children), flush=True)


if __name__ == "__main__":
    main()
