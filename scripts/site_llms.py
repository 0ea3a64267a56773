"""Writes llms.txt of the site: its pages in their order, each with its first sentence, as llmstxt.org asks.

mkdocs.yml names this file as a hook.
"""

import re
from pathlib import Path
from typing import Any

_navigation: list[Any] = []


def first_sentence(markdown: str) -> str:
    """The first sentence of prose of a page, without its links; empty if it has none."""
    prose = re.sub(r"<!--.*?-->|^ *(```|~~~).*?^ *\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n", prose):
        if re.match(r"[\w`*\"(\[](?!\[)", block.strip()):
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(block.split())).replace("**", "")
            return re.split(r"(?<=[.?!])\s+(?=[A-Z`\"(])", text)[0].removesuffix(":")
    return ""


def on_nav(nav: Any, **kwargs: Any) -> None:
    """Called once, with the navigation."""
    _navigation[:] = nav.pages


def on_post_build(config: Any) -> None:
    """Called once, when all pages are written."""
    lines = [f"# {config['site_name']}", "", f"> {first_sentence(_navigation[0].markdown)}", "", "## Pages", ""]
    for page in _navigation:
        lines.append(f"- [{page.title}]({page.url or './'}): {first_sentence(page.markdown)}")
    Path(config["site_dir"], "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
