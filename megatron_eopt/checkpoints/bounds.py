"""How much of a checkpoint is read, printed and followed at most: a file can be hostile, damaged or none at all.

A bound is far above what a run of thousands of ranks saves, and below what ends a process.
"""

import io
from pathlib import Path

TRACKER_BYTES = 64  # an iteration, or a word
TEXT_BYTES = 2**26  # JSON: a hash for each of half a million files
METADATA_BYTES = 2**29  # about 200 bytes for a chunk: two and a half million chunks
OBJECT_BYTES = 2**28  # the archive of an object: groups and checksums have some hundred bytes for each tensor
VALUES = 10_000_000  # of the common state, with those that are in several places counted in each
DEPTH = 100  # of values in values: Megatron's arguments and groups are less than ten deep
ARCHIVES = 4  # pickles in bytes of pickles: Transformer Engine's extra states have two
PARTS = 20_000_000  # into which chunks of one tensor cut each other; and a hundred for each, of which a grid needs one
NAME_BYTES = 255  # of a file or a folder, on every file system
SHOWN = 2000  # characters of a printed line


def open_file(path: Path, most: int | None = None) -> io.BufferedReader:
    """Open a regular file of at most so many bytes; a pipe would wait for a writer for ever."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no regular file")
    if most is not None and (size := path.stat().st_size) > most:
        raise OSError(f"{path} has {size:,} bytes, and at most {most:,} are read of such a file")
    return path.open("rb")


def read_text(path: Path, most: int) -> str:
    """The text of a regular file of at most so many bytes."""
    with open_file(path, most) as file:
        return file.read(most).decode(errors="replace")


def check_name(name: object) -> str:
    """The relative path of a file inside of a checkpoint, as metadata give it; a ``ValueError`` for any other."""
    path = Path(name) if isinstance(name, str) and "\0" not in name else None
    if path is None or any(len(part.encode(errors="replace")) > NAME_BYTES for part in path.parts):
        raise ValueError(f"{str(name)[:NAME_BYTES]!r} is no name of a file")
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{path} is outside of the checkpoint")
    return str(path)


def printable(text: str) -> str:
    """A line as a terminal may have it: what is no printable character is escaped, and what is too long is cut."""
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text):,} characters)"
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown)
