"""Text in aligned columns of a bounded width."""

import re
from collections.abc import Callable, Sequence
from itertools import zip_longest

_GAP = "  "
_UNBROKEN = 24
_NAMES_BEFORE_OTHERS = 3
# Behind blanks, and behind dots that are no part of a number.
_BREAK = re.compile(r"(?<= )|(?<=\.)(?=[^0-9 ])")


def aligned(
    header: Sequence[str], lines: Sequence[Sequence[str]], width: int, numbers: Sequence[str] = ()
) -> list[str]:
    """A table as lines of text: columns as wide as their content, and cells on several lines where it is too much.

    The first column is for names, and is made narrower last. In columns of more than two dozen characters words may
    be cut, so that any content fits.

    Args:
        header: titles of the columns.
        lines: cells, as many as there are titles.
        width: of the table at most, unless its columns cannot be that narrow.
        numbers: titles of the columns that are aligned to the right.
    """
    columns = list(zip(header, *lines, strict=True))
    widths = _widths(columns, width)
    justify: list[Callable[[str, int], str]] = [str.rjust if title in numbers else str.ljust for title in header]

    def printed(cells: Sequence[str]) -> list[str]:
        wrapped = [_wrapped(cell, size) for cell, size in zip(cells, widths, strict=True)]
        return [
            _GAP.join(put(text, size) for put, text, size in zip(justify, texts, widths, strict=True)).rstrip()
            for texts in zip_longest(*wrapped, fillvalue="")
        ]

    rule = "-" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    return [*printed(header), rule, *(text for cells in lines for text in printed(cells))]


def _widths(columns: Sequence[Sequence[str]], width: int) -> list[int]:
    # a title is no reason for a wide column, its longest word is
    widths = [max(_longest_word(title), *map(len, cells), 0) for title, *cells in columns]
    least = [min(size, _UNBROKEN, max(map(_longest_word, cells))) for size, cells in zip(widths, columns, strict=True)]
    weights = [_NAMES_BEFORE_OTHERS, *[1] * (len(columns) - 1)]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        wide = [place for place, size in enumerate(widths) if size > least[place]]
        if not wide:
            break
        widths[max(wide, key=lambda place: widths[place] / weights[place])] -= 1
    return widths


def _longest_word(text: str) -> int:
    return max(len(piece.rstrip()) for piece in _BREAK.split(text))


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for piece in _BREAK.split(text):
        if len((lines[-1] + piece).rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]
