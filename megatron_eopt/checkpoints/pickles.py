"""Reading pickles of others without running their code.

A pickle can name any function and have it called. Here only the classes that a checkpoint's layout is made of are taken
for what they are; every other name becomes an inert stand-in, so that an enum of a Megatron that is not installed costs
its own value and nothing else.
"""

import argparse
import pickle
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

_LAYOUT_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "Path"): PurePosixPath,
}


class Unknown:
    """Stands for an object whose class was not loaded: keeps what it was made from, does nothing."""

    name = "?"

    def __new__(cls, *arguments: Any, **keywords: Any) -> "Unknown":
        """Take whatever the pickle would have given the real class."""
        made = super().__new__(cls)
        made.arguments = (*arguments, *keywords.values())
        return made

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.arguments: tuple[Any, ...]

    def __setstate__(self, state: Any) -> None:
        self.arguments = (*self.arguments, state)

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None:
        """Ignore what the pickle appends to a list of an unknown class."""

    def extend(self, items: Any) -> None:
        """Ignore what the pickle appends to a list of an unknown class."""

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


def _unknown(module: str, name: str) -> type[Unknown]:
    return type(name.rpartition(".")[2], (Unknown,), {"name": f"{module}.{name}"})


class _LayoutUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _LAYOUT_CLASSES:
            return _LAYOUT_CLASSES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _unknown(module, name)


def read_layout(file: IO[bytes]) -> Any:
    """Unpickle torch's ``.metadata``, of which torch's own reader would call whatever the file names.

    Raises:
        Exception: whatever a damaged pickle makes the unpickler raise; there is no common class.
    """
    return _LayoutUnpickler(file).load()


def read_archive(file: IO[bytes]) -> Any:
    """Load what ``torch.save`` wrote, on the CPU, with stand-ins for all classes but tensors and Namespace.

    Raises:
        Exception: whatever a damaged or hostile archive makes ``torch.load`` raise.
    """
    allowed: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = []
    # of what is not safe already: what is made safe here is no longer so afterwards
    for path in torch.serialization.get_unsafe_globals_in_checkpoint(file):
        module, _, name = path.rpartition(".")
        allowed.append(argparse.Namespace if path == "argparse.Namespace" else (_unknown(module, name), path))
    file.seek(0)
    with torch.serialization.safe_globals(allowed):
        return torch.load(file, map_location="cpu", weights_only=True)
