"""pretrain.py with a fault, in a process that may die of it. Run by test_faults.py, which says what in the environment.

FAULT names a function below, which is installed on rank FAULT_RANK (0 if not set) and strikes in the save of iteration
4.
"""

import functools
import multiprocessing
import os
import resource
import runpy
import signal
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import ChainedOptimizer
from megatron.training import checkpointing

SAVE = "iter_0000004"
SECONDS = 120  # no run takes that long: what hangs ends by SIGALRM


def die():
    """As where the power fails: this process and those that it started end at once."""
    os.killpg(0, signal.SIGKILL)


def replaced(target, name):
    """A decorator that puts a function, which gets the real one as its first argument, in the place of a real one."""

    def install(new):
        real = getattr(target, name)
        setattr(target, name, functools.wraps(real)(lambda *args, **kwargs: new(real, *args, **kwargs)))

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


def full():
    """No file may grow beyond 256 KiB, from the save of iteration 4 on; the asynchronous writer is another process."""

    def limit(*_):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, resource.RLIM_INFINITY))

    @replaced(dist_checkpointing, "save")
    def save(real, state_dict, folder, *args, **kwargs):
        if SAVE in str(folder):
            limit()
        return real(state_dict, folder, *args, **kwargs)

    _in_writer(limit)


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


if __name__ == "__main__":
    fault = os.environ.get("FAULT")
    if fault and os.environ["RANK"] == os.environ.get("FAULT_RANK", "0"):
        assert os.getpgrp() != os.getpgid(os.getppid()), "whoever started this would die too"
        globals()[fault]()
    runpy.run_path(str(Path(__file__).with_name("pretrain.py")), run_name="__main__")
