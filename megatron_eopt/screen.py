"""What commands print: tables of 80 columns, prose as wide as the terminal, how far long work has come, and errors."""

import argparse
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn, TextIO

_WIDEST = 24  # of a column but the first
_SHOWN = 2000  # characters of what a file says
_QUIET = 1.0  # seconds: what is done by then shows no progress


def wrapped(text: str, indent: str = "", hanging: str = "", to: TextIO | None = None) -> str:
    """A line in the columns of the terminal; as it is where ``to`` is none, for ``grep``.

    Words are not broken, so that names and paths can be copied. ``to`` is stdout by default.
    """
    if not (to or sys.stdout).isatty():
        return indent + text
    return textwrap.fill(
        text,
        shutil.get_terminal_size().columns,
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def printable(text: str) -> str:
    """What a file says as one line for a terminal, escaped and cut."""
    if len(text) > _SHOWN:
        text = f"{text[:_SHOWN]}... ({len(text):,} characters)"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def aligned(
    header: Sequence[str], lines: Sequence[Sequence[str]], numbers: Sequence[str], wrap: bool = True
) -> list[str]:
    """A table as lines of text.

    Titles are wrapped, and so are wide columns but the first if ``wrap``. ``numbers`` are titles of columns that are
    aligned to the right.
    """
    columns: list[list[list[str]]] = []
    widths = []
    for title, *cells in zip(header, *lines, strict=True):
        width = max(map(len, [*title.split(), *cells]))
        if wrap and columns:
            width = min(width, _WIDEST)
        parts_of = []
        for cell in (title, *cells):
            parts_of.append(textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False))
        columns.append(parts_of)
        widths.append(max(len(line) for cell in parts_of for line in cell))
    text = []
    for row in zip(*columns, strict=True):
        for parts in zip_longest(*row, fillvalue=""):
            line = []
            for title, part, width in zip(header, parts, widths, strict=True):
                line.append(part.rjust(width) if title in numbers else part.ljust(width))
            text.append("  ".join(line).rstrip())
    height = max(len(column[0]) for column in columns)  # of the titles
    text.insert(height, "-" * (sum(widths) + 2 * len(widths) - 2))
    return text


def figure(value: float) -> str:
    """A number in three digits, or without decimals."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def span(values: Sequence[float], digits: int = 3) -> str:
    """The smallest and the largest of some numbers, or the one that they are."""
    return " to ".join(dict.fromkeys(f"{value:.{digits}g}" for value in (min(values), max(values))))


def megabytes(count: float) -> str:
    """Bytes as MB, with three digits or more."""
    return figure(count / 1e6)


def counted(count: int, noun: str) -> str:
    """A number and what it counts, as in ``1 rank`` and ``2 ranks``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return the first names and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, as people say them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def progress[T](items: Iterable[T], sizes: Sequence[float], what: str) -> Iterator[T]:
    """The items, with a line on stderr that says how much of them is done and how long the rest takes.

    It is there while the next item is waited for, or worked on, and not while the caller prints. Nothing is said where
    stderr is no terminal, nor of what takes less than a second.

    Args:
        items: what becomes ready, or is worked on, one after the other.
        sizes: of each, in any unit of work.
        what: names the work.
    """
    start = time.monotonic()
    whole = sum(sizes)
    done = 0.0
    line = ""
    for item, size in zip(items, sizes, strict=True):
        if line:
            _on_terminal("\r\x1b[K")
        yield item
        done += size
        seconds = time.monotonic() - start
        if seconds > _QUIET and done and sys.stderr.isatty():
            line = f"{what}: {done / whole:.0%} done, {duration(seconds * (whole - done) / done)} left"
            _on_terminal(line)
    if line:
        _on_terminal("\r\x1b[K")


def _on_terminal(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def tell_torchrun(error: str) -> bool:
    """Put an error in torchrun's report; whether torchrun started us."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None and not Path(file).exists():  # else the script itself has recorded more
        said = {"message": error, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": said}))
    return file is not None


def refuse_once(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """End with a parser's error: in torchrun's report for all ranks together, else on stderr."""
    if tell_torchrun(f"{parser.prog}: error: {message}"):
        parser.exit(2)
    type(parser).error(parser, message)
