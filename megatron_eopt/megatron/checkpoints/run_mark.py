"""The mark of a run in its folder of ``--save``, by which a second run is noticed."""

import atexit
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_eopt.checkpoints.contents import TRACKER
from megatron_eopt.megatron.agreement import distinct, on_all_ranks, say
from megatron_eopt.redirect import Original, around

FILE = "megatron_eopt_run.txt"


class Process(NamedTuple):
    """What identifies a process, in the words of a mark."""

    boot: str  # of the machine
    namespace: str  # in which the process has its number
    number: str
    started: str


class RunMark:
    """A run's mark, made by all ranks, written by one.

    A ValueError refuses the run beside one that is certainly alive: its process is on this machine, or it wrote its
    mark again. A warning names one that may be alive.
    """

    def __init__(self, args: Any) -> None:
        save = getattr(args, "save", None) or ""
        load = getattr(args, "load", None) or ""
        # of all ranks: a restart within the same processes may number them anew
        self._of_run = distinct(process(os.getpid()) if save else None)
        self._own = self._of_run[0]
        self._file: Path | None = None
        self._replaced: dict[tuple[str, ...], str] = {}  # process -> words, of marks that this run has replaced
        if save and "://" not in save and self._own is not None and dist.get_rank() == 0:
            self._file = Path(save, FILE)
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
        on_all_ranks(lambda: self._write(self._file, self._own) if self._file and self._own else None)

    def _write(self, file: Path, own: Process) -> None:
        found = _read(file).split(maxsplit=4)
        other = tuple(found[:4])
        words = found[4] if len(found) > 4 else ""
        if words and other not in self._of_run:
            written_again = self._replaced.get(other, words) != words
            if written_again or process(found[2]) == other:
                raise ValueError(
                    f"another run saves to {file.parent}: {words}. The two would overwrite each other's checkpoints: "
                    f"name another folder with --save, or end that process; if it no longer trains, delete {file}"
                )
            if other[:2] != own[:2]:  # else it was on this machine, and has ended
                say(
                    f"warning: another run saved to {file.parent}: {words}. Whether it is alive cannot be seen from "
                    f"here; if it is, end one of the two: they would overwrite each other's checkpoints"
                )
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{' '.join(own)} process {os.getpid()} on {os.uname().nodename}, at {at}")
            self._replaced[other] = words
        except OSError as error:
            say(f"warning: another run that saves to {file.parent} would not be noticed: {error}")

    def _remove(self) -> None:
        if self._file and tuple(_read(self._file).split()[:4]) == process(os.getpid()):
            self._file.unlink()


@around
def marked_save(save: Original, iteration: int, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``save_checkpoint``: our runs renew their mark."""
    if hasattr(optimizer, "megatron_eopt"):
        optimizer.megatron_eopt.mark.write()
    return save(iteration, model, optimizer, *args, **kwargs)


def process(number: int | str) -> Process | None:
    """The process with a number on this machine; None if it has ended."""
    fields = _read(Path(f"/proc/{number}/stat")).rpartition(")")[2].split()  # from the third on
    if not fields or fields[0] in "ZX":  # a zombie, or dead
        return None
    boot = _read(Path("/proc/sys/kernel/random/boot_id")).strip() or "?"
    namespace = Path("/proc/self/ns/pid").resolve().name
    return Process(boot, namespace, str(number), started=fields[19])


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
