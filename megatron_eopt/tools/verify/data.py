"""What is wrong with the tensors of a checkpoint.

Each chunk of a tensor, and each object, is an archive of ``torch.save``: a zip file with a CRC-32 for each entry.
Neither ``torch.load`` nor distributed checkpointing compare these, so a damaged byte loads as another number.
"""

import io
import math
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from megatron_eopt.checkpoints.checksum import checksum
from megatron_eopt.checkpoints.contents import Contents, SavedChunk, StoredTensor, read_blob
from megatron_eopt.checkpoints.faults import Problem
from megatron_eopt.checkpoints.sums import Sums
from megatron_eopt.screen import listed, progress

_THREADS = 4  # each holds an archive and its tensor
_ANOTHER = "take another checkpoint, or a good copy of this one"


def check_tiling(contents: Contents) -> Iterator[Problem]:
    """Check that chunks have as many entries as their tensor, and lie in it."""
    wrong = "the save was wrong: take another checkpoint"
    for tensor in contents.tensors.values():
        entries = 0
        for chunk in tensor.chunks:
            entries += math.prod(chunk.sizes)
            for offset, size, length in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True):
                if not 0 <= offset <= length - size:
                    what = f"a chunk of {tensor.key} {list(tensor.shape)} lies outside of it: {list(chunk.offsets)}"
                    yield Problem("error", what, wrong)
        if entries != tensor.entries:
            yield Problem("error", f"{tensor.key} has {tensor.entries:,} entries, and its chunks {entries:,}", wrong)


def check_sums(contents: Contents, saved: Sums) -> Iterator[Problem]:
    """Check that tensors and their checksums are the same ones."""
    gone = sorted(saved.keys() - contents.tensors.keys())
    if gone:
        yield Problem("error", f"{listed(gone)} is not in it, and has a checksum", _ANOTHER)
    without = sorted(contents.tensors.keys() - saved.keys())
    if saved and without:
        what = f"{listed(without)} has no checksum, and others have: exchanged data would not show"
        yield Problem("warning", what, "right for quantized parameters, and for nothing else")


class _Look(NamedTuple):
    """What one archive holds."""

    fault: str = ""
    is_finite: bool = True
    sum: int = 0  # in the checksum of its tensor


def check_data(contents: Contents, saved: Sums) -> Iterator[Problem]:
    """Load all archives as a run does, and compare tensors with their ``saved`` checksums."""
    work = contents.chunks()
    sizes = [chunk.length for _, chunk in work]
    sums = dict.fromkeys(saved.keys() & contents.tensors.keys(), 0)
    unsound = set[str]()
    with ThreadPoolExecutor(_THREADS) as pool:
        looks = pool.map(lambda item: _look(contents, *item), work)
        read = progress(looks, sizes, f"{contents.folder.name}, {sum(sizes) / 1e9:,.3g} GB")
        for (key, chunk), look in zip(work, read, strict=True):
            if look.fault:
                sums.pop(key, None)  # it is told once
                yield Problem("error", f"{key} in {chunk.file} at byte {chunk.start:,} {look.fault}", _ANOTHER)
            elif key in sums:
                sums[key] += look.sum
            if not look.is_finite:
                unsound.add(key)
    if unsound:
        what = f"{listed(sorted(unsound))} has NaN or infinite entries"
        yield Problem("error", what, "the run had diverged before it was saved: take an earlier checkpoint")
    changed = sorted(key for key, value in sums.items() if value % 2**64 != saved[key][0])
    if changed:
        what = f"{listed(changed)} is not what was saved: its data are of another tensor, place or iteration"
        yield Problem("error", what, _ANOTHER)


def _look(contents: Contents, key: str, chunk: SavedChunk) -> _Look:
    """Load one archive; damage is an answer, not an exception."""
    try:
        archive = read_blob(contents.folder, chunk)
        entries = zipfile.ZipFile(archive)
        if any(entry.CRC for entry in entries.infolist()):  # torch can save without
            damaged = entries.testzip()
            if damaged is not None:
                return _Look(f"is damaged: Bad CRC-32 of {damaged}")
        tensor = contents.tensors.get(key)
        return _Look() if tensor is None else _look_at_values(archive, tensor, chunk)
    except Exception as error:  # a damaged archive raises anything
        return _Look(f"is damaged: {str(error) or type(error).__name__}")


def _look_at_values(archive: io.BytesIO, tensor: StoredTensor, chunk: SavedChunk) -> _Look:
    archive.seek(0)
    stored = torch.load(archive, map_location="cpu", weights_only=True)
    if not isinstance(stored, torch.Tensor):
        return _Look(f"holds a {type(stored).__name__}, not a tensor")
    if (stored.dtype, tuple(stored.shape)) != (tensor.dtype, chunk.sizes):
        return _Look(f"holds {stored.dtype} {list(stored.shape)}, not {tensor.dtype} {list(chunk.sizes)}")
    values = stored.float() if stored.dtype.itemsize == 1 else stored  # torch cannot say it of float8
    return _Look("", bool(values.isfinite().all()), int(checksum(stored, chunk.offsets, tensor.shape)))
