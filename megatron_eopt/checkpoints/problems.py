"""What is wrong with a checkpoint's files, metadata and tensors.

Every chunk is an archive of ``torch.save``, a zip file with a CRC-32 for each entry. Neither ``torch.load`` nor
distributed checkpointing compare these, so a damaged byte loads as another number.
"""

import bisect
import hashlib
import io
import json
import math
import os
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import torch

from megatron_eopt.checkpoints.archives import open_archive
from megatron_eopt.checkpoints.bounds import (
    METADATA_BYTES,
    OBJECT_BYTES,
    PARTS,
    TEXT_BYTES,
    check_name,
    open_file,
    read_text,
)
from megatron_eopt.checkpoints.contents import (
    EXTRA_STATE,
    INTEGRITY,
    METADATA,
    OWN_FILES,
    TRACKER,
    CheckpointError,
    Chunk,
    Contents,
    StoredTensor,
    newest,
    read_blob,
    read_layout,
)
from megatron_eopt.checkpoints.gate import Load
from megatron_eopt.parallel.checksum import INTEGERS, checksum_of_some

_Box = list[tuple[int, int]]  # (start, stop) along each dimension
BLOCK = 1 << 24  # bytes that a thread reads at a time, a multiple of every entry's size
_DAMAGED = "copy the file again, or take another checkpoint"
_UNKNOWN = "load a checkpoint only from where you would run a program"
_SUMMED = 1 << 18  # entries whose checksum a thread computes at a time: what it needs stays in its cache
_NAMES = "names "
_FOLDER = 0x10  # attribute of an entry in a zip file


class Problem(NamedTuple):
    """One thing that is wrong, and what to do."""

    severity: Literal["error", "warning"]  # error: a run would not load it, or be another run
    what: str
    advice: str


def check_structure(contents: Contents) -> Iterator[Problem]:
    """Check files, tensors' tiling by chunks, and the tracker."""
    yield from check_files(contents)
    for tensor in contents.tensors.values():
        if fault := tiling_fault(tensor.shape, [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]):
            what = f"{tensor.key} {list(tensor.shape)}: {fault}"
            yield Problem("error", what, "the save was wrong: take another checkpoint")
    known = OWN_FILES | {name.split("/")[0] for name in _lengths(contents)}
    for path in sorted(contents.folder.iterdir()):
        if path.name not in known:
            what = f"{path.name} belongs to nothing that the metadata name"
            advice = "a temporary file, or one of a save that was interrupted before this one: delete it"
            yield Problem("warning", what, advice)
    run = contents.folder.resolve().parent
    if (run / TRACKER).is_file():
        try:
            newest(run)
        except CheckpointError as error:
            yield Problem("error", str(error), "a run that loads the folder above would stop")
    elif contents.folder.name == "release" or contents.folder.name.startswith("iter_"):
        what = f"there is no {TRACKER} beside {contents.folder.name}"
        advice = "Megatron would start anew from the folder above: write the iteration into that file"
        yield Problem("warning", what, advice)


def check_files(contents: Contents) -> Iterator[Problem]:
    """Files of the metadata exist and contain their chunks."""
    for name, end in sorted(_lengths(contents).items()):
        path = contents.folder / name
        if not path.is_file():
            yield Problem("error", f"{name} is missing ({end:,} bytes)", "copy it from where it is")
        elif (length := path.stat().st_size) < end:
            what = f"{name} is truncated: {length:,} bytes, and its last chunk ends at {end:,}"
            yield Problem("error", what, "copy it again, or take another checkpoint")


def _lengths(contents: Contents) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for _, chunk in contents.chunks():
        lengths[chunk.file] = max(lengths.get(chunk.file, 0), chunk.start + chunk.length)
    return lengths


def tiling_fault(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Why boxes (offsets, sizes) do not cover ``shape`` exactly once.

    One dimension at a time: between two neighbouring edges of boxes the same boxes cover every position, so each such
    slab is a problem of one dimension less. A regular grid of n chunks costs O(n log n).
    """
    if 0 in shape:
        return None
    intervals = []
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return f"a chunk at {list(offsets)} of size {list(sizes)} has other dimensions"
        if any(o < 0 or s < 0 or o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            return f"a chunk at {list(offsets)} of size {list(sizes)} lies outside of it"
        if math.prod(sizes):
            intervals.append([(o, o + s) for o, s in zip(offsets, sizes, strict=True)])
    return _fault(tuple(shape), intervals, (), [PARTS + 100 * len(intervals)])


def _fault(shape: tuple[int, ...], boxes: list[_Box], at: tuple[int, ...], left: list[int]) -> str | None:
    axis = len(at)
    if not boxes:
        return f"no chunk holds the entry at {[*at, *[0] * (len(shape) - axis)]}"
    if axis == len(shape):
        return None if len(boxes) == 1 else f"{len(boxes)} chunks hold the entry at {list(at)}"
    edges = sorted({0, shape[axis], *(edge for box in boxes for edge in box[axis])})
    slabs: list[list[_Box]] = [[] for _ in pairwise(edges)]
    for box in boxes:
        start, stop = (bisect.bisect_left(edges, edge) for edge in box[axis])
        left[0] -= stop - start
        if left[0] < 0:
            return "its chunks cut each other into too many parts to compare"
        for slab in slabs[start:stop]:
            slab.append(box)
    faults = (_fault(shape, slab, (*at, edge), left) for edge, slab in zip(edges, slabs, strict=False))
    return next(filter(None, faults), None)


@dataclass
class Data:
    """What reading a checkpoint showed."""

    archives: int
    bytes: int
    unchecked: int  # archives that were saved without checksums
    problems: list[Problem] = field(default_factory=list)
    zeros: set[str] = field(default_factory=set)  # keys of tensors that are zero throughout
    # checksums of whole tensors, None where bytes are not in the order of entries; damaged ones are left out
    sums: dict[str, int | None] = field(default_factory=dict)


def check_data(contents: Contents, summed: Collection[str] = ()) -> Data:
    """Read all archives but those in missing or truncated files.

    Of tensors in ``summed`` the checksums are computed.
    """
    folder = contents.folder
    lengths = {name: (folder / name).stat().st_size for name in _lengths(contents) if (folder / name).is_file()}
    work = [(key, x) for key, x in contents.chunks() if lengths.get(x.file, -1) >= x.start + x.length]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        looks = list(pool.map(lambda item: _look(contents, item[0], item[1], item[0] in summed), work))
    data = Data(len(work), sum(chunk.length for _, chunk in work), sum(not look.checked for look in looks))
    of_keys: dict[str, list[_Look]] = defaultdict(list)
    for (key, _), look in zip(work, looks, strict=True):
        of_keys[key].append(look)
    for key, of_key in of_keys.items():
        data.problems += [Problem("error", f"{key} {look.damage}", _DAMAGED) for look in of_key if look.damage]
        counts = {"NaN": sum(look.nan for look in of_key), "infinite": sum(look.infinite for look in of_key)}
        if found := " and ".join(f"{count:,} {kind}" for kind, count in counts.items() if count):
            advice = "the run had diverged, or a kernel failed, before it was saved: take an earlier checkpoint"
            data.problems.append(Problem("error", f"{key} has {found} entries", advice))
        if key in contents.tensors and contents.tensors[key].entries and all(look.zero for look in of_key):
            data.zeros.add(key)
        if key in summed and key in contents.tensors and _is_whole(contents.tensors[key], of_key):
            parts = [look.sum for look in of_key if look.sum is not None]
            data.sums[key] = sum(parts) % 2**64 if len(parts) == len(of_key) else None
    if data.unchecked:
        what = f"{data.unchecked} of {data.archives} archives were saved without checksums: damage would not show"
        data.problems.append(Problem("warning", what, "leave torch.serialization.set_crc32_options as it is"))
    return data


def _is_whole(tensor: StoredTensor, looks: Sequence["_Look"]) -> bool:
    return len(looks) == len(tensor.chunks) and not any(look.damage for look in looks)


@dataclass
class _Look:
    damage: str = ""
    checked: bool = True
    nan: int = 0
    infinite: int = 0
    zero: bool = False
    sum: int | None = None  # of the chunk, in the checksum of its tensor


def _look(contents: Contents, key: str, chunk: Chunk, summed: bool) -> _Look:
    """Read one archive; damage is an answer, not an exception."""
    look, tensor = _Look(), contents.tensors.get(key)
    try:
        with (
            open_file(contents.folder / chunk.file) as file,
            io.BufferedReader(Window(file, chunk.start, chunk.length)) as window,
            open_archive(window) as archive,
        ):
            entries = archive.infolist()
            look.checked = any(entry.CRC for entry in entries)
            if folders := [entry.filename for entry in entries if entry.external_attr & _FOLDER]:
                raise ValueError(f"{folders[0]} is marked as a folder, which torch would read as nothing")
            values = [entry for entry in entries if tensor is not None and "/data/" in entry.filename]
            for entry in entries:
                for _ in _blocks(archive, entry) if entry not in values else ():
                    pass  # zipfile compares the checksum
            if tensor is None:
                return look
            in_order = _check_promise(window, tensor.dtype, chunk.sizes)
            look.zero = True
            total, at = 0, 0
            for entry in values:
                # of a storage that is larger than the tensor only the checksum counts
                whole = entry.file_size == math.prod(chunk.sizes) * tensor.dtype.itemsize
                look.zero = look.zero and whole
                for block in _blocks(archive, entry):
                    if whole:
                        _count(look, torch.frombuffer(block, dtype=tensor.dtype))
                    if whole and in_order and summed:
                        total += _sum(tensor, chunk, block, at)
                        at += len(block) // tensor.dtype.itemsize
            if summed and at == math.prod(chunk.sizes):
                look.sum = total
    except Exception as error:  # a damaged archive raises anything
        damage = f"in {chunk.file} at byte {chunk.start:,} is damaged: {str(error) or type(error).__name__}"
        return _Look(damage, look.checked)
    return look


def _sum(tensor: StoredTensor, chunk: Chunk, block: bytearray, start: int) -> int:
    """What the entries of a chunk from ``start`` on add to its tensor's checksum."""
    total = 0
    entries = torch.frombuffer(block, dtype=INTEGERS[tensor.dtype.itemsize])
    for some in entries.split(_SUMMED):
        total += int(checksum_of_some(some, start, chunk.sizes, chunk.offsets, tensor.shape))
        start += len(some)
    return total


def _check_promise(window: BinaryIO, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Check what an archive says of its tensor; whether its entries are in order."""
    load = Load(location="meta")
    load.load_saved(window)
    if load.foreign:
        raise ValueError(f"its pickle names {min(load.foreign)}")
    window.seek(0)
    with torch.serialization.skip_data():  # as a run reads it, now that its pickle is known to do no harm
        stored = torch.load(window, map_location="cpu", weights_only=True)
    if not isinstance(stored, torch.Tensor):
        raise ValueError(f"it holds a {type(stored).__name__}, not a tensor")
    if (stored.dtype, tuple(stored.shape)) != (dtype, shape):
        raise ValueError(f"it holds {stored.dtype} {list(stored.shape)}, not {dtype} {list(shape)}")
    return stored.is_contiguous() and bool(stored.storage_offset() == 0)


def _count(look: _Look, values: torch.Tensor) -> None:
    values = values.float() if values.dtype.itemsize == 1 else values  # float8 has no reductions
    real = torch.view_as_real(values) if values.is_complex() else values
    low, high = map(float, real.aminmax())  # one pass, in which NaN wins
    look.zero = look.zero and low == high == 0
    if not math.isfinite(low + high):
        look.nan += int(values.isnan().sum())
        look.infinite += int(values.isinf().sum())


def _blocks(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[bytearray]:
    with archive.open(entry) as file:
        while block := file.read(BLOCK):
            yield bytearray(block)


class Window(io.RawIOBase):
    """A range of a file; torch's own seeks wrongly."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        """Always, as ``seekable``."""
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move within the window."""
        self._at = offset + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise OSError(f"seek to {self._at}")
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read at most what is left of the window."""
        size = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._start + self._at)
        read = self._file.readinto(memoryview(buffer)[:size])
        self._at += read
        return read


def check_integrity(folder: Path) -> Iterator[Problem]:
    """Compare files with the SHA-256 that Megatron wrote, if any."""
    path = folder / INTEGRITY
    if not path.exists():
        return
    try:
        written = json.loads(read_text(path, TEXT_BYTES))
        algorithm, files = written.get("algorithm", "sha256"), dict(written["files"])
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError) as error:
        yield Problem("error", f"{INTEGRITY} cannot be read ({error})", _DAMAGED)
        return
    if algorithm != "sha256":
        yield Problem("error", f"{INTEGRITY} has the algorithm {algorithm!r} instead of sha256", "compare by hand")
        return
    for name, expected in files.items():
        try:
            inside = (folder / check_name(name)).resolve().is_relative_to(folder.resolve())
        except (ValueError, OSError, RuntimeError):  # of links that lead to each other
            inside = False
        if not inside:
            yield Problem("error", f"{INTEGRITY} names what is no file of the checkpoint: {name}", _UNKNOWN)
        elif not (folder / name).is_file():
            yield Problem("error", f"{name} is in {INTEGRITY} and missing", "copy it from where it is")
        else:
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    yield Problem("error", f"{name} has another SHA-256 than {INTEGRITY} says", _DAMAGED)


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
        what = f"{places[0]}{f' and {len(places) - 1:,} more' if len(places) > 1 else ''} {fault}"
        name = fault.removeprefix(_NAMES)
        if name == fault:
            yield Problem("error", what, _UNKNOWN)
        elif name not in trusted:
            flags = f"--trust-globals {name}, and --trust-checkpoint-globals of a run"
            yield Problem("error", f"{what}, which a load would call", f"{_UNKNOWN}. If you know what it does: {flags}")


def _faults(contents: Contents) -> Iterator[tuple[str, str]]:
    folder = contents.folder
    yield from ((key, f"{_NAMES}{name}") for key, names in contents.foreign.items() for name in sorted(names))
    for key, chunk in contents.chunks():
        extra_state = EXTRA_STATE in key
        if (key in contents.blobs or extra_state) and key not in contents.foreign:
            yield from _read_faults(f"{key} in {chunk.file}", partial(read_blob, folder, chunk), extra_state)
    # torch takes a rank's own metadata where .metadata fails; other packages add archives and checkpoints
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == METADATA and path.parent != folder:
            inside = read_layout(path.parent)
            yield from _faults(replace(inside, foreign={name: inside.foreign[METADATA]}))
        elif path.is_symlink() and path.is_dir():
            yield name, "is a link to a folder, in which nothing is looked at"
        elif path.name.endswith(METADATA) and path.name != METADATA:
            yield from _read_faults(name, partial(open_file, path, METADATA_BYTES), pickled=True)
        elif name not in contents.foreign and path.suffix == ".pt":
            yield from _read_faults(name, partial(open_file, path, OBJECT_BYTES))


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
    yield from ((where, f"{_NAMES}{name}") for name in sorted(load.foreign))
