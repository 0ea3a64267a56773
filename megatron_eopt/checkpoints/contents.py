"""Metadata of torch_dist checkpoints, read without running their code.

A checkpoint is a folder of ``.distcp`` files. Each is a sequence of archives that ``torch.save`` wrote, one for each
chunk of a tensor and one for each object; ``.metadata`` names them with their positions. Megatron writes
``metadata.json`` last. What is neither tensor nor per-rank object, the *common state* (arguments, iteration, parameter
groups), is the object ``common_state/shard_0_1`` from 0.19 on and the file ``common.pt`` before.

All but ``metadata.json`` are pickles, which are loaded by ``gate.py``. A class of a Megatron that is not imported
becomes a stand-in. Whatever is read of a checkpoint is read by :func:`read_file`.
"""

import argparse
import io
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron_eopt.checkpoints.gate import load_pickle, load_saved

METADATA = ".metadata"
FORMAT_FILE = "metadata.json"
COMMON_FILE = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
TRACKER = "latest_checkpointed_iteration.txt"
EXTRA_STATE = "_extra_state"  # in the keys of what modules keep beside their tensors
_TEXT = 2**16  # bytes that are read of a text, which has some hundred
_MOST = 2**32  # bytes of a pickle; metadata of a hundred thousand chunks have some ten million
_WIDEST = 16  # bytes of an entry


class CheckpointError(ValueError):
    """A checkpoint that cannot be read."""


class SavedChunk(NamedTuple):
    """A rectangle of a tensor, or an object."""

    offsets: tuple[int, ...]  # empty for an object
    sizes: tuple[int, ...]
    file: str
    start: int  # byte at which its archive begins
    length: int  # of the archive in bytes


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor and its chunks."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[SavedChunk, ...]

    @property
    def entries(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Contents:
    """The metadata of a checkpoint."""

    folder: Path  # the checkpoint's own, as iter_0000100
    tensors: dict[str, StoredTensor]
    blobs: dict[str, SavedChunk]  # the objects; of these only the common state is read
    common: dict[str, Any]

    def chunks(self) -> list[tuple[str, SavedChunk]]:
        """Chunks of tensors, and objects, with their keys."""
        of_tensors = [(key, chunk) for key, tensor in self.tensors.items() for chunk in tensor.chunks]
        return [*of_tensors, *self.blobs.items()]

    @property
    def args(self) -> dict[str, Any]:
        """Megatron's arguments; empty where they were not saved."""
        saved = self.common.get("args")
        return vars(saved) if isinstance(saved, argparse.Namespace) else {}

    @property
    def iteration(self) -> int | None:
        """The iteration after which it was saved, if known."""
        iteration = self.common.get("iteration")
        return iteration if isinstance(iteration, int) else None


def read_file(path: Path, start: int = 0, length: int | None = None, most: int = _MOST) -> bytes:
    """Bytes of a regular file; a pipe would let its reader wait for ever, and a huge file fill the memory."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, or no regular file")
    if length is None:
        length = path.stat().st_size
    if length > most:
        raise CheckpointError(f"{length:,} bytes of {path} are to be read, and at most {most:,} are")
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)


def read_text(path: Path) -> str:
    """The beginning of a text, without white space around it."""
    return read_file(path, length=_TEXT).decode(errors="replace").strip()


def read_blob(folder: Path, blob: SavedChunk) -> io.BytesIO:
    """The bytes of an archive."""
    return io.BytesIO(read_file(folder / blob.file, blob.start, blob.length, _MOST + _WIDEST * math.prod(blob.sizes)))


def newest(folder: Path) -> Path:
    """The checkpoint that Megatron would load; the folder itself if no run has saved in it."""
    tracker = folder / TRACKER
    if not tracker.exists():
        return folder
    word = read_text(tracker)
    path = folder / (word if word == "release" else f"iter_{word:0>7}")
    if not path.is_dir():
        raise CheckpointError(
            f"{tracker} says {word!r}, and no such checkpoint is there: write the number of another iteration into it"
        )
    return path


def read_contents(folder: Path) -> Contents:
    """Read a checkpoint's metadata, or raise a :class:`CheckpointError`."""
    try:
        backend = json.loads(read_text(folder / FORMAT_FILE))["sharded_backend"]
    except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
        raise CheckpointError(
            f"{folder}: {FORMAT_FILE} cannot be read ({error}), which Megatron writes last: the save did not finish, "
            f"or it is no torch_dist checkpoint. Take the checkpoint before it, or name one"
        ) from error
    if backend != "torch_dist":
        raise CheckpointError(f"{folder} is in the format {backend!r}, and only torch_dist is read here")
    contents = read_layout(folder)
    key = COMMON_KEY
    older = folder / COMMON_FILE
    if older.exists():
        key = COMMON_FILE
        contents.blobs[key] = SavedChunk((), (), COMMON_FILE, 0, older.stat().st_size)
    try:
        common = load_saved(read_blob(folder, contents.blobs[key]))
        if isinstance(common, list):  # by a key of several
            (common,) = common
        return replace(contents, common={**common})
    except Exception as error:  # a damaged archive raises anything
        raise CheckpointError(
            f"{folder}: the common state (arguments, iteration, parameter groups) {reason(error)}. Megatron cannot "
            f"load this checkpoint: take another checkpoint, or a copy"
        ) from error


def read_layout(folder: Path) -> Contents:
    """What ``.metadata`` says, without the common state."""
    tensors = {}
    blobs = {}
    path = folder / METADATA
    try:
        stored = load_metadata(path)
        for key, entry in stored.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                chunks = tuple(_chunk(stored, key, chunk.offsets, chunk.sizes) for chunk in entry.chunks)
                tensors[key] = StoredTensor(key, tuple(entry.size), entry.properties.dtype, chunks)
            else:
                blobs[key] = _chunk(stored, key)
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"{path} {reason(error)}. Without it no data can be found: take another checkpoint, or a copy of this file"
        ) from error
    return Contents(folder, tensors, blobs, {})


def load_metadata(path: Path) -> Metadata:
    """Where the data of a checkpoint are."""
    found: Metadata = load_pickle(read_file(path))
    vars(found).pop("all_local_plans", None)  # Megatron's, which plans anew without
    return found


def reason(error: Exception) -> str:
    """Why a pickle cannot be loaded, and what to do."""
    said = str(error).rpartition("WeightsUnpickler error: ")[2]
    if named := re.search(r"GLOBAL (\S+)", said):
        return (
            f"names {named[1]}, which a load would call. Load a checkpoint only from where you would run a program. "
            f"If you know what it does: --trust-checkpoint-globals {named[1]}"
        )
    return f"cannot be loaded ({type(error).__name__}: {said.partition(chr(10))[0]})"


def _chunk(stored: Metadata, key: str, offsets: torch.Size | None = None, sizes: Iterable[int] = ()) -> SavedChunk:
    at = stored.storage_data[MetadataIndex(key, offsets)]
    if at.transform_descriptors:
        raise ValueError(f"{key} is stored through {', '.join(at.transform_descriptors)}, which Megatron never does")
    return SavedChunk(tuple(offsets or ()), tuple(sizes), at.relative_path, at.offset, at.length)
