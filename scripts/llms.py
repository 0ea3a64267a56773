"""The text of llms.txt: what the package is, and its pages in the order of the site, each with its first sentence.

It is of the form of llmstxt.org and follows from ``mkdocs.yml`` and the pages. ``python scripts/tables.py`` writes it,
and ``tests/test_release.py`` compares it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]

BESIDE = """## Optional

- [Changelog](CHANGELOG.md): what users notice of each release
- [Contributing](CONTRIBUTING.md): how to set up, test and propose a change
- [Security](SECURITY.md): what is trusted, and how to report
- [Examples](examples/README.md): a pretrain script, the demo, and training loops of plain torch
"""
"""What is not in the site; a reader with little room leaves a section of this name away."""


class _Loader(yaml.SafeLoader):
    """For a file of mkdocs, whose tags for its plugins are not followed."""


_Loader.add_multi_constructor("", lambda *_: None)


def first_paragraph(text: str) -> str:
    """The first paragraph of prose of a page, in one line and without its links; empty if it has none."""
    text = re.sub(r"\A---\n.*?^---$|<!--.*?-->|^ *(```|~~~).*?^ *\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = (block for block in re.split(r"\n\s*\n", text) if re.match(r"[\w`*\"(\[](?!\[)", block.strip()))
    paragraph = " ".join(next(prose, "").split())
    return re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", paragraph).replace("**", "")


def first_sentence(text: str) -> str:
    """The first sentence of a page."""
    paragraph = first_paragraph(text)
    return re.split(r"(?<=[.?!])\s+(?=[A-Z`\"(])", paragraph)[0].removesuffix(":")


def pages(nav: list[Any]) -> Iterator[tuple[str, str]]:
    """The title, empty where the page says it, and the path of each page of a navigation, in its order."""
    for entry in nav:
        for title, inside in [("", entry)] if isinstance(entry, str) else entry.items():
            yield from [(title, inside)] if isinstance(inside, str) else pages(inside)


def line(title: str, path: str) -> str:
    """A page as a link with its first sentence; what lies elsewhere as a link alone."""
    if ":" in path:
        return f"- [{title or path}]({path})"
    text = (ROOT / "docs" / path).read_text(encoding="utf-8")
    heading = re.search(r"^# +(.+?) *$", text, flags=re.MULTILINE)
    link = f"- [{title or (heading[1] if heading else path)}](docs/{path})"
    return ": ".join(filter(None, [link, first_sentence(text)]))


def made() -> str:
    """The text of llms.txt as it follows from the navigation and the pages."""
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)["nav"]
    sections: dict[str, list[str]] = {}
    for entry in nav:
        whole = isinstance(entry, dict) and all(isinstance(inside, list) for inside in entry.values())
        (name,) = entry if whole else ("Pages",)
        sections.setdefault(name, []).extend(line(title, path) for title, path in pages([entry]))
    about = first_paragraph((ROOT / "README.md").read_text(encoding="utf-8"))
    lists = (f"## {name}\n\n" + "\n".join(lines) + "\n" for name, lines in sections.items())
    return "\n".join([f"# megatron_eopt\n\n> {about}\n", *lists, BESIDE])
