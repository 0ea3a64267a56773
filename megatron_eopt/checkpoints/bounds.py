"""Bounds of what is read, and printed, of a checkpoint."""

import io
from pathlib import Path

FILE_BYTES = 2**29  # of a file or object that is read at once: far more than a run of thousands of ranks saves
SHOWN = 2000  # characters of a printed line


def open_file(path: Path, whole: bool = True) -> io.BufferedReader:
    """Open a regular file; ``whole`` bounds its size."""
    if path.exists() and not path.is_file():  # a pipe would wait for ever
        raise OSError(f"{path} is no regular file")
    size = path.stat().st_size
    if whole and size > FILE_BYTES:
        raise OSError(f"{path} has {size:,} bytes, and at most {FILE_BYTES:,} are read of such a file")
    return path.open("rb")


def read_text(path: Path) -> str:
    """The text of a file."""
    with open_file(path) as file:
        return file.read().decode(errors="replace")


def printable(text: str) -> str:
    """A line for a terminal, escaped and cut."""
    if len(text) > SHOWN:
        text = f"{text[:SHOWN]}... ({len(text):,} characters)"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
