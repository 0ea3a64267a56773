"""A mark in ``--save`` by which two runs are noticed."""

import atexit
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_eopt.checkpoints.contents import TRACKER
from megatron_eopt.megatron.agreement import distinct, on_all_ranks, say
from megatron_eopt.redirect import around

FILE = "megatron_eopt_run.txt"


class RunMark:
    """A run's mark, made by all ranks, written by one.

    A ValueError refuses the run beside one that is certainly alive: its process is on this machine, or it wrote its
    mark again. A warning names one that may be alive.
    """

    def __init__(self, args: Any) -> None:
        save, load = (getattr(args, name, None) or "" for name in ("save", "load"))
        # of all ranks: a restart within the same processes may number them anew
        self._own = distinct(process(os.getpid()) if save else ())
        marks = self._own[0] and save and "://" not in save and dist.get_rank() == 0
        self._file = Path(save, FILE) if marks else None
        self._replaced: dict[tuple[str, ...], str] = {}  # process -> words, of marks that this run has replaced
        self.write()
        atexit.register(self._remove)
        last = _read(self._file.parent / TRACKER).strip() if self._file else ""
        if last and os.path.realpath(load) != os.path.realpath(save):
            say(
                f"warning: {save} has checkpoints (the latest: {last}), and this run does not load them: its own will "
                f"mix with them; name another folder with --save, or go on from them with --load {save}"
            )

    def write(self) -> None:
        """Mark the folder, at start and before each save."""
        on_all_ranks(lambda: self._write(self._file) if self._file else None)

    def _write(self, file: Path) -> None:
        *found, words = _read(file).split(maxsplit=4) or [""]
        other = tuple(found)
        if len(other) == 4 and other not in self._own:
            if process(other[2]) == other or self._replaced.get(other, words) != words:
                raise ValueError(
                    f"another run saves to {file.parent}: {words}. The two would overwrite each other's checkpoints: "
                    f"name another folder with --save, or end that process; if it no longer trains, delete {file}"
                )
            if other[:2] != self._own[0][:2]:  # else it was on this machine, and has ended
                say(
                    f"warning: another run saved to {file.parent}: {words}. Whether it is alive cannot be seen from "
                    f"here; if it is, end one of the two: they would overwrite each other's checkpoints"
                )
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{' '.join(self._own[0])} process {os.getpid()} on {os.uname().nodename}, at {at}")
            self._replaced[other] = words
        except OSError as error:
            say(f"warning: another run that saves to {file.parent} would not be noticed: {error}")

    def _remove(self) -> None:
        if self._file and tuple(_read(self._file).split()[:4]) == process(os.getpid()):
            self._file.unlink()


@around
def marked_save(save: Callable[..., Any], iteration: int, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``save_checkpoint``: our runs renew their mark."""
    if hasattr(optimizer, "megatron_eopt"):
        optimizer.megatron_eopt.mark.write()
    return save(iteration, model, optimizer, *args, **kwargs)


def process(pid: int | str) -> tuple[str, ...]:
    """What identifies a process here; empty once it has ended."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    boot = _read(Path("/proc/sys/kernel/random/boot_id")).strip() or "?"
    namespace = Path("/proc/self/ns/pid").resolve().name
    return (boot, namespace, str(pid), fields[19]) if fields and fields[0] not in "ZX" else ()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
