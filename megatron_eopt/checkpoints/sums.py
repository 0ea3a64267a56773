"""Checksums of whole tensors, which a run saves beside them.

Each is a sum over the entries of a tensor that depends on where they are (``parallel/checksum.py``). So data that were
exchanged, or are of another checkpoint, show; the CRC-32 of an archive goes with them.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron_eopt.checkpoints.contents import CheckpointError, Contents
from megatron_eopt.checkpoints.problems import Problem
from megatron_eopt.checkpoints.states import blocks_of

CHECKSUMS = "megatron_eopt_checksums"  # where the common state of a checkpoint has them
Sums = dict[str, tuple[int, int]]  # key -> checksum and number of entries
_ANOTHER = "take another checkpoint, or a good copy of this one"


def saved_sums(written: Any, optimizer: Any, entries: Mapping[str, int]) -> Sums:
    """The checksums of a checkpoint; empty where its run saved none.

    Args:
        written: what the common state has as checksums.
        optimizer: the optimizers' common state, which says whether there are any.
        entries: key -> number of entries of each tensor.

    Raises:
        CheckpointError: for anything but checksums. Left out, they would compare nothing without a word.
    """
    if written is None:
        if any(isinstance(block, dict) and block.get("checksums") for block in blocks_of(optimizer)):
            raise CheckpointError("the checksums of its tensors are gone, which its run saved")
        return {}
    begin = "the checksums of its tensors are damaged"
    if not isinstance(written, dict) or not written:
        raise CheckpointError(f"{begin}: they are a {type(written).__name__}, and have to be a dict that is not empty")
    for key, pair in written.items():
        if not isinstance(key, str) or not _is_sum(pair):
            raise CheckpointError(f"{begin}: that of {str(key)[:200]} is no pair of a checksum and a number of entries")
        if key in entries and pair[1] != entries[key]:
            raise CheckpointError(f"{begin}: that of {key} is of {pair[1]:,} entries, and it has {entries[key]:,}")
    return written


def _is_sum(pair: Any) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    return all(type(number) is int and 0 <= number < 2**64 for number in pair)


def read_sums(contents: Contents) -> tuple[Sums, list[Problem]]:
    """The checksums of a checkpoint, and what is wrong with them."""
    entries = {key: tensor.entries for key, tensor in contents.tensors.items()}
    try:
        sums = saved_sums(contents.common.get(CHECKSUMS), contents.common.get("optimizer"), entries)
    except CheckpointError as error:
        return {}, [Problem("error", str(error), f"{_ANOTHER}; a run loads it with --no-checksums alone")]
    problems = []
    if gone := sorted(sums.keys() - entries.keys()):
        problems.append(Problem("error", f"{_some(gone)} is not in it, and has a checksum", _ANOTHER))
    if without := sorted(entries.keys() - sums.keys()) if sums else []:
        what = f"{_some(without)} has no checksum, and others have: exchanged data would not show"
        problems.append(Problem("warning", what, "right for quantized parameters, and for nothing else"))
    return sums, problems


def compare(saved: Sums, found: Mapping[str, int | None]) -> Iterator[Problem]:
    """Compare tensors with what was saved; ``found`` has None for those that cannot be."""
    if changed := sorted(key for key, value in found.items() if value is not None and value != saved[key][0]):
        what = f"{_some(changed)} is not what was saved: its data are of another tensor, place or iteration"
        yield Problem("error", what, _ANOTHER)
    if unknown := sorted(key for key, value in found.items() if value is None):
        what = f"{_some(unknown)} is not stored entry by entry, so that its checksum is not compared"
        yield Problem("warning", what, "a run compares it when it loads")


def _some(keys: Collection[str]) -> str:
    shown = ", ".join(list(keys)[:3])
    return shown if len(keys) <= 3 else f"each of {len(keys):,} tensors, such as {shown},"
