"""The pages: their site builds, every page is in it, and the links and the files that they name are there."""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml
from docstrings import as_markdown
from markdown.extensions.toc import slugify
from whole_flags import on_page_content

import megatron_eopt

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "examples/README.md"])
# Folders that commands make: nothing of them is in the repository.
MADE = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if line.startswith("/")]
SOURCES = {
    path.name for room in ("megatron_eopt", "tests", "examples", "scripts") for path in ROOT.glob(room + "/**/*")
}
MOST_WORDS = 1500  # of prose on a page


def without_code(text):
    return re.sub(r"^ *(```|~~~).*?^ *\1", "", text, flags=re.DOTALL | re.MULTILINE)


def prose(text):
    """The words of a page outside of code, tables, comments and addresses of links."""
    text = re.sub(r"<!--.*?-->", "", without_code(text), flags=re.DOTALL)
    text = re.sub(r"^( *\||:::| {4}).*$", "", text, flags=re.MULTILINE)  # tables, directives, indented code
    return re.findall(r"\S*\w\S*", re.sub(r"\]\([^)\s]*\)", "]", text))


def headings(text):
    return re.findall(r"^#+ +(.+?) *#*$", without_code(text), flags=re.MULTILINE)


def anchors(text):
    """What a link to a heading may say, by mkdocs' own rule."""
    return {slugify(re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading), "-") for heading in headings(text)}


def broken_links(page, root=ROOT):
    """The relative links of a page that lead nowhere, with the reason."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(found.read_text()):
            yield f"{target}: no such heading"
        elif not found.is_relative_to(root):
            yield f"{target}: outside of the repository"


def missing_files(page, root=ROOT):
    """What a page names in backticks as a file or folder of the repository, and is none."""
    for named in re.findall(r"`([^`\n]+)`", without_code(page.read_text())):
        is_path = re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", named) and ("/" in named or named.endswith((".py", ".md")))
        if not is_path or named.split("/")[0] in MADE:
            continue
        beside = (root / named).exists() or (page.parent / named).exists()
        if not beside and ("/" in named or named not in SOURCES):
            yield named


def test_links_lead_somewhere_and_named_files_exist():
    for page in PAGES:
        assert not [f"{page}: {link}" for link in broken_links(page)]
        assert not [f"{page}: {name}" for name in missing_files(page)]


def test_what_is_missing_is_found(tmp_path):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/page.md"
    page.write_text(
        "# A *page*, and `more`\n[a](#a-page-and-more) [b](#b) [c](c.md) [d](https://x.org/c.md) [e](page.md#e)\n"
        "`docs/page.md` `page.md` `docs/gone.py` `gone.py` `a / b` `demo-out/x.py` `--flag` `docs/`\n"
        "```\n[f](f.md) `gone/f.py`\n```\n"
    )
    assert [each.split(":")[0] for each in broken_links(page, tmp_path)] == ["#b", "c.md", "page.md#e"]
    assert list(missing_files(page, tmp_path)) == ["docs/gone.py", "gone.py"]


def test_no_page_is_too_long():
    for page in ROOT.glob("docs/**/*.md"):
        words = len(prose(page.read_text()))
        assert words <= MOST_WORDS, (
            f"{page.relative_to(ROOT)} has {words} words of prose, and may have {MOST_WORDS}: move what was "
            f"measured to docs/benchmarks.md"
        )


def is_there(name):
    """Whether a dotted name is that of a module, or of something in one."""
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def imported(page):
    """Dotted names of this package that the Python of a page imports."""
    for code in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        for node in ast.walk(ast.parse(textwrap.dedent(code))):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "megatron_eopt":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_names_of_the_package_in_pages_and_docstrings_exist():
    named = set()
    for page in PAGES:
        named |= {*re.findall(r"`(megatron_eopt(?:\.\w+)+)(?:\([^`]*\))?`", without_code(page.read_text()))}
        named |= {*imported(page)}
    for path in (ROOT / "megatron_eopt").rglob("*.py"):
        role = r":(?:class|func|mod|meth|data|attr):`~?(megatron_eopt(?:\.\w+)+)`"
        named |= {*re.findall(role, path.read_text())}
    assert "megatron_eopt.Muon" in named
    assert not [name for name in named if not is_there(name)]


def listed(nav):
    """The pages of a navigation, of its sections too, in its order."""
    for entry in [nav] if isinstance(nav, str) else nav:
        yield from [entry] if isinstance(entry, str) else listed(*entry.values())


def test_every_page_is_in_the_navigation_once():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(listed(nav)) == sorted(str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md"))


def crowded(entries):
    """Sections of a navigation that open more than twelve entries."""
    for section in (entry for entry in entries if isinstance(entry, dict)):
        for title, inside in section.items():
            if isinstance(inside, list):
                yield from [title] if len(inside) > 12 else []
                yield from crowded(inside)


def test_no_section_opens_more_than_twelve_entries():
    assert not list(crowded(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, which was built strictly."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_builds_strictly(site):
    assert (site / "index.html").exists()


def test_the_first_view_has_few_entries_and_no_open_section(site):
    home = (site / "index.html").read_text()
    assert 0 < home.count('class="md-tabs__item') <= 12
    sections = re.findall(r'<input class="md-nav__toggle[^>]*id="__nav_[^>]*>', home)
    assert sections
    assert not [section for section in sections if "checked" in section]


def loaded(page):
    """Addresses of what a page or a stylesheet loads when it is read."""
    if page.suffix == ".css":
        return re.findall(r"""(?:url\(|@import)\s*["']?([^"')\s]+)""", page.read_text())
    tags = re.findall(r"<(?:script|link|img|iframe|source|object|embed)\b[^>]*>", page.read_text())
    return re.findall(r"""\b(?:src|href|data)=["']?([^"'\s>]+)""", "".join(tags))


def test_the_site_loads_nothing_from_elsewhere(site):
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert not [(file.name, url) for file in files for url in loaded(file) if re.match(r"(https?:)?//", url)]


def test_what_a_page_loads_is_found(tmp_path):
    page, style = tmp_path / "page.html", tmp_path / "page.css"
    page.write_text('<a href="https://a"><link rel="x" href="//b/c.css"><script defer src=https://d/e.js></script>')
    style.write_text('@import "//f.css"; x { src: url(https://g/h.woff2); background: url("data:i") }')
    assert loaded(page) == ["//b/c.css", "https://d/e.js"]
    assert loaded(style) == ["//f.css", "https://g/h.woff2", "data:i"]


def test_flags_stay_whole_in_text_and_not_in_blocks():
    html = "<code>-m x --muon-lr 1</code> <pre><span></span><code>--lr 1</code></pre> <code>a--b</code>"
    assert on_page_content(html) == html.replace("--muon-lr", '<span class="flag">--muon-lr</span>')


def test_every_public_name_is_in_the_reference():
    pages = "\n".join(page.read_text() for page in ROOT.glob("docs/**/*.md"))
    documented = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", pages, flags=re.MULTILINE)}
    assert documented >= set(megatron_eopt.__all__)


def test_the_reference_has_what_the_docstrings_say(site):
    page = (site / "python" / "index.html").read_text()
    assert "decay the parameter (as AdamW does), or add to the gradient" in page
    name = "megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon"
    assert f'href="#{name}"><code>TensorParallelMuon</code></a>' in page
    pages = {page.parent.name: page.read_text() for page in site.glob("**/index.html")}
    assert not [name for name, page in pages.items() if re.search(r":(class|func|meth|mod|data|attr):", page)]


def test_a_docstring_becomes_markdown():
    text = "See :func:`~a.b.c` and :meth:`d`::\n\n    e::f"
    assert as_markdown(text, "a.X") == (
        'See <autoref identifier="a.X.a.b.c" optional><code>c</code></autoref> and '
        '<autoref identifier="a.X.d" optional><code>d</code></autoref>:\n\n    e::f'
    )
    assert 'identifier="megatron_eopt.x"' in as_markdown(":mod:`megatron_eopt.x`", "a.X")
