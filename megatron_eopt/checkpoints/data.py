"""What only the data of a checkpoint can say: damaged bytes, NaN and infinity, other shapes than promised.

Every chunk is an archive of ``torch.save``, a zip file with a CRC-32 for each entry. Neither ``torch.load`` nor
distributed checkpointing look at these, so a byte that changed on disk or on the way loads as another number.
"""

import hashlib
import io
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from megatron_eopt.checkpoints.contents import COMMON_FILE, Chunk, Contents, StoredTensor
from megatron_eopt.checkpoints.problems import INTEGRITY, Problem, needed

BLOCK = 1 << 24
"""Bytes read at a time; a multiple of every entry's size. Memory is this times the threads."""

_DAMAGED = "copy the file again, or take another checkpoint"


@dataclass
class Data:
    """What reading a checkpoint showed.

    Attributes:
        problems: in the order of the metadata.
        zeros: keys of tensors all of whose entries are zero.
        archives: how many were read.
        bytes: how many.
        unchecked: archives that were saved without checksums.
    """

    problems: list[Problem] = field(default_factory=list)
    zeros: set[str] = field(default_factory=set)
    archives: int = 0
    bytes: int = 0
    unchecked: int = 0


@dataclass(frozen=True)
class _Seen:
    damage: str = ""
    checked: bool = True
    nan: int = 0
    infinite: int = 0
    zero: bool = False


class Window(io.RawIOBase):
    """The bytes ``[start, start + length)`` of a file, as a file."""

    def __init__(self, file: io.BufferedIOBase, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move, within the window."""
        self._at = offset + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise OSError(f"seek to {self._at}")
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read what is left of the window, at most."""
        size = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._start + self._at)
        read = self._file.readinto(memoryview(buffer)[:size])
        self._at += read
        return read


def check_data(contents: Contents) -> Data:
    """Read all archives of a checkpoint once, in blocks; those in files that are missing or truncated are left out."""
    data, folder = Data(), contents.folder
    work = [(tensor.key, chunk) for tensor in contents.tensors.values() for chunk in tensor.chunks]
    work += contents.blobs.items()
    lengths = {name: (folder / name).stat().st_size for name in needed(contents) if (folder / name).is_file()}
    work = [(key, chunk) for key, chunk in work if lengths.get(chunk.file, -1) >= chunk.start + chunk.length]
    if (folder / COMMON_FILE).is_file():
        size = (folder / COMMON_FILE).stat().st_size
        work.append(("the common state", Chunk((), (), COMMON_FILE, 0, size)))
    seen: dict[str, list[tuple[Chunk, _Seen]]] = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        results = pool.map(lambda each: _look(folder / each[1].file, each[1], contents.tensors.get(each[0])), work)
        for (key, chunk), result in zip(work, results, strict=True):
            seen.setdefault(key, []).append((chunk, result))
            data.archives += 1
            data.bytes += chunk.length
            data.unchecked += not result.checked
    for key, looks in seen.items():
        data.problems += _problems(key, looks)
        if key in contents.tensors and contents.tensors[key].entries and all(look.zero for _, look in looks):
            data.zeros.add(key)
    if data.unchecked:
        what = f"{data.unchecked} of {data.archives} archives were saved without checksums: damage would not show"
        data.problems.append(Problem("warning", what, "leave torch.serialization.set_crc32_options as it is"))
    return data


def check_integrity(folder: Path) -> list[Problem]:
    """Files have the SHA-256 that Megatron wrote down; nothing is checked where it wrote none."""
    path = folder / INTEGRITY
    if not path.is_file():
        return []
    try:
        written = json.loads(path.read_text())
        algorithm, files = written.get("algorithm", "sha256"), dict(written["files"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return [Problem("error", f"{INTEGRITY} cannot be read ({error})", _DAMAGED)]
    if algorithm != "sha256":
        return [Problem("error", f"{INTEGRITY} has the algorithm {algorithm!r} instead of sha256", "compare by hand")]
    problems = []
    for name, expected in files.items():
        if not (folder / name).is_file():
            problems.append(Problem("error", f"{name} is in {INTEGRITY} and missing", "copy it from where it is"))
            continue
        with (folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                problems.append(Problem("error", f"{name} has another SHA-256 than {INTEGRITY} says", _DAMAGED))
    return problems


def _look(path: Path, chunk: Chunk, tensor: StoredTensor | None) -> _Seen:
    """Read one archive; every way in which it can be damaged is an answer, not an exception."""
    try:
        with path.open("rb") as file:
            window = io.BufferedReader(Window(file, chunk.start, chunk.length))
            with zipfile.ZipFile(window) as archive:
                # Without checksums torch writes zero for all of them.
                checked = any(entry.CRC for entry in archive.infolist())
                for entry in archive.infolist():
                    if tensor is None or not _is_data(entry):
                        for _ in _blocks(archive, entry, checked):
                            pass
                if tensor is None:
                    return _Seen(checked=checked)
                return _look_at_tensor(window, archive, chunk, tensor, checked)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, ValueError, OSError, EOFError) as error:
        return _Seen(damage=str(error) or type(error).__name__)


def _look_at_tensor(
    window: IO[bytes], archive: zipfile.ZipFile, chunk: Chunk, tensor: StoredTensor, checked: bool
) -> _Seen:
    window.seek(0)
    with torch.serialization.skip_data():
        stored = torch.load(window, map_location="cpu", weights_only=True)
    if not isinstance(stored, torch.Tensor):
        return _Seen(damage=f"it holds a {type(stored).__name__}, not a tensor", checked=checked)
    if (stored.dtype, tuple(stored.shape)) != (tensor.dtype, chunk.sizes):
        found = f"{stored.dtype} {list(stored.shape)}"
        return _Seen(damage=f"it holds {found}, not {tensor.dtype} {list(chunk.sizes)}", checked=checked)
    nan = infinite = 0
    zero = True
    for entry in filter(_is_data, archive.infolist()):
        # What a storage holds beside the tensor is nobody's, so it is not looked at beyond its checksum.
        whole = entry.file_size == stored.numel() * stored.dtype.itemsize
        zero = zero and whole
        for block in _blocks(archive, entry, checked):
            if whole:
                values = torch.frombuffer(block, dtype=stored.dtype)
                values = values.float() if values.dtype.itemsize == 1 else values  # float8 has no reductions
                real = torch.view_as_real(values) if values.is_complex() else values
                low, high = map(float, real.aminmax())  # one pass, in which NaN wins
                zero = zero and low == high == 0
                if not math.isfinite(low + high):
                    nan += int(values.isnan().sum())
                    infinite += int(values.isinf().sum())
    return _Seen(checked=checked, nan=nan, infinite=infinite, zero=zero)


def _is_data(entry: zipfile.ZipInfo) -> bool:
    return "/data/" in entry.filename


def _blocks(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, checked: bool) -> Iterator[bytearray]:
    if not checked:
        entry.CRC = None  # type: ignore[assignment]  # zipfile then compares none
    with archive.open(entry) as file:
        while block := file.read(BLOCK):
            yield bytearray(block)


def _problems(key: str, looks: list[tuple[Chunk, _Seen]]) -> list[Problem]:
    problems = [
        Problem("error", f"{key} in {chunk.file} at byte {chunk.start:,} is damaged: {look.damage}", _DAMAGED)
        for chunk, look in looks
        if look.damage
    ]
    counts = {"NaN": sum(look.nan for _, look in looks), "infinite": sum(look.infinite for _, look in looks)}
    found = " and ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
    if found:
        advice = "the run had diverged, or a kernel failed, before it was saved: take an earlier checkpoint"
        problems.append(Problem("error", f"{key} has {found} entries", advice))
    return problems
