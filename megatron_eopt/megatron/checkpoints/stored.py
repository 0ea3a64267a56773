"""What a torch_dist checkpoint holds, before anything of it is loaded."""

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_eopt.checkpoints.contents import CheckpointError, Contents, read_contents
from megatron_eopt.checkpoints.faults import check_files
from megatron_eopt.checkpoints.sums import CHECKSUMS

# Reading takes seconds for each hundred thousand chunks: what a run reads before its build is kept until the load.
contents_of = lru_cache(maxsize=1)(read_contents)


class Stored(NamedTuple):
    """What a checkpoint holds, as sent to all ranks."""

    damage: str | None  # why it cannot be read
    shapes: dict[str, tuple[int, ...]]  # global, by key
    dtypes: dict[str, torch.dtype]
    optimizer: Any  # the common state of it
    checksums: Any  # as they were read; None where there are none


def read_stored(folder: Path) -> Stored:
    """What a checkpoint's metadata say that it holds."""
    try:
        contents = contents_of(folder)
    except CheckpointError as error:
        return Stored(str(error), {}, {}, None, None)
    return Stored(
        damage_of(contents),
        {key: tensor.shape for key, tensor in contents.tensors.items()},
        {key: tensor.dtype for key, tensor in contents.tensors.items()},
        contents.common.get("optimizer"),
        contents.common.get(CHECKSUMS),
    )


def damage_of(contents: Contents) -> str | None:
    """Why a checkpoint's files are not whole."""
    for fault in check_files(contents):
        return f"{fault.what}. {fault.advice}"
    return None
