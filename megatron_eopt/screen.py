"""What commands print: tables of 80 columns, prose as wide as the terminal, and how far long work has come."""

import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

_WIDEST = 24  # of a column but the first
_QUIET = 1.0  # seconds: what is done by then shows no progress
_AGAIN = 0.2  # seconds between two looks at it


def wrapped(text: str, indent: str = "", hanging: str = "") -> str:
    """A line in the columns of the terminal; as it is where stdout is none, for ``grep``.

    Words are not broken, so that names and paths can be copied.
    """
    if not sys.stdout.isatty():
        return indent + text
    return textwrap.fill(
        text,
        shutil.get_terminal_size().columns,
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


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


def megabytes(count: int) -> str:
    """Bytes as MB, with three digits or more."""
    return figure(count / 1e6)


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, as people say them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def progress[T](done: Iterable[T], sizes: Sequence[float], what: str) -> Iterator[T]:
    """The items of ``done``, with a line on stderr that says how far they are and how long the rest takes.

    Nothing is said where stderr is no terminal, nor of what takes less than a second.

    Args:
        done: what becomes ready one after the other.
        sizes: of each item, in any unit of work.
        what: names the work.
    """
    start = time.monotonic()
    last = start + _QUIET - _AGAIN
    whole = sum(sizes)
    ready = 0.0
    shown = False
    for item, size in zip(done, sizes, strict=True):
        ready += size
        now = time.monotonic()
        if sys.stderr.isatty() and now > last + _AGAIN and ready:
            last = now
            shown = True
            left = (now - start) * (whole - ready) / ready
            print(f"\r{what}: {ready / whole:4.0%}, {duration(left)} left\x1b[K", end="", file=sys.stderr, flush=True)
        yield item
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
