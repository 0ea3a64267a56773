"""pretrain.py with a fault, in a process that may die of it. Run by test_faults.py, which says what in the environment.

FAULT names a function below, which is installed on rank FAULT_RANK (0 if not set) and strikes in the save of iteration
4. With ``--serve`` as the only argument, it reads runs of one rank from standard input and forks for each, so that
Megatron is imported once.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import ChainedOptimizer
from megatron.training import checkpointing

SAVE = "iter_0000004"
SECONDS = 120  # no run takes that long: what hangs ends by SIGALRM


def die():
    """As where the power fails: this process and those that it started end at once."""
    os.killpg(0, signal.SIGKILL)


def replaced(owner, name):
    """A decorator that puts a function, which gets the real one as its first argument, in the place of a real one."""

    def install(new):
        real = getattr(owner, name)
        setattr(owner, name, functools.wraps(real)(lambda *args, **kwargs: new(real, *args, **kwargs)))

    return install


def begins():
    @replaced(dist_checkpointing, "save")
    def save(real, state_dict, folder, *args, **kwargs):
        return die() if SAVE in str(folder) else real(state_dict, folder, *args, **kwargs)


def data():
    """With the first tensor or object in the file of a rank."""
    _in_writer(lambda stream: (stream.flush(), die()))


def layout():
    """With .metadata, before metadata.json."""

    @replaced(serialization, "save_config")
    def save_config(real, config, folder):
        return die() if SAVE in str(folder) else real(config, folder)


def complete():
    """With metadata.json, before the tracker file."""

    @replaced(serialization, "save_config")
    def save_config(real, config, folder):
        real(config, folder)
        if SAVE in str(folder):
            die()


def tracker():
    """When opening the tracker file has emptied it, before the number is in it."""

    class Files:
        def __getattr__(self, name):
            return getattr(real, name)

        def open(self, path, mode="r"):
            file = real.open(path, mode)
            if mode == "w" and (Path(path).parent / SAVE).exists():
                die()
            return file

    real, checkpointing.maybe_msc = checkpointing.maybe_msc, Files()


def late():
    """The asynchronous writer stops in its work until two more steps have been made."""
    _in_writer(_after_six_steps())


def late_data():
    """The asynchronous writer is killed in its work, and the trainer with it, after two more steps."""
    wait = _after_six_steps()
    _in_writer(lambda stream: (wait(stream), stream.flush(), die()))


def writer():
    """The asynchronous writer alone is killed in its work."""
    _in_writer(lambda stream: os.kill(os.getpid(), signal.SIGKILL))


def nan():
    """One entry of each momentum is not a number, before it is saved."""

    @replaced(dist_checkpointing, "save")
    def save(real, state_dict, folder, *args, **kwargs):
        for value in nested_values(state_dict) if SAVE in str(folder) else ():
            if ".momentum_buffer." in getattr(value, "key", ""):
                value.data.view(-1)[0] = torch.nan
        return real(state_dict, folder, *args, **kwargs)


def _in_writer(strike):
    @replaced(filesystem_async, "_write_item")
    def write_item(real, transforms, stream, *args, **kwargs):
        result = real(transforms, stream, *args, **kwargs)
        if SAVE in stream.name:
            strike(stream)
        return result


def _after_six_steps():
    """What waits, in the writer's process, until the trainer has made its sixth step."""
    made = multiprocessing.get_context("fork").Event()
    steps = []

    @replaced(ChainedOptimizer, "step")
    def step(real, self, *args, **kwargs):
        result = real(self, *args, **kwargs)
        steps.append(result)
        if len(steps) == 6:
            made.set()
        return result

    def wait(stream):
        assert made.wait(timeout=SECONDS)

    return wait


def quick():
    @replaced(filesystem_async, "get_write_results_queue")
    def get_write_results_queue(real, mp_mode=None):
        return real("fork")  # a new interpreter would import Megatron once more in every run that saves


def pretrain():
    quick()
    fault = os.environ.get("FAULT")
    if fault and os.environ["RANK"] == os.environ.get("FAULT_RANK", "0"):
        assert os.getpgrp() != os.getpgid(os.getppid()), "whoever started this would die too"
        globals()[fault]()
    runpy.run_path(str(Path(__file__).with_name("pretrain.py")), run_name="__main__")


def serve():
    """For each line of standard input, a JSON object, run what it says and print the exit status."""
    for line in sys.stdin:
        run = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            signal.alarm(SECONDS)
            for stream in (1, 2):
                os.dup2(os.open(run["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            os.chdir(run["directory"])
            os.environ.update(run["environment"])
            sys.argv[1:] = run["arguments"]
            pretrain()
            return
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        print(status, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        pretrain()
