"""What is wrong with the tensors of a checkpoint.

Every chunk is an archive of ``torch.save``, a zip file with a CRC-32 for each entry. Neither ``torch.load`` nor
distributed checkpointing compare these, so a damaged byte loads as another number.
"""

import io
import math
import os
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_eopt.checkpoints.bounds import open_file
from megatron_eopt.checkpoints.contents import Chunk, Contents, StoredTensor
from megatron_eopt.checkpoints.faults import Problem
from megatron_eopt.checkpoints.sums import Sums
from megatron_eopt.optimizers.nonfinite import listed
from megatron_eopt.parallel.checksum import INTEGERS, checksum_of_some
from megatron_eopt.screen import progress

BLOCK = 1 << 24  # bytes that a thread reads at a time, a multiple of every entry's size
_ANOTHER = "copy the file again, or take another checkpoint"
_SUMMED = 1 << 18  # entries whose checksum a thread computes at a time: what it needs stays in its cache
_FOLDER = 0x10  # attribute of an entry in a zip file


def check_tiling(contents: Contents) -> Iterator[Problem]:
    """Check that chunks have as many entries as their tensor, and lie in it."""
    wrong = "the save was wrong: take another checkpoint"
    for tensor in contents.tensors.values():
        entries = 0
        for chunk in tensor.chunks:
            entries += math.prod(chunk.sizes)
            for offset, size, length in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True):
                if offset + size > length:
                    what = f"a chunk of {tensor.key} {list(tensor.shape)} lies outside of it: {list(chunk.offsets)}"
                    yield Problem("error", what, wrong)
        if entries != tensor.entries:
            yield Problem("error", f"{tensor.key} has {tensor.entries:,} entries, and its chunks {entries:,}", wrong)


@dataclass
class Data:
    """What reading a checkpoint showed."""

    archives: int
    bytes: int
    compared: int = 0  # tensors, with their checksums
    problems: list[Problem] = field(default_factory=list)


@dataclass
class _Look:
    """What one archive holds, or all of one tensor."""

    damages: list[str] = field(default_factory=list)
    checked: bool = True  # whether archives have checksums of their own
    nan: int = 0
    infinite: int = 0
    sum: int | None = 0  # in the checksum of the tensor; None where entries are not stored in order

    def add(self, other: "_Look") -> None:
        """Add another archive of the tensor."""
        self.damages += other.damages
        self.nan += other.nan
        self.infinite += other.infinite
        if self.sum is None or other.sum is None:
            self.sum = None
        else:
            self.sum += other.sum


def check_data(contents: Contents, saved: Sums) -> Data:
    """Read all archives, and compare tensors with their ``saved`` checksums."""
    work = contents.chunks()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        read = pool.map(lambda item: _look(contents, item[0], item[1], item[0] in saved), work)
        sizes = [chunk.length for _, chunk in work]
        looks = list(progress(read, sizes, f"{contents.folder.name}, {sum(sizes) / 1e9:,.3g} GB"))
    data = Data(len(work), sum(sizes))
    of_keys: dict[str, _Look] = {}
    for (key, _), look in zip(work, looks, strict=True):
        of_keys.setdefault(key, _Look()).add(look)
    changed = []
    unordered = []
    for key, look in of_keys.items():
        for damage in look.damages:
            data.problems.append(Problem("error", f"{key} {damage}", _ANOTHER))
        if look.nan or look.infinite:
            data.problems.append(
                Problem(
                    "error",
                    f"{key} has {look.nan:,} NaN and {look.infinite:,} infinite entries",
                    "the run had diverged, or a kernel failed, before it was saved: take an earlier checkpoint",
                )
            )
        if key not in saved or look.damages:
            continue
        if look.sum is None:
            unordered.append(key)
            continue
        data.compared += 1
        if look.sum % 2**64 != saved[key][0]:
            changed.append(key)
    if changed:
        what = f"{listed(changed)} is not what was saved: its data are of another tensor, place or iteration"
        data.problems.append(Problem("error", what, "take another checkpoint, or a good copy of this one"))
    if unordered:
        what = f"{listed(unordered)} is not stored entry by entry, so that its checksum is not compared"
        data.problems.append(Problem("warning", what, "a run compares it when it loads"))
    unchecked = sum(not look.checked for look in looks)
    if unchecked:
        what = f"{unchecked} of {data.archives} archives were saved without checksums: damage would not show"
        data.problems.append(Problem("warning", what, "leave torch.serialization.set_crc32_options as it is"))
    return data


def check_sums(contents: Contents, saved: Sums) -> Iterator[Problem]:
    """Check that tensors and their checksums are the same ones."""
    gone = sorted(saved.keys() - contents.tensors.keys())
    if gone:
        yield Problem(
            "error",
            f"{listed(gone)} is not in it, and has a checksum",
            "take another checkpoint, or a good copy of this one",
        )
    without = sorted(contents.tensors.keys() - saved.keys())
    if saved and without:
        yield Problem(
            "warning",
            f"{listed(without)} has no checksum, and others have: exchanged data would not show",
            "right for quantized parameters, and for nothing else",
        )


def _look(contents: Contents, key: str, chunk: Chunk, summed: bool) -> _Look:
    """Read one archive; damage is an answer, not an exception."""
    look = _Look()
    tensor = contents.tensors.get(key)
    try:
        with (
            open_file(contents.folder / chunk.file, whole=False) as file,
            io.BufferedReader(Window(file, chunk.start, chunk.length)) as window,
            zipfile.ZipFile(window) as archive,
        ):
            look.checked = any(entry.CRC for entry in archive.infolist())
            for entry in archive.infolist():
                if entry.external_attr & _FOLDER:
                    raise ValueError(f"{entry.filename} is marked as a folder, which torch would read as nothing")
                if not look.checked:
                    entry.CRC = None  # type: ignore[assignment]  # else zipfile compares what is not there
                if tensor is None or "/data/" not in entry.filename:
                    for _ in _blocks(archive, entry):
                        pass  # zipfile compares the checksum
                else:
                    _look_at_values(look, tensor, chunk, archive, entry, summed)
            if tensor is not None and not _is_in_order(window, tensor.dtype, chunk.sizes):
                look.sum = None
    except Exception as error:  # a damaged archive raises anything
        damage = f"in {chunk.file} at byte {chunk.start:,} is damaged: {str(error) or type(error).__name__}"
        return _Look([damage], look.checked)
    return look


def _look_at_values(
    look: _Look, tensor: StoredTensor, chunk: Chunk, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, summed: bool
) -> None:
    if entry.file_size != math.prod(chunk.sizes) * tensor.dtype.itemsize:
        look.sum = None  # of a storage that is larger than the tensor only the archive's checksum counts
        for _ in _blocks(archive, entry):
            pass
        return
    total = 0
    start = 0
    for block in _blocks(archive, entry):
        _count(look, torch.frombuffer(block, dtype=tensor.dtype))
        if summed:
            entries = torch.frombuffer(block, dtype=INTEGERS[tensor.dtype.itemsize])
            for some in entries.split(_SUMMED):
                total += int(checksum_of_some(some, start, chunk.sizes, chunk.offsets, tensor.shape))
                start += len(some)
    look.sum = total


def _is_in_order(window: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Check what an archive says of its tensor; whether its entries are in order."""
    window.seek(0)
    with torch.serialization.skip_data():
        stored = torch.load(window, map_location="cpu", weights_only=True)
    if not isinstance(stored, torch.Tensor):
        raise ValueError(f"it holds a {type(stored).__name__}, not a tensor")
    if (stored.dtype, tuple(stored.shape)) != (dtype, shape):
        raise ValueError(f"it holds {stored.dtype} {list(stored.shape)}, not {dtype} {list(shape)}")
    return stored.is_contiguous() and bool(stored.storage_offset() == 0)


def _count(look: _Look, values: torch.Tensor) -> None:
    if values.dtype.itemsize == 1:
        values = values.float()  # float8 has no reductions
    if values.is_complex():
        values = torch.view_as_real(values)
    low, high = values.aminmax()  # one pass, in which NaN wins
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
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

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
