"""Metadata of torch_dist checkpoints, read without running their code.

A checkpoint is a folder of ``.distcp`` files. Each is a sequence of archives that ``torch.save`` wrote, one for each
chunk of a tensor and one for each object; ``.metadata`` names them with their positions. Megatron writes
``metadata.json`` last. What is neither tensor nor per-rank object, the *common state* (arguments, iteration, parameter
groups), is the object ``common_state/shard_0_1`` from 0.19 on and the file ``common.pt`` before.

All of them are pickles, which are loaded by ``gate.py``. An enum of a Megatron that is not installed becomes a
stand-in, and costs its own value only.
"""

import argparse
import io
import json
import math
import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron_eopt.checkpoints import bounds
from megatron_eopt.checkpoints.gate import Load
from megatron_eopt.checkpoints.harmless import Unknown

METADATA = ".metadata"
FORMAT = "metadata.json"
COMMON_FILE = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
INTEGRITY = "integrity.json"  # SHA-256 of files (Megatron's --verify-integrity, from 0.19 on)
TRACKER = "latest_checkpointed_iteration.txt"
EXTRA_STATE = "_extra_state"  # in the keys of what modules keep beside their tensors
OWN_FILES = frozenset({METADATA, FORMAT, INTEGRITY, "modelopt_state", "tokenizer"})  # without chunks


class CheckpointError(ValueError):
    """A checkpoint that cannot be read."""


class Chunk(NamedTuple):
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
    chunks: tuple[Chunk, ...]

    @property
    def entries(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of its data, without archives' headers."""
        return self.entries * self.dtype.itemsize


@dataclass(frozen=True)
class Contents:
    """The metadata of a checkpoint."""

    folder: Path  # the checkpoint's own, as iter_0000100
    tensors: dict[str, StoredTensor]
    blobs: dict[str, Chunk]  # the objects; of these only the common state is read
    common: dict[str, Any]
    release: str  # releases of Megatron-Core that save so
    foreign: dict[str, Set[str]]  # file -> names in its pickle that are not harmless

    def chunks(self) -> list[tuple[str, Chunk]]:
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


def newest(folder: Path) -> Path:
    """The checkpoint that Megatron would load, or a :class:`CheckpointError`."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; name a checkpoint, or the folder that a run's --save named")
    tracker = folder / TRACKER
    saved = sorted(x.name for x in folder.iterdir() if x.is_dir() and re.fullmatch(r"release|iter_\d+", x.name))
    there = f"there are {', '.join(saved)}" if saved else "there are no checkpoints"
    if not tracker.exists():
        if saved and not (folder / METADATA).exists():
            raise CheckpointError(
                f"{folder}: no {TRACKER}, so no save has finished and Megatron would start anew; {there}: name one"
            )
        return folder
    try:
        said = bounds.read_text(tracker, bounds.TRACKER_BYTES).strip()
    except OSError as error:
        raise CheckpointError(f"{error}; {there}: write one's number into it") from error
    name = f"iter_{int(said):07d}" if said.isdecimal() else said
    if name != "release" and not said.isdecimal():
        wrong = f"{said!r} instead of an iteration or 'release'"
    elif not (folder / name).is_dir():
        wrong = f"{said}, and {name} is not there"
    else:
        return folder / name
    raise CheckpointError(f"{tracker} says {wrong}; {there}: write one's number into it")


def read_contents(folder: Path) -> Contents:
    """Read a checkpoint's metadata, or raise a :class:`CheckpointError`."""
    if fault := _fault(folder):
        raise CheckpointError(f"{folder} {fault}")
    contents, key, release = read_layout(folder), COMMON_KEY, "0.19 or later"
    if (older := folder / COMMON_FILE).exists():
        key, release = COMMON_FILE, "0.18 or before"
        contents.blobs[key] = Chunk((), (), COMMON_FILE, 0, older.stat().st_size)
    common, foreign = _common(folder, contents.blobs.get(key))
    return replace(contents, common=common, release=release, foreign=contents.foreign | {key: foreign})


def read_layout(folder: Path) -> Contents:
    """What ``.metadata`` says, without the common state."""
    tensors, blobs, foreign = {}, {}, frozenset[str]()
    try:
        stored, foreign = read_metadata(folder / METADATA)
        if not isinstance(stored, Metadata) or not isinstance(stored.storage_data, dict):
            raise TypeError(f"it holds a {type(stored).__name__}")
        for key, entry in stored.state_dict_metadata.items():
            if not isinstance(key, str):
                raise TypeError(f"a key is a {type(key).__name__}")
            if isinstance(entry, TensorStorageMetadata):
                chunks = tuple(_chunk(stored, key, chunk.offsets, chunk.sizes) for chunk in entry.chunks)
                if not isinstance(entry.properties.dtype, torch.dtype):
                    raise TypeError(f"{key} has no dtype")
                tensors[key] = StoredTensor(key, _extents(entry.size), entry.properties.dtype, chunks)
            else:
                blobs[key] = _chunk(stored, key)
        contents = Contents(folder, tensors, blobs, {}, "", {METADATA: foreign})
        _check_apart(contents.chunks())
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"{folder / METADATA} cannot be read ({type(error).__name__}: {error}). It is truncated, damaged or of "
            f"another kind{_named(foreign)}, and without it no data can be found: take another checkpoint, or a copy "
            "of this file"
        ) from error
    return contents


def read_metadata(path: Path) -> tuple[Any, frozenset[str]]:
    """What the metadata are, and foreign names in them."""
    with bounds.open_file(path, bounds.METADATA_BYTES):
        pass
    status = path.stat()
    return _metadata(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1)  # a load needs it several times, and it takes seconds for each hundred thousand chunks
def _metadata(path: Path, changed: int, size: int) -> tuple[Any, frozenset[str]]:
    load = Load()
    with bounds.open_file(path, bounds.METADATA_BYTES) as file:
        stored = load.load_bytes(file.read())
    return stored, frozenset(load.foreign)


def forget_metadata() -> None:
    """Let go of what :func:`read_metadata` keeps."""
    _metadata.cache_clear()


def is_legacy(folder: Path) -> bool:
    """Whether a folder is in Megatron's old torch format."""
    return any(e.name.startswith("mp_rank_") or e.name.endswith("model_optim_rng.pt") for e in folder.iterdir())


def _fault(folder: Path) -> str | None:
    if not folder.is_dir():
        return "is no folder"
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        return "is empty: a save that never wrote anything; take another checkpoint"
    if is_legacy(folder):
        advice = "load it and save it again with --ckpt-convert-format torch_dist"
        return f"is in Megatron's legacy torch format ({names[0]}); only torch_dist is read here: {advice}"
    if FORMAT not in names:
        if METADATA not in names and not any(name.endswith(".distcp") for name in names):
            return f"is no checkpoint: it has {', '.join(names[:5])}, and no {FORMAT}"
        return (
            f"has no {FORMAT}, which Megatron writes last: the save did not finish, or another program than Megatron "
            "wrote it. Megatron will not load it: take the checkpoint before it"
        )
    try:
        backend = json.loads(bounds.read_text(folder / FORMAT, bounds.TEXT_BYTES))["sharded_backend"]
    except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
        return f"is damaged: {FORMAT} cannot be read ({error})"
    if backend != "torch_dist":
        return f"is in the format {backend!r}, and only torch_dist is read here"
    return None if METADATA in names else f"has no {METADATA}, so no data can be found: copy it from where it is"


def _chunk(found: Metadata, key: str, offsets: torch.Size | None = None, sizes: Sequence[int] = ()) -> Chunk:
    stored = found.storage_data[MetadataIndex(key, offsets)]
    if getattr(stored, "transform_descriptors", None):
        raise ValueError(f"{key} is compressed or otherwise transformed, which Megatron never does")
    start, length = _extents((stored.offset, stored.length))
    return Chunk(_extents(offsets or ()), _extents(sizes), bounds.check_name(stored.relative_path), start, length)


def _extents(numbers: Sequence[int]) -> tuple[int, ...]:
    if len(numbers) > 64 or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError("it has sizes or offsets that no tensor or file can have")
    return tuple(numbers)


def _check_apart(chunks: Iterable[tuple[str, Chunk]]) -> None:
    """Refuse chunks that share bytes: a small file could name a chunk a million times."""
    placed = sorted((chunk.file, chunk.start, chunk.length, key) for key, chunk in chunks)
    for (file, start, length, key), (next_file, next_start, _, next_key) in pairwise(placed):
        if file == next_file and start + length > next_start:
            raise ValueError(f"{key} and {next_key} share bytes of {file}")


def _named(foreign: Iterable[str]) -> str:
    return "".join(f", and it names {name}" for name in sorted(foreign))


def _size(value: Any, sizes: dict[int, int], depth: int = 0) -> int:
    """Number of values inside, shared ones each time."""
    if depth > bounds.DEPTH:
        raise ValueError(f"it has values in values, more than {bounds.DEPTH} deep")
    if id(value) not in sizes:
        inner = vars(value) if isinstance(value, argparse.Namespace | Unknown) else value
        inside = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list | tuple | set) else ()
        sizes[id(value)] = 1 + sum(_size(item, sizes, depth + 1) for item in inside)
    return sizes[id(value)]


def _common(folder: Path, blob: Chunk | None) -> tuple[dict[str, Any], set[str]]:
    path, load = folder / (blob.file if blob else COMMON_FILE), Load()
    try:
        if blob is None:
            raise FileNotFoundError(f"neither {COMMON_KEY} in {METADATA} nor {COMMON_FILE}")
        common = load.load_saved(read_blob(folder, blob))
        if isinstance(common, list) and len(common) == 1:
            common = common[0]
        if not isinstance(common, dict):
            raise TypeError(f"it holds a {type(common).__name__}")
        if _size(common, {}) > bounds.VALUES:
            raise ValueError(f"it has more than {bounds.VALUES:,} values")
    except Exception as error:  # a damaged archive raises anything
        raise CheckpointError(
            f"{path}: the common state (arguments, iteration, parameter groups) cannot be read "
            f"({type(error).__name__}: {error}){_named(load.foreign)}. Megatron cannot load this checkpoint: take "
            "another one, or a copy"
        ) from error
    return common, load.foreign


def read_blob(folder: Path, blob: Chunk) -> io.BytesIO:
    """The bytes of an object's archive."""
    if blob.length > bounds.OBJECT_BYTES:
        raise ValueError(f"it has {blob.length:,} bytes, and at most {bounds.OBJECT_BYTES:,} are read of an object")
    with bounds.open_file(folder / blob.file) as file:
        file.seek(blob.start)
        return io.BytesIO(file.read(blob.length))
