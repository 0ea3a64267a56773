"""Megatron's loads of our runs, through the gate."""

from pathlib import Path
from typing import Any

from megatron_eopt.checkpoints.contents import EXTRA_STATE, METADATA, CheckpointError, load_metadata
from megatron_eopt.checkpoints.gate import check_extra_state, is_reading, reason
from megatron_eopt.megatron.support.run import primary_of
from megatron_eopt.redirect import Original, around
from megatron_eopt.registry import list_optimizers
from megatron_eopt.screen import printable


def is_our_run(args: Any) -> bool:
    """Whether a run has an optimizer of this package."""
    return primary_of(args) in list_optimizers()


def trusted_by(args: Any) -> list[str]:
    """Names that a run's user trusts."""
    return (getattr(args, "trust_checkpoint_globals", None) or "").split(",")


@around
def gated_metadata(read: Original, reader: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``FileSystemReader.read_metadata``, which unpickles whatever is there."""
    if not is_reading() or not isinstance(reader.path, Path):  # which is of object storage
        return read(reader, *args, **kwargs)
    return load_metadata(reader.path / METADATA)


def check_extra_states(state: Any) -> None:
    """Check the extra states in a loaded state, whose bytes modules unpickle."""
    for key, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, dict):
            check_extra_states(value)
        elif isinstance(key, str) and EXTRA_STATE in key:
            try:
                check_extra_state(value)
            except Exception as error:  # a damaged pickle raises anything
                raise CheckpointError(printable(f"{key} {reason(error)}")) from error
