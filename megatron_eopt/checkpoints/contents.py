"""What a torch_dist checkpoint says it holds, from its metadata alone: no tensor is read.

A checkpoint is a folder of ``.distcp`` files, each a row of archives that ``torch.save`` wrote, one for each chunk of a
tensor and one for each object; ``.metadata`` says what they are and where they lie. Megatron writes ``metadata.json``
last. What is neither tensor nor per-rank object, the *common state* (arguments, iteration, parameter groups), is the
object ``common_state/shard_0_1`` from 0.19 on and the file ``common.pt`` before.
"""

import argparse
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron_eopt.checkpoints.pickles import read_archive, read_layout

LAYOUT = ".metadata"
FORMAT = "metadata.json"
COMMON_FILE = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
TRACKER = "latest_checkpointed_iteration.txt"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read: what was found, what was expected, what to do."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor, or an object (without offsets and sizes), and where its archive lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor and the chunks that it is stored in."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def entries(self) -> int:
        """How many entries it has."""
        return int(torch.Size(self.shape).numel())

    @property
    def bytes(self) -> int:
        """The size of its data, without the archives' headers."""
        return self.entries * self.dtype.itemsize


@dataclass(frozen=True)
class Contents:
    """All that the metadata of a checkpoint say.

    Attributes:
        folder: the checkpoint's own folder, as ``iter_0000100``.
        tensors: by key, in the order of the metadata.
        blobs: where each object lies, by key; an object is read by nobody here but the common state.
        common: the common state.
        release: which releases of Megatron-Core lay a checkpoint out so.
    """

    folder: Path
    tensors: dict[str, StoredTensor]
    blobs: dict[str, Chunk]
    common: dict[str, Any]
    release: str

    @property
    def objects(self) -> tuple[str, ...]:
        """Keys of the objects."""
        return tuple(self.blobs)

    @property
    def args(self) -> dict[str, Any]:
        """Megatron's arguments of the run that saved it; empty where they were not saved."""
        saved = self.common.get("args")
        return vars(saved) if isinstance(saved, argparse.Namespace) else {}

    @property
    def iteration(self) -> int | None:
        """The iteration after which it was saved, if it says so."""
        found = self.common.get("iteration")
        return found if isinstance(found, int) else None


def newest(folder: Path) -> Path:
    """The checkpoint that Megatron would load from a run's ``--save`` folder; a checkpoint's own folder as it is.

    Raises:
        CheckpointError: if the folder is not there, or its tracker file names nothing that is there.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; name a checkpoint, or the folder that a run's --save named")
    tracker = folder / TRACKER
    saved = sorted(each.name for each in folder.iterdir() if each.is_dir() and _is_checkpoint_name(each.name))
    there = f"there are {', '.join(saved)}" if saved else "there are no checkpoints"
    if not tracker.is_file():
        if saved and not (folder / LAYOUT).exists():
            raise CheckpointError(
                f"{folder}: no {TRACKER}, so no save has finished and Megatron would start anew; {there}: name one"
            )
        return folder
    said = tracker.read_text(errors="replace").strip()
    if said != "release" and not said.isdecimal():
        raise CheckpointError(
            f"{tracker} says {said!r} instead of an iteration or 'release'; {there}: write one's number into it"
        )
    name = said if said == "release" else f"iter_{int(said):07d}"
    if not (folder / name).is_dir():
        raise CheckpointError(f"{tracker} says {said}, and {name} is not there; {there}: write one's number into it")
    return folder / name


def read_contents(folder: Path) -> Contents:
    """Read the metadata of one checkpoint.

    Args:
        folder: the checkpoint's own folder; ``newest`` finds that of a run.

    Raises:
        CheckpointError: if it is not there, not in torch_dist format, not finished, or if its metadata or its common
            state cannot be read.
    """
    _refuse_what_is_none(folder)
    try:
        with (folder / LAYOUT).open("rb") as file:
            layout = read_layout(file)
        if not isinstance(layout, Metadata) or not isinstance(layout.storage_data, dict):
            raise TypeError(f"it holds a {type(layout).__name__}")
        tensors, blobs = _entries(layout)
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"{folder / LAYOUT} cannot be read ({type(error).__name__}: {error}). It is truncated, damaged or of "
            "another kind, and without it no data can be found: take another checkpoint, or a copy of this file"
        ) from error
    legacy = (folder / COMMON_FILE).is_file()
    release = "0.18 or before" if legacy else "0.19 or later"
    return Contents(folder, tensors, blobs, _common(folder, None if legacy else blobs.get(COMMON_KEY)), release)


def is_legacy(folder: Path) -> bool:
    """Whether a checkpoint's own folder is in Megatron's torch format, one file for each rank."""
    return any(e.name.startswith("mp_rank_") or e.name.endswith("model_optim_rng.pt") for e in folder.iterdir())


def _is_checkpoint_name(name: str) -> bool:
    return name == "release" or re.fullmatch(r"iter_\d+", name) is not None


def _refuse_what_is_none(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    names = sorted(each.name for each in folder.iterdir())
    if not names:
        raise CheckpointError(f"{folder} is empty: a save that never wrote anything; take another checkpoint")
    if is_legacy(folder):
        raise CheckpointError(
            f"{folder} is in Megatron's legacy torch format ({names[0]}); only torch_dist is read here: load it and "
            "save it again with --ckpt-convert-format torch_dist"
        )
    if FORMAT not in names:
        if LAYOUT in names or any(name.endswith(".distcp") for name in names):
            raise CheckpointError(
                f"{folder} has no {FORMAT}, which Megatron writes last: the save did not finish, or another program "
                "than Megatron wrote it. Megatron will not load it: take the checkpoint before it"
            )
        raise CheckpointError(f"{folder} is no checkpoint: it has {', '.join(names[:5])}, and no {FORMAT}")
    try:
        said = json.loads((folder / FORMAT).read_text())
        backend = said["sharded_backend"]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / FORMAT} cannot be read ({error}): the checkpoint is damaged") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{folder} is in the format {backend!r}, and only torch_dist is read here")
    if LAYOUT not in names:
        raise CheckpointError(f"{folder} has no {LAYOUT}, without which no data can be found: copy it from where it is")


def _entries(layout: Metadata) -> tuple[dict[str, StoredTensor], dict[str, Chunk]]:
    tensors, blobs = {}, {}
    for key, stored in layout.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            chunks = tuple(
                _chunk(layout, key, tuple(chunk.offsets), tuple(chunk.sizes), chunk.offsets) for chunk in stored.chunks
            )
            tensors[key] = StoredTensor(key, tuple(stored.size), stored.properties.dtype, chunks)
        else:
            blobs[key] = _chunk(layout, key, (), (), None)
    return tensors, blobs


def _chunk(
    layout: Metadata, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], index: torch.Size | None
) -> Chunk:
    place = layout.storage_data[MetadataIndex(key, index)]
    path = Path(place.relative_path)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{key} lies in {path}, outside of the checkpoint")
    return Chunk(offsets, sizes, str(path), int(place.offset), int(place.length))


def _common(folder: Path, blob: Chunk | None) -> dict[str, Any]:
    where = folder / (blob.file if blob else COMMON_FILE)
    try:
        if blob is None and not where.is_file():
            raise FileNotFoundError(f"neither {COMMON_KEY} in {LAYOUT} nor {COMMON_FILE}")
        with where.open("rb") as file:
            file.seek(blob.start if blob else 0)
            common = read_archive(io.BytesIO(file.read(blob.length if blob else -1)))
        if isinstance(common, list) and len(common) == 1:
            common = common[0]
        if not isinstance(common, dict):
            raise TypeError(f"it holds a {type(common).__name__}")
    except Exception as error:  # a damaged archive raises anything
        raise CheckpointError(
            f"{where}: the common state (arguments, iteration, parameter groups) cannot be read "
            f"({type(error).__name__}: {error}). Megatron cannot load this checkpoint: take another one, or a copy"
        ) from error
    return common
