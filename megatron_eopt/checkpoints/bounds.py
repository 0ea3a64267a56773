"""Bounds of what is read: a checkpoint can be hostile.

A bound is far above what a run of thousands of ranks saves, and below what ends a process.
"""

import io
from pathlib import Path

TRACKER_BYTES = 64  # an iteration, or a word
TEXT_BYTES = 2**26  # JSON: a hash for each of half a million files
METADATA_BYTES = 2**29  # two and a half million chunks of 200 bytes
OBJECT_BYTES = 2**28  # groups and checksums have some hundred bytes for each tensor
VALUES = 10_000_000  # of the common state, each counted as often as it is referred to
DEPTH = 100  # of nested values: Megatron's arguments and groups have less than ten
PARTS = 20_000_000  # into which a tensor's chunks cut each other; and a hundred for each, of which a grid needs one
NAME_BYTES = 255  # of a file or folder, on every file system
SHOWN = 2000  # characters of a printed line


def open_file(path: Path, most: int | None = None) -> io.BufferedReader:
    """Open a regular file of at most ``most`` bytes."""
    if path.exists() and not path.is_file():  # a pipe would wait for ever
        raise OSError(f"{path} is no regular file")
    if most is not None and (size := path.stat().st_size) > most:
        raise OSError(f"{path} has {size:,} bytes, and at most {most:,} are read of such a file")
    return path.open("rb")


def read_text(path: Path, most: int) -> str:
    """Text of a regular file of at most ``most`` bytes."""
    with open_file(path, most) as file:
        return file.read(most).decode(errors="replace")


def check_name(name: object) -> str:
    """A path from metadata; ``ValueError`` unless inside the checkpoint."""
    path = Path(name) if isinstance(name, str) and "\0" not in name else None
    if path is None or any(len(part.encode(errors="replace")) > NAME_BYTES for part in path.parts):
        raise ValueError(f"{str(name)[:NAME_BYTES]!r} is no name of a file")
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{path} is outside of the checkpoint")
    return str(path)


def printable(text: str) -> str:
    """A line for a terminal, escaped and cut."""
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text):,} characters)"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)
