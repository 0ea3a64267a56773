"""What is wrong with the files and pickles of a checkpoint."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch

from megatron_eopt.checkpoints.contents import EXTRA_STATE, Contents, read_blob, reason
from megatron_eopt.checkpoints.gate import load_pickle, load_saved


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


def check_pickles(contents: Contents) -> Iterator[Problem]:
    """Objects load as a run loads them; tensors need no names."""
    found = defaultdict[str, list[str]](list)  # what is at fault -> where
    for key, chunk in contents.chunks():
        if EXTRA_STATE in key or key in contents.blobs:
            try:
                check_extra_states({key: load_saved(read_blob(contents.folder, chunk))})
            except Exception as error:  # a damaged pickle raises anything
                found[reason(error)].append(f"{key} in {chunk.file}")
    for fault, places in found.items():
        more = f" and {len(places) - 1:,} more" if len(places) > 1 else ""
        yield Problem("error", f"{places[0]}{more} {fault}", "take another checkpoint, or a copy")


def check_extra_states(state: Any) -> None:
    """Raise for names in the bytes that modules of Transformer Engine unpickle, of a state dict."""
    for key, value in state.items() if isinstance(state, dict) else ():
        if EXTRA_STATE not in str(key):
            check_extra_states(value)
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, torch.Tensor) and each.numel():
                load_pickle(each.detach().cpu().contiguous().numpy().tobytes())
