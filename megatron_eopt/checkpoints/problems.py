"""Whether the files of a checkpoint are what its metadata says, without reading its tensors."""

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from megatron_eopt.checkpoints.contents import COMMON_FILE, FORMAT, METADATA, TRACKER, CheckpointError, Contents, newest

INTEGRITY = "integrity.json"
"""Megatron's list of the SHA-256 of files (``--verify-integrity``, from 0.19 on)."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and what to do; an error keeps a run from loading it, or makes it another run."""

    severity: Literal["error", "warning"]
    what: str
    advice: str


def check_structure(contents: Contents) -> list[Problem]:
    """Every file is there and long enough, every tensor is tiled by its chunks, and there are no stray files."""
    return [*check_files(contents), *check_tiling(contents), *check_neighbours(contents)]


def needed(contents: Contents) -> dict[str, int]:
    """How many bytes each file has at least, by name."""
    lengths: dict[str, int] = {}
    chunks = [chunk for tensor in contents.tensors.values() for chunk in tensor.chunks]
    for chunk in [*chunks, *contents.blobs.values()]:
        lengths[chunk.file] = max(lengths.get(chunk.file, 0), chunk.start + chunk.length)
    return dict(sorted(lengths.items()))


def check_files(contents: Contents) -> list[Problem]:
    """Files that the metadata name are there and reach to the end of the last chunk in them."""
    problems = []
    for name, end in needed(contents).items():
        path = contents.folder / name
        if not path.is_file():
            problems.append(Problem("error", f"{name} is missing ({end:,} bytes)", "copy it from where it is"))
        elif (length := path.stat().st_size) < end:
            what = f"{name} is truncated: {length:,} bytes, and its last chunk ends at {end:,}"
            problems.append(Problem("error", what, "copy it again, or take another checkpoint"))
    return problems


def check_tiling(contents: Contents) -> list[Problem]:
    """The chunks of each tensor cover its shape once: no gap, no overlap."""
    problems = []
    for tensor in contents.tensors.values():
        fault = tiling_fault(tensor.shape, [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks])
        if fault:
            what = f"{tensor.key} {list(tensor.shape)}: {fault}"
            problems.append(Problem("error", what, "the save was wrong: take another checkpoint"))
    return problems


def check_neighbours(contents: Contents) -> list[Problem]:
    """The run's tracker file names a checkpoint that is there, and this one has no stray files."""
    problems = []
    known = {METADATA, FORMAT, COMMON_FILE, INTEGRITY, "modelopt_state"}
    known |= {name.split("/")[0] for name in needed(contents)}
    for path in sorted(contents.folder.iterdir()):
        if path.name not in known:
            what = f"{path.name} belongs to nothing that the metadata name"
            advice = "a temporary file, or one of a save that was interrupted before this one: delete it"
            problems.append(Problem("warning", what, advice))
    run = contents.folder.resolve().parent
    if (run / TRACKER).is_file():
        try:
            newest(run)
        except CheckpointError as error:
            problems.append(Problem("error", str(error), "a run that loads the folder above would stop"))
    elif contents.folder.name == "release" or contents.folder.name.startswith("iter_"):
        what = f"there is no {TRACKER} beside {contents.folder.name}"
        advice = "Megatron would start anew from the folder above: write the iteration into that file"
        problems.append(Problem("warning", what, advice))
    return problems


Box = tuple[Sequence[int], Sequence[int]]


def tiling_fault(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """What keeps boxes from covering every entry of ``shape`` exactly once; None if nothing does.

    One dimension at a time: between two neighbouring edges of boxes the same boxes cover every position, so each such
    slab is a problem of one dimension less. A regular grid of n chunks costs O(n log n).

    Args:
        shape: of the tensor.
        boxes: offsets and sizes of the chunks.
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
    return _fault(tuple(shape), intervals, ())


def _fault(shape: tuple[int, ...], boxes: list[list[tuple[int, int]]], at: tuple[int, ...]) -> str | None:
    axis = len(at)
    if not boxes:
        return f"no chunk holds the entry at {[*at, *[0] * (len(shape) - axis)]}"
    if axis == len(shape):
        return None if len(boxes) == 1 else f"{len(boxes)} chunks hold the entry at {list(at)}"
    edges = sorted({0, shape[axis], *(edge for box in boxes for edge in box[axis])})
    slabs: list[list[list[tuple[int, int]]]] = [[] for _ in pairwise(edges)]
    for box in boxes:
        start, stop = (bisect.bisect_left(edges, edge) for edge in box[axis])
        for slab in slabs[start:stop]:
            slab.append(box)
    for edge, slab in zip(edges, slabs, strict=False):
        fault = _fault(shape, slab, (*at, edge))
        if fault:
            return fault
    return None
