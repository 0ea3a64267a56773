"""Places of tables in pages: what stands between ``<!-- MARK -->`` and ``<!-- end -->``, and Markdown tables."""

from collections.abc import Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
BENCHMARKS = "benchmarks.md"  # the page of measured tables


def between(page: str, mark: str) -> str:
    """The lines of a page between ``<!-- MARK -->`` and the next ``<!-- end -->``.

    Raises:
        ValueError: the page lacks one of them.
    """
    return _parts(page, mark)[1]


def replaced(page: str, mark: str, lines: str) -> str:
    """The page with other lines between the two comments of :func:`between`."""
    before, _, after = _parts(page, mark)
    return f"{before}\n\n{lines.strip()}\n\n{after}"


def _parts(page: str, mark: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {mark} -->", "<!-- end -->"
    before, found, rest = page.partition(begin)
    inside, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"expected '{begin}' and after it '{end}' around a table, and found {begin!r}: {bool(found)}")
    return before + begin, inside, end + after


def put(page: str | Path, mark: str, lines: str) -> None:
    """Write lines into their place of a page, which is named by its path in docs/ or its whole one."""
    path = DOCS / page
    path.write_text(replaced(path.read_text(encoding="utf-8"), mark, lines), encoding="utf-8")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    first, *others = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *others])
