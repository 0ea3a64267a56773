"""Whether a checkpoint is whole: its files, its tensors, and that no other run writes there.

torch reads its archives without looking at their CRC, so a byte that changed on a disk would be trained with. Checksums
of global tensors are sums over shards, and can be compared at another number of ranks.
"""

import atexit
import itertools
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from shutil import disk_usage
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from megatron_eopt.checkpoints.bounds import printable, read_text
from megatron_eopt.checkpoints.contents import (
    TRACKER,
    CheckpointError,
    Contents,
    is_legacy,
    newest,
    read_contents,
    read_layout,
)
from megatron_eopt.checkpoints.faults import Problem, check_counts, check_files, check_pickles
from megatron_eopt.checkpoints.sums import Sums
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.agreement import distinct, from_rank_0, on_all_ranks, say, union
from megatron_eopt.megatron.checkpoints.gated import gate_extra_states, is_ours, loading, trusted_by
from megatron_eopt.megatron.checkpoints.sharding import sharded_tensors
from megatron_eopt.optimizers.nonfinite import to_host
from megatron_eopt.parallel.attributes import is_replicated
from megatron_eopt.parallel.checksum import INTEGERS, checksum
from megatron_eopt.parallel.collectives import total
from megatron_eopt.redirect import around

FILE = "megatron_eopt_run.txt"  # the mark of a run in its folder of --save
EVERY = 100  # steps: so often data-parallel ranks are compared
_DELAY = 2  # steps: by then it is on the host what was found
_Compared = tuple[str, list[str], Callable[[], Tensor]]  # ranks, names of parameters, minima of sums and complements

# Reading takes seconds for each hundred thousand chunks: what a run reads before its build is kept until the load.
contents_of = lru_cache(maxsize=1)(read_contents)


@around
def checked_base(
    load_base: Callable[..., Any], load_dir: Any, args: Any, rank0: bool = False, *rest: Any, **kwargs: Any
) -> Any:
    """Replaces ``_load_base_checkpoint``: refuses damage and pickles with foreign names."""
    if not is_ours(args):
        return load_base(load_dir, args, rank0, *rest, **kwargs)
    if rank0 and load_dir is not None:
        folders = [(Path(load_dir), getattr(args, "ckpt_step", None))]
        if getattr(args, "non_persistent_ckpt_type", None) == "global":
            folders.append((Path(args.non_persistent_global_ckpt_dir or Path(load_dir, "non_persistent")), None))
        for folder, step in folders:
            counts = not getattr(args, "finetune", False)  # which starts at iteration 0
            find = partial(damage_of_resumed, folder, step, args.ckpt_format, trusted_by(args).keys(), counts)
            problem = from_rank_0(find) if dist.is_initialized() else find()
            if problem:
                raise CheckpointError(printable(problem))
    with loading(args):
        base = load_base(load_dir, args, rank0, *rest, **kwargs)
        gate_extra_states(base[0])
    return base


@around
def checked_tracker(read_metadata: Callable[..., Any], tracker_filename: str) -> Any:
    """Replaces ``read_metadata``: an empty tracker file means the newest checkpoint."""
    file = Path(tracker_filename)
    iteration = None
    args = releases.training_args()
    if is_ours(args) and args.ckpt_format == "torch_dist" and dist.is_initialized():
        iteration = from_rank_0(lambda: None if read_text(file).strip() else _newest_whole(file.parent))
    if iteration is None:
        return read_metadata(tracker_filename)
    say(
        f"{file} is empty, as a save leaves it that was killed while it wrote there; the newest checkpoint that is "
        f"whole is of iteration {iteration}"
    )
    return iteration, False


def _newest_whole(folder: Path) -> int | None:
    names = [path.name.removeprefix("iter_") for path in folder.glob("iter_*")]
    for step in sorted(map(int, filter(str.isdecimal, names)), reverse=True):
        if damage_of_resumed(folder, step) is None:
            return step
    return None


def resumed(folder: Path, step: int | None) -> Path | None:
    """The checkpoint that Megatron will take, if there is one."""
    if step:
        return folder / f"iter_{step:07d}"
    tracker = folder / TRACKER
    return newest(folder) if tracker.exists() and read_text(tracker).strip() else None


def damage_of(contents: Contents) -> str | None:
    """Why a checkpoint's files are not whole."""
    for fault in check_files(contents):
        return f"{fault.what}. {fault.advice}"
    return None


def damage_of_resumed(
    folder: Path,
    step: int | None,
    ckpt_format: str = "torch_dist",
    trusted: Set[str] = frozenset({"all"}),
    counts: bool = True,
) -> str | None:
    """What is wrong with the files that Megatron will read."""
    try:
        path = resumed(folder, step)
        if path is None or (path.is_dir() and is_legacy(path)):
            return None
        problems: list[Problem] = []
        if ckpt_format == "torch_dist":
            contents = contents_of(path) if dist.is_initialized() else read_contents(path)
            problems += check_files(contents)
            if counts:
                problems += check_counts(contents)
            if not dist.is_initialized():  # Megatron reads arguments only
                contents = replace(contents, blobs={})
        else:
            contents = read_layout(path)
        for problem in problems or check_pickles(contents, trusted):
            return f"{path}: {problem.what}. {problem.advice}"
    except Exception as error:  # what is damaged or hostile raises anything
        return str(error)
    return None


@around
def named_disk(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around saves: name a disk that takes no more."""
    try:
        return save(*args, **kwargs)
    except (Exception, CheckpointException) as error:
        folder = Path(getattr(releases.training_args(), "save", None) or "")
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(2**20))  # writers of Megatron's log their errors, and raise others
        except OSError as full:
            if folder.is_dir():  # and not one that Megatron has by other means
                raise CheckpointError(
                    f"the checkpoint was not written: {full.strerror} in {folder}, where {disk_usage(folder).free:,} "
                    f"bytes are free. Those before it are untouched, and --load takes the newest complete one: make "
                    f"room, or give another folder to --save, and start the run again"
                ) from error
        raise


def checksums(tensors: Iterable[ShardedTensor]) -> Sums:
    """Checksums of all global tensors; all ranks call it together."""
    sums: dict[str, Tensor] = {}
    entries = Counter[str]()
    for tensor in tensors:
        # a quantized tensor has no bits of its own to look at
        if is_main_replica(tensor.replica_id) and type(tensor.data) in (torch.Tensor, torch.nn.Parameter):
            shard = checksum(tensor.data, tensor.global_offset, tensor.global_shape)
            sums[tensor.key] = sums[tensor.key] + shard if tensor.key in sums else shard
            entries[tensor.key] += tensor.data.numel()
    keys = union(sums)
    here = torch.tensor([[int(sums.get(key, 0)), entries[key]] for key in keys], dtype=torch.int64)
    assert dist.group.WORLD is not None, "checkpoints are saved and loaded by ranks"
    totals = total(here, dist.group.WORLD).tolist()  # which are taken modulo 2^64, as those of shards
    return {key: (value % 2**64, count) for key, (value, count) in zip(keys, totals, strict=True)}


def loaded_tensors(requested: Any, loaded: Any) -> Iterator[ShardedTensor]:
    """What was ``loaded`` for a request, with its global offsets."""
    if isinstance(requested, ShardedTensor):
        yield replace(requested, data=loaded, dtype=loaded.dtype)
    elif isinstance(requested, ShardedTensorFactory):
        yield from sharded_tensors([replace(requested, data=loaded)])
    elif isinstance(requested, Mapping):
        for key in requested.keys() & loaded.keys():
            yield from loaded_tensors(requested[key], loaded[key])
    elif isinstance(requested, list) and requested:
        # Megatron leaves out of a list what has no tensor
        filled = [value for value in requested if not isinstance(value, list | dict) or value]
        for value, found in zip(filled, loaded if filled else [], strict=True):
            yield from loaded_tensors(value, found)


def check_replicas(model_chunks: Sequence[Any], *groups: ProcessGroup | None) -> Callable[[], None]:
    """A check that data-parallel ranks hold the same parameters.

    All ranks call it before each step. The first step waits for checksums to be compared. Before every :data:`EVERY`-th
    step, sums of bits are compared, and read :data:`_DELAY` steps later, so that nothing waits. ``groups`` are the
    data-parallel groups, dense and of experts, then the tensor-parallel ones, over which whole parameters are compared
    in the first step. A RuntimeError on all ranks of a group names a parameter that differs.
    """
    steps = itertools.count()
    begun = list[_Compared]()

    def check() -> None:
        step = next(steps)
        if step % EVERY == 0:
            begun[:] = _compared(model_chunks, groups, quickly=step > 0)
        if step > 0 and step % EVERY != _DELAY:
            return
        for ranks, names, extremes in begun:
            least, complement = extremes()
            different = list(itertools.compress(names, (least != ~complement).tolist()))
            if different:
                raise RuntimeError(
                    f"{len(different)} of {len(names)} parameters differ between {ranks} ranks, such as "
                    f"{different[0]}: the ranks would train different models. Found after {step} steps. Load a good "
                    f"checkpoint (verify-checkpoint), and look for what makes ranks start differently (seeds, "
                    f"--data-parallel-random-init), or else compute differently (with --use-distributed-optimizer one "
                    f"computes for all); --no-check-replicas leaves this check out"
                )

    return check


def _compared(model_chunks: Sequence[Any], groups: Sequence[ProcessGroup | None], quickly: bool) -> Iterator[_Compared]:
    parameters: list[dict[str, Tensor]] = [{}, {}, {}, {}]
    for number, chunk in enumerate(model_chunks):
        for name, parameter in chunk.named_parameters():
            if isinstance(parameter, DTensor):  # of torch FSDP2: each rank has another shard
                continue
            of_expert = not getattr(parameter, "allreduce", True)
            full_name = f"{number}.{name}" if len(model_chunks) > 1 else name
            parameters[of_expert][full_name] = parameter.detach()
            if not quickly and is_replicated(parameter):
                parameters[2 + of_expert][full_name] = parameter.detach()
    for index, (group, named) in enumerate(zip(groups, parameters, strict=False)):
        if group is not None and group.size() > 1 and named:
            bits = [p.view(INTEGERS[p.element_size()]) for p in named.values()]
            of_bits = [p.sum(dtype=torch.int64) if quickly else checksum(p, [0] * p.ndim, p.shape) for p in bits]
            sums = torch.stack(of_bits)
            extremes = torch.stack([sums, ~sums])  # the largest is the complement of the least complement
            dist.all_reduce(extremes, dist.ReduceOp.MIN, group=group)
            yield "tensor-parallel" if index > 1 else "data-parallel", list(named), to_host(extremes, extremes.device)


class RunMark:
    """A run's mark, made by all ranks, written by one.

    A ValueError refuses the run beside one that is certainly alive: its process is on this machine, or it wrote its
    mark again. A warning names one that may be alive.
    """

    def __init__(self, args: Any) -> None:
        save = getattr(args, "save", None) or ""
        load = getattr(args, "load", None) or ""
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
        found = _read(file).split(maxsplit=4)
        other = tuple(found[:4])
        words = "".join(found[4:])
        if words and other not in self._own:
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
