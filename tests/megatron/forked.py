"""Programs on forks of a process that has imported Megatron: it takes longer than the runs do.

For each line of standard input, a JSON object with ``program``, ``ranks``, ``arguments``, ``environment``,
``directory``, ``output`` and ``seconds``, it forks one process for each rank, waits for them, and prints the exit
status: 0, or that of the first that failed, after which the others are ended soon. Every rank has a process group of
its own, of which nothing is left.
"""

import argparse
import atexit
import contextlib
import faulthandler
import functools
import gc
import json
import math
import os
import runpy
import signal
import sys
import threading
import time

import megatron.core.models.mimo
import megatron.core.tokenizers.text  # which imports transformers where they are installed
import megatron.training.training  # noqa: F401
import torch._dynamo
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

# Megatron would start a new interpreter for it, and import all once more, in every run that saves.
_write_results_queue = filesystem_async.get_write_results_queue
filesystem_async.get_write_results_queue = lambda mp_mode=None: _write_results_queue("fork")

# Every run reads the source of Megatron's configurations, twice, for what its flags say of themselves.
_docstrings = functools.cache(functools.partial(ArgumentGroupFactory._get_field_docstrings, ArgumentGroupFactory))
ArgumentGroupFactory._get_field_docstrings = staticmethod(_docstrings)


GRACE = 5  # seconds: a rank whose peer is gone ends by itself in less


def rank_of(run, rank):
    os.setsid()
    signal.alarm(run["seconds"])  # what hangs ends
    output = os.open(run["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.enable()  # what ends by a signal says where
    os.chdir(run["directory"])
    os.environ.update(run["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv[1:] = run["arguments"]
    runpy.run_path(run["program"], run_name="__main__")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # a rank that leaves closes connections that others still read


def status_of(run, rank):
    """The exit status of one rank's program, whose error goes where the interpreter would write it."""
    try:
        rank_of(run, rank)
    except SystemExit as done:
        if done.code is None or isinstance(done.code, int):
            return done.code or 0
        print(done.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def wait_for(children):
    """The exit status of the first that fails, or 0; the others get some time to end by themselves, and to say why."""
    failed, until = 0, math.inf
    running = set(children)
    while running:
        child, status = os.waitpid(-1, os.WNOHANG if failed else 0)
        if child == 0:
            if time.monotonic() > until:
                for other in running:
                    os.kill(other, signal.SIGTERM)
                until = math.inf
            time.sleep(0.05)
        running.discard(child)
        if status and not failed:
            failed, until = os.waitstatus_to_exitcode(status), time.monotonic() + GRACE
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return failed


def leave(status):
    """End this process as the interpreter would, but free nothing.

    What it shares with others would be copied. Threads of gloo that still run when C++ destroys them abort the process,
    which then has another status than its error.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main():
    add_megatron_arguments(argparse.ArgumentParser())
    gc.collect()
    gc.freeze()  # a collection would write to all objects that were imported, and so copy them
    for line in sys.stdin:
        run = json.loads(line)
        children = []
        for rank in range(run["ranks"]):
            child = os.fork()
            if child == 0:
                leave(status_of(run, rank))
            children.append(child)
        print(wait_for(children), flush=True)


if __name__ == "__main__":
    main()
