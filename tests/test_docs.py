"""The pages: their site builds, and the links, files, flags and names that they have exist."""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
from markdown.extensions.toc import slugify
from megatron.training.arguments import add_megatron_arguments

import megatron_eopt
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.megatron.command_line import amend

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob(".github/*.md"), ROOT / "examples/README.md"])
# Folders that commands make: nothing of them is in the repository.
MADE = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if line.startswith("/")]
SOURCES = {
    path.name for room in ("megatron_eopt", "tests", "examples", "scripts") for path in ROOT.glob(room + "/**/*")
}
MOST_WORDS = 1500  # of prose on a page
LATER = {"--muon-use-syrk", "--muon-no-split-glu"}  # of Megatron-Core 0.20


def without_code(text):
    return re.sub(r"^ *(```|~~~).*?^ *\1", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text):
    """What a link to a heading may say, by mkdocs' own rule."""
    headings = re.findall(r"^#+ +(.+?) *#*$", without_code(text), flags=re.MULTILINE)
    return {slugify(re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading), "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found.read_text()), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_names_of_a_page_exist(page):
    for named in re.findall(r"`([^`\n]+)`", without_code(page.read_text())):
        if re.fullmatch(r"megatron_eopt(\.\w+)+(\(.*\))?", named):
            resolve_name(named.partition("(")[0])
        is_path = re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", named) and ("/" in named or named.endswith((".py", ".md")))
        if is_path and named.split("/")[0] not in MADE:
            beside = (ROOT / named).exists() or (page.parent / named).exists()
            assert beside or ("/" not in named and named in SOURCES), named


def test_flags_of_the_pages_exist():
    """Those of optimizers: others may be of torchrun, pip and frameworks."""
    parser = amend(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    names = "|".join(["optimizer", *(name.replace("_", "-") for name in OPTIMIZERS)])
    for page in PAGES:
        named = {*re.findall(rf"(?<![\w-])--(?:{names})-[\w-]*\w", page.read_text())}
        assert named <= parser._option_string_actions.keys() | LATER, page


def test_names_in_docstrings_exist():
    for path in (ROOT / "megatron_eopt").rglob("*.py"):
        for name in re.findall(r":(?:class|func|mod|meth|data|attr):`~?(megatron_eopt(?:\.\w+)+)`", path.read_text()):
            resolve_name(name)


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda page: page.stem)
def test_a_page_is_not_too_long(page):
    text = re.sub(r"<!--.*?-->", "", without_code(page.read_text()), flags=re.DOTALL)
    text = re.sub(r"^( *\||:::| {4}).*$", "", text, flags=re.MULTILINE)  # tables, directives, indented code
    assert len(re.findall(r"\S*\w\S*", re.sub(r"\]\([^)\s]*\)", "]", text))) <= MOST_WORDS


def test_every_public_name_is_in_the_reference():
    page = (ROOT / "docs/python.md").read_text()
    documented = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)}
    assert documented >= set(megatron_eopt.__all__)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages as a reader has them, built strictly: all in the navigation, no link and no docstring missing."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {path.parent.name: path.read_text() for path in folder.glob("*/index.html")}


def test_no_list_of_the_site_ends_in_a_paragraph(site):
    """The site's Markdown wants four blanks where GitHub's takes three."""
    for name, html in site.items():
        for paragraph in re.findall(r"<p>.*?</p>", html, flags=re.DOTALL):
            assert not re.search(r"\n(\d+\.|[-*|]) ", paragraph), (name, paragraph)


def test_cells_of_the_site_have_the_names_of_their_columns(site):
    assert '<td data-column="with match_adamw">True</td>' in site["plain-torch"]
