"""Metadata of torch_dist checkpoints, read without running their code.

A checkpoint is a folder of ``.distcp`` files. Each is a sequence of archives that ``torch.save`` wrote, one for each
chunk of a tensor and one for each object; ``.metadata`` names them with their positions. Megatron writes
``metadata.json`` last. What is neither tensor nor per-rank object, the *common state* (arguments, iteration, parameter
groups), is the object ``common_state/shard_0_1`` from 0.19 on and the file ``common.pt`` before.

All of them are pickles, which are loaded by ``gate.py``. A class of a Megatron that is not imported becomes a stand-in.
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

from megatron_eopt.checkpoints.gate import load_pickle, load_saved, reason

METADATA = ".metadata"
FORMAT = "metadata.json"
COMMON_FILE = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
TRACKER = "latest_checkpointed_iteration.txt"
EXTRA_STATE = "_extra_state"  # in the keys of what modules keep beside their tensors


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


@dataclass(frozen=True)
class Contents:
    """The metadata of a checkpoint."""

    folder: Path  # the checkpoint's own, as iter_0000100
    tensors: dict[str, StoredTensor]
    blobs: dict[str, Chunk]  # the objects; of these only the common state is read
    common: dict[str, Any]
    release: str  # releases of Megatron-Core that save so

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
    saved = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and re.fullmatch(r"release|iter_\d+", path.name):
            saved.append(path.name)
    there = f"there are {', '.join(saved) or 'no checkpoints'}"
    if not tracker.exists():
        if not saved or (folder / METADATA).exists():
            return folder
        raise CheckpointError(
            f"{folder}: no {TRACKER}, so no save has finished and Megatron would start anew; {there}: name one"
        )
    word = tracker.read_text(errors="replace").strip()
    name = f"iter_{int(word):07d}" if word.isdecimal() else word
    if name not in saved:
        raise CheckpointError(
            f"{tracker} says {word!r}, which is no iteration that is there, nor 'release'; {there}: write one's number "
            f"into it"
        )
    return folder / name


def read_contents(folder: Path) -> Contents:
    """Read a checkpoint's metadata, or raise a :class:`CheckpointError`."""
    fault = _fault(folder)
    if fault:
        raise CheckpointError(f"{folder} {fault}")
    contents = read_layout(folder)
    key = COMMON_KEY
    release = "0.19 or later"
    older = folder / COMMON_FILE
    if older.exists():
        key = COMMON_FILE
        release = "0.18 or before"
        contents.blobs[key] = Chunk((), (), COMMON_FILE, 0, older.stat().st_size)
    blob = contents.blobs.get(key)
    if blob is not None and not (folder / blob.file).exists():
        named = {chunk.file for _, chunk in contents.chunks()}
        missing = sorted(name for name in named if not (folder / name).exists())
        more = f" and {len(missing) - 5:,} more" if len(missing) > 5 else ""
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing[:5])}{more}, and with {blob.file} arguments, iteration and parameter "
            f"groups: copy what is missing from where it is, or take another checkpoint"
        )
    return replace(contents, common=_common(folder, blob), release=release)


def read_layout(folder: Path) -> Contents:
    """What ``.metadata`` says, without the common state."""
    tensors = {}
    blobs = {}
    stored = load_metadata(folder / METADATA)
    try:
        for key, entry in stored.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                chunks = tuple(_chunk(stored, key, chunk.offsets, chunk.sizes) for chunk in entry.chunks)
                tensors[key] = StoredTensor(key, tuple(entry.size), entry.properties.dtype, chunks)
            else:
                blobs[key] = _chunk(stored, key)
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"{folder / METADATA} cannot be read ({type(error).__name__}: {error}): take another checkpoint, or a copy "
            f"of this file"
        ) from error
    return Contents(folder, tensors, blobs, {}, "")


def load_metadata(path: Path) -> Metadata:
    """Where the data of a checkpoint are."""
    try:
        found = load_pickle(path.read_bytes())
        if not isinstance(found, Metadata):
            raise TypeError(f"it holds a {type(found).__name__}")
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"{path} {reason(error)}. Without it no data can be found: take another checkpoint, or a copy of this file"
        ) from error
    vars(found).pop("all_local_plans", None)  # Megatron's, which plans anew without
    return found


def is_legacy(folder: Path) -> bool:
    """Whether a folder is in Megatron's old torch format."""
    return any(e.name.startswith("mp_rank_") or e.name.endswith("model_optim_rng.pt") for e in folder.iterdir())


def _fault(folder: Path) -> str | None:
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        return "is empty: a save that never wrote anything; take another checkpoint"
    if is_legacy(folder):
        return (
            f"is in Megatron's legacy torch format ({names[0]}); only torch_dist is read here: load it and save it "
            f"again with --ckpt-convert-format torch_dist"
        )
    if FORMAT not in names:
        if METADATA not in names and not any(name.endswith(".distcp") for name in names):
            return f"is no checkpoint: it has {', '.join(names[:5])}, and no {FORMAT}"
        return (
            f"has no {FORMAT}, which Megatron writes last: the save did not finish, or another program than Megatron "
            f"wrote it. Megatron will not load it: take the checkpoint before it"
        )
    try:
        backend = json.loads((folder / FORMAT).read_bytes())["sharded_backend"]
    except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
        return f"is damaged: {FORMAT} cannot be read ({error})"
    if backend != "torch_dist":
        return f"is in the format {backend!r}, and only torch_dist is read here"
    return None


def _chunk(stored: Metadata, key: str, offsets: torch.Size | None = None, sizes: Iterable[int] = ()) -> Chunk:
    at = stored.storage_data[MetadataIndex(key, offsets)]
    if at.transform_descriptors:
        raise ValueError(f"{key} is stored through {', '.join(at.transform_descriptors)}, which Megatron never does")
    return Chunk(tuple(offsets or ()), tuple(sizes), at.relative_path, at.offset, at.length)


def _common(folder: Path, blob: Chunk | None) -> dict[str, Any]:
    path = folder / (blob.file if blob else COMMON_FILE)
    try:
        if blob is None:
            raise FileNotFoundError(f"neither {COMMON_KEY} in {METADATA} nor {COMMON_FILE}")
        common = load_saved(read_blob(folder, blob))
        if isinstance(common, list):  # by a key of several
            (common,) = common
        if not isinstance(common, dict):
            raise TypeError(f"it holds a {type(common).__name__}")
    except Exception as error:  # a damaged archive raises anything
        raise CheckpointError(
            f"{path}: the common state (arguments, iteration, parameter groups) {reason(error)}. Megatron cannot load "
            f"this checkpoint: take another one, or a copy"
        ) from error
    return common


def read_blob(folder: Path, blob: Chunk) -> io.BytesIO:
    """The bytes of an object's archive."""
    with (folder / blob.file).open("rb") as file:
        file.seek(blob.start)
        return io.BytesIO(file.read(blob.length))
