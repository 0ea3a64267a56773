"""How much of the package a reader has to hold in the head. ``python scripts/measure.py``

Tokens are Python's, without docstrings, comments and layout, so that lines may breathe. A setting is named in a file
where its name stands there as a name, an attribute, an argument or a text of its own. No test asserts these figures.
"""

import ast
import inspect
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import megatron_eopt
from megatron_eopt import TensorParallelMuon

PACKAGE = Path(megatron_eopt.__file__).parent
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Size(NamedTuple):
    """What one file, or several, have."""

    files: int
    tokens: int
    lines: int  # with at least one of the tokens
    raises: int

    @classmethod
    def of(cls, path: Path) -> "Size":
        """The size of a file."""
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        skipped = docstring_lines(tree)
        tokens = 0
        lines = set[int]()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in LAYOUT or token.start[0] in skipped:
                continue
            tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
        raises = sum(isinstance(node, ast.Raise) for node in ast.walk(tree))
        return cls(1, tokens, len(lines), raises)

    def plus(self, other: "Size") -> "Size":
        """Both together."""
        return Size(
            self.files + other.files,
            self.tokens + other.tokens,
            self.lines + other.lines,
            self.raises + other.raises,
        )


def docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of texts that are statements of their own."""
    lines = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            lines.update(range(node.lineno, node.end_lineno + 1))
    return lines


def room_of(path: Path) -> str:
    """The folder of a file in the package, or ``top``."""
    folder = path.parent.relative_to(PACKAGE)
    return folder.as_posix() if folder.parts else "top"


def names_in(path: Path) -> set[str]:
    """All names, attributes, arguments and whole texts of a file."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found.update(of_node(node))
    return found


def of_node(node: ast.AST) -> Iterator[str]:
    """The names that one node has."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.arg | ast.keyword) and node.arg is not None:
        yield node.arg
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from node.value.split()  # tables list several names in one text


def main() -> None:
    """Print the size of each room, and the files that name each setting of Muon."""
    files = sorted(PACKAGE.rglob("*.py"))
    rooms: dict[str, Size] = {}
    for path in files:
        room = room_of(path)
        rooms[room] = rooms.get(room, Size(0, 0, 0, 0)).plus(Size.of(path))
    whole = Size(0, 0, 0, 0)
    for size in rooms.values():
        whole = whole.plus(size)
    print(f"{'room':<22}{'files':>6}{'tokens':>9}{'code lines':>12}{'tokens/line':>13}{'raise':>7}")
    for room, size in [*sorted(rooms.items(), key=lambda item: -item[1].tokens), ("all", whole)]:
        share = size.tokens / max(1, size.lines)
        print(f"{room:<22}{size.files:>6}{size.tokens:>9,}{size.lines:>12,}{share:>13.1f}{size.raises:>7}")

    settings = inspect.signature(TensorParallelMuon.__init__).parameters.keys() - {"self", "params"}
    counts = Counter[str]()
    for path in files:
        counts.update(settings & names_in(path))
    mean = counts.total() / len(settings)
    print(f"\nsettings of TensorParallelMuon: {len(settings)}, each named in {mean:.1f} files")
    for name, count in counts.most_common():
        print(f"{count:>4}  {name}")


if __name__ == "__main__":
    main()
