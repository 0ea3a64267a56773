"""Checksums of whole tensors, which a run saves beside them.

Each is a sum over the entries of a tensor that depends on where they are (``checksum.py``). So data that were
exchanged, or are of another checkpoint, show.
"""

from collections.abc import Mapping
from typing import Any

from megatron_eopt.checkpoints.contents import CheckpointError
from megatron_eopt.checkpoints.states import blocks_of

CHECKSUMS = "megatron_eopt_checksums"  # where the common state of a checkpoint has them
Sums = dict[str, tuple[int, int]]  # key -> checksum and number of entries


def saved_sums(written: Any, optimizer: Any, entries: Mapping[str, int]) -> Sums:
    """The checksums of a checkpoint; empty where its run saved none.

    Args:
        written: what the common state has as checksums.
        optimizer: the optimizers' common state, which says whether there are any.
        entries: key -> number of entries of each tensor.

    Raises:
        CheckpointError: for anything but checksums. Left out, they would compare nothing without a word.
    """
    if written is None and not any(block.get("checksums") for block in blocks_of(optimizer)):
        return {}
    fault = _fault(written, entries)
    if fault is not None:
        raise CheckpointError(
            f"the checksums of its tensors are {fault}. Load another checkpoint, or pass --no-checksums to load this "
            f"one without comparing"
        )
    sums: Sums = written
    return sums


def _fault(written: Any, entries: Mapping[str, int]) -> str | None:
    if written is None:
        return "gone, which its run saved"
    if not isinstance(written, dict) or not written:
        return "damaged: they are no dict, or an empty one"
    for key, pair in written.items():
        if not isinstance(pair, tuple) or len(pair) != 2 or pair[1] != entries.get(key, pair[1]):
            return f"damaged: that of {key} is {pair}, and has to be a checksum and the number of its entries"
    return None
