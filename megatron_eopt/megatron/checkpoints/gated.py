"""Megatron's loads of our runs, through the gate.

torch unpickles ``.metadata`` and objects by themselves, Megatron ``common.pt``, and Transformer Engine the bytes of
extra states once more. In a run whose optimizer is ours, each of them gets what ``checkpoints/gate.py`` loaded.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megatron_eopt.checkpoints.bounds import open_file, printable
from megatron_eopt.checkpoints.contents import COMMON_FILE, EXTRA_STATE, METADATA, CheckpointError, read_metadata
from megatron_eopt.checkpoints.gate import ForeignNameError, Load
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.support.run import primary_of
from megatron_eopt.redirect import Original, around
from megatron_eopt.registry import list_optimizers

# Of a load that comes before Megatron keeps its arguments, as that of --use-checkpoint-args.
_args: ContextVar[Any] = ContextVar("_args", default=None)


def is_our_run(args: Any) -> bool:
    """Whether a run has an optimizer of this package."""
    return primary_of(args) in list_optimizers()


def trusted_by(args: Any) -> dict[str, Any]:
    """Names that a run trusts, with what they stand for; None: to be imported."""
    named = (getattr(args, "trust_checkpoint_globals", None) or "").split(",")
    trusted: dict[str, Any] = dict.fromkeys(named)
    for registered in torch.serialization.get_safe_globals():
        if isinstance(registered, tuple):
            trusted[registered[1]] = registered[0]
        else:
            trusted[f"{registered.__module__}.{registered.__qualname__}"] = registered
    return trusted


@contextmanager
def loading(args: Any) -> Iterator[None]:
    """Within, loads are those of a run with these arguments."""
    token = _args.set(args)
    try:
        yield
    finally:
        _args.reset(token)


def _load() -> Load | None:
    """How this process loads; None: as torch and Megatron do."""
    args = _args.get() or releases.training_args()
    if not is_our_run(args):
        return None
    trusted = trusted_by(args)
    return None if "all" in trusted else Load(real=True, trusted=trusted)


@contextmanager
def _refusing(what: str, load: Load) -> Iterator[None]:
    """Within, what is wrong with a pickle is a :class:`CheckpointError`."""
    cause: Exception | None = None
    try:
        yield
        if not load.missing:
            return
        reason = f"cannot be loaded: needs {min(load.missing)}, which is not installed"
    except ForeignNameError as error:
        cause = error
        name = str(error).removeprefix("names ")
        reason = (
            f"{error}, which a load would call. Load a checkpoint only from where you would run a program. If you know "
            f"what it does: --trust-checkpoint-globals {name}"
        )
    except Exception as error:  # a damaged pickle raises anything
        cause = error
        reason = f"cannot be loaded: {error or type(error).__name__}"
    raise CheckpointError(printable(f"{what} {reason}")) from cause


@around
def gated_metadata(read: Original, reader: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``FileSystemReader.read_metadata``."""
    load = _load()
    rank = kwargs.get("rank")
    if load is None or not isinstance(reader.path, Path):  # which is of object storage
        return read(reader, *args, **kwargs)
    path = reader.path / (METADATA if rank is None else f"__{rank}{METADATA}")
    if not path.exists():
        return read(reader, *args, **kwargs)  # which says so
    with _refusing(str(path), load):
        metadata, foreign = read_metadata(path)
        if foreign:
            metadata = load.load_bytes(path.read_bytes())
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = reader.load_id
    return metadata


@around
def gated_object(load_bytes: Original, planner: Any, item: Any, file: io.BytesIO) -> None:
    """Replaces ``DefaultLoadPlanner.load_bytes``, which puts an object into the state."""
    load = _load()
    key = item.dest_index.fqn
    if load is None:
        load_bytes(planner, item, file)
        return
    load.location = None  # where torch would put it
    with _refusing(key, load):
        loaded = load.load_saved(file)
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[key], loaded)
    else:
        planner.state_dict[key] = loaded


@around
def gated_common(load_common: Original, folder: Any) -> Any:
    """Replaces ``load_common``, which reads ``common.pt``."""
    load = _load()
    path = Path(folder, COMMON_FILE)
    if load is None or not path.is_file():
        return load_common(folder)
    with _refusing(str(path), load), open_file(path) as file:
        return load.load_saved(file)


def gate_extra_states(state: Any) -> None:
    """Replace extra states in a loaded state, whose bytes modules unpickle."""
    load = _load()
    if load is None or not isinstance(state, dict):
        return
    for key, value in state.items():
        if isinstance(value, dict):
            gate_extra_states(value)
        elif isinstance(key, str) and EXTRA_STATE in key:
            load.missing.clear()
            with _refusing(key, load):
                state[key] = load.load_extra_state(value)
                load.missing.clear()  # no module is there that would read it
