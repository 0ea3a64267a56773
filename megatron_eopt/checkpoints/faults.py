"""What keeps a run from loading a checkpoint: files, numbers and pickles."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from megatron_eopt.checkpoints.bounds import open_file
from megatron_eopt.checkpoints.contents import EXTRA_STATE, METADATA, Contents, read_blob, read_layout
from megatron_eopt.checkpoints.gate import Load

_MOST = 2**63  # of which no run comes near
_SAMPLES = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
_UNKNOWN = "load a checkpoint only from where you would run a program"
_NAMES = "names "


class Problem(NamedTuple):
    """One thing that is wrong, and what to do."""

    severity: Literal["error", "warning"]  # error: a run would not load it, or be another run
    what: str
    advice: str


def check_files(contents: Contents) -> Iterator[Problem]:
    """Files of the metadata exist and contain their chunks."""
    ends: dict[str, int] = {}
    for _, chunk in contents.chunks():
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
    for name, end in sorted(ends.items()):
        path = contents.folder / name
        if not path.is_file():
            yield Problem("error", f"{name} is missing ({end:,} bytes)", "copy it from where it is")
        elif (length := path.stat().st_size) < end:
            what = f"{name} is truncated: {length:,} bytes, and its last chunk ends at {end:,}"
            yield Problem("error", what, "copy it again, or take another checkpoint")


def check_counts(contents: Contents) -> Iterator[Problem]:
    """Check how far the run had come: Megatron takes these numbers as they are.

    With an iteration that is NaN it ends at once and well, with a schedule at step NaN it trains on at the rate of the
    end, with the iteration of another checkpoint it counts on from there.
    """
    counts = {"iteration": contents.common.get("iteration", 0)}
    for name in _SAMPLES:
        counts[name] = contents.args.get(name, 0)
    schedule = contents.common.get("opt_param_scheduler") or {}
    counts["num_steps of opt_param_scheduler"] = schedule.get("num_steps", 0)
    for name, value in counts.items():
        if type(value) is not int or not 0 <= value < _MOST:
            what = f"{name} is {str(value)[:100]}, and has to be a whole number from 0 on"
            yield Problem("error", what, "take another checkpoint: a run would go on elsewhere, or not at all")
    named = re.fullmatch(r"iter_(\d+)", contents.folder.absolute().name)
    iteration = contents.iteration
    if named and iteration is not None and int(named[1]) != iteration:
        what = f"it is of iteration {iteration:,}, and its folder is named {named[0]}"
        advice = f"rename it to iter_{iteration:07d} if that is right, and write {iteration} into the tracker file"
        yield Problem("error", what, advice)


def check_pickles(contents: Contents, trusted: Set[str] = frozenset()) -> Iterator[Problem]:
    """Load all pickles as a run does, and refuse foreign names.

    Names in ``trusted`` pass, with "all" any. Tensors' pickles are left out: torch loads them with ``weights_only``.
    """
    if "all" in trusted:
        return
    found: dict[str, list[str]] = defaultdict(list)
    for where, fault in _faults(contents):
        found[fault].append(where)
    for fault, places in found.items():
        more = f" and {len(places) - 1:,} more" if len(places) > 1 else ""
        what = f"{places[0]}{more} {fault}"
        name = fault.removeprefix(_NAMES)
        if name == fault:
            yield Problem("error", what, _UNKNOWN)
        elif name not in trusted:
            flags = f"--trust-globals {name}, and --trust-checkpoint-globals of a run"
            yield Problem("error", f"{what}, which a load would call", f"{_UNKNOWN}. If you know what it does: {flags}")


def _faults(contents: Contents) -> Iterator[tuple[str, str]]:
    folder = contents.folder
    yield from _faults_of_objects(contents, "")
    # torch takes a rank's own metadata where .metadata fails; other packages add archives and checkpoints
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink() and path.is_dir():
            yield name, "is a link to a folder, in which nothing is looked at"
        elif path.name == METADATA and path.parent != folder:
            yield from _faults_of_objects(read_layout(path.parent), f"{Path(name).parent}/")
        elif path.name.endswith(METADATA) and path.name != METADATA:
            yield from _read_faults(name, partial(open_file, path), pickled=True)
        elif path.suffix == ".pt" and name not in contents.foreign:
            yield from _read_faults(name, partial(open_file, path))


def _faults_of_objects(contents: Contents, inside: str) -> Iterator[tuple[str, str]]:
    for key, names in contents.foreign.items():
        for name in sorted(names):
            yield f"{inside}{key}", f"{_NAMES}{name}"
    for key, chunk in contents.chunks():
        extra_state = EXTRA_STATE in key
        if key not in contents.foreign and (extra_state or key in contents.blobs):
            where = f"{inside}{key} in {chunk.file}"
            yield from _read_faults(where, partial(read_blob, contents.folder, chunk), extra_state)


def _read_faults(
    where: str, opened: Callable[[], BinaryIO], extra_state: bool = False, pickled: bool = False
) -> Iterator[tuple[str, str]]:
    load = Load()
    try:
        with opened() as file:
            loaded = load.load_bytes(file.read()) if pickled else load.load_saved(file)
            if extra_state:
                load.load_extra_state(loaded)
    except Exception as error:  # a damaged pickle raises anything
        yield where, f"cannot be loaded: {error or type(error).__name__}"
    for name in sorted(load.foreign):
        yield where, f"{_NAMES}{name}"
