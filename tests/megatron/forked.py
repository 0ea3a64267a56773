"""Programs on forks of a process that has imported Megatron: it takes longer than the runs do.

For each line of standard input, a JSON object with ``program``, ``ranks``, ``arguments``, ``environment``,
``directory``, ``output`` and ``seconds``, it forks one process for each rank, waits for them, and prints the exit
status: 0, or that of the first that failed, after which the others are ended. Every rank has a process group of its
own, of which nothing is left.
"""

import contextlib
import json
import os
import runpy
import signal
import sys

import megatron.training.training  # noqa: F401
import torch._dynamo  # noqa: F401
from megatron.core.dist_checkpointing.strategies import filesystem_async

# Megatron would start a new interpreter for it, and import all once more, in every run that saves.
_write_results_queue = filesystem_async.get_write_results_queue
filesystem_async.get_write_results_queue = lambda mp_mode=None: _write_results_queue("fork")


def rank_of(run, rank):
    os.setsid()
    signal.alarm(run["seconds"])  # what hangs ends
    output = os.open(run["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(run["directory"])
    os.environ.update(run["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv[1:] = run["arguments"]
    runpy.run_path(run["program"], run_name="__main__")


def wait_for(children):
    """The exit status of the first that fails, or 0."""
    failed = 0
    running = set(children)
    while running:
        child, status = os.wait()
        running.discard(child)
        if status and not failed:
            failed = os.waitstatus_to_exitcode(status)
            for other in running:
                os.kill(other, signal.SIGTERM)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return failed


def main():
    for line in sys.stdin:
        run = json.loads(line)
        children = []
        for rank in range(run["ranks"]):
            child = os.fork()
            if child == 0:
                rank_of(run, rank)
                return
            children.append(child)
        print(wait_for(children), flush=True)


if __name__ == "__main__":
    main()
