"""What keeps a run from loading a checkpoint: files and pickles."""

from collections import defaultdict
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_eopt.checkpoints.bounds import open_file
from megatron_eopt.checkpoints.contents import EXTRA_STATE, METADATA, Contents, read_blob, read_layout
from megatron_eopt.checkpoints.gate import Load

_UNKNOWN = "load a checkpoint only from where you would run a program"
_NAMES = "names "
_Faults = defaultdict[str, list[str]]  # what is at fault -> where


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
            continue
        length = path.stat().st_size
        if length < end:
            yield Problem(
                "error",
                f"{name} is truncated: {length:,} bytes, and its last chunk ends at {end:,}",
                "copy it again, or take another checkpoint",
            )


def check_pickles(contents: Contents, trusted: Set[str] = frozenset()) -> Iterator[Problem]:
    """Load all pickles as a run does, and refuse foreign names.

    Names in ``trusted`` pass, with "all" any. Tensors' pickles are left out: torch loads them with ``weights_only``.
    """
    if "all" in trusted:
        return
    found = _Faults(list)
    _look_at_objects(contents, "", found)
    folder = contents.folder
    # torch takes a rank's own metadata where .metadata fails; other packages add archives and checkpoints
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink() and path.is_dir():
            found["is a link to a folder, in which nothing is looked at"].append(name)
        elif path.name == METADATA and path.parent != folder:
            _look_at_objects(read_layout(path.parent), f"{Path(name).parent}/", found)
        elif path.name.endswith(METADATA) and path.name != METADATA:
            with _looking(name, found) as load, open_file(path) as file:
                load.load_bytes(file.read())
        elif path.suffix == ".pt" and name not in contents.foreign:
            with _looking(name, found) as load, open_file(path) as file:
                load.load_saved(file)
    for fault, places in found.items():
        what = f"{places[0]} {fault}"
        if len(places) > 1:
            what = f"{places[0]} and {len(places) - 1:,} more {fault}"
        name = fault.removeprefix(_NAMES)
        if name == fault:
            yield Problem("error", what, _UNKNOWN)
        elif name not in trusted:
            yield Problem(
                "error",
                f"{what}, which a load would call",
                f"{_UNKNOWN}. If you know what it does: --trust-globals {name}, and --trust-checkpoint-globals of a "
                f"run",
            )


def _look_at_objects(contents: Contents, inside: str, found: _Faults) -> None:
    for key, names in contents.foreign.items():
        for name in sorted(names):
            found[f"{_NAMES}{name}"].append(f"{inside}{key}")
    for key, chunk in contents.chunks():
        if key not in contents.foreign and (EXTRA_STATE in key or key in contents.blobs):
            with _looking(f"{inside}{key} in {chunk.file}", found) as load:
                loaded = load.load_saved(read_blob(contents.folder, chunk))
                if EXTRA_STATE in key:
                    load.load_extra_state(loaded)


@contextmanager
def _looking(where: str, found: _Faults) -> Iterator[Load]:
    """Note what a load raises, and the foreign names that it meets."""
    load = Load()
    try:
        yield load
    except Exception as error:  # a damaged pickle raises anything
        found[f"cannot be loaded: {error or type(error).__name__}"].append(where)
    for name in sorted(load.foreign):
        found[f"{_NAMES}{name}"].append(where)
