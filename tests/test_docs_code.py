"""Blocks of the pages that are marked as runnable, run as they are written.

``<!-- run -->`` stands before the fence of one, ``<!-- run wide -->`` where it trains with Megatron or takes long. The
blocks of a page follow one another: those in Python are one program, those in bash share a folder, in which
``megatron_eopt`` is this repository. What stands in a fence after ``<!-- output -->`` is what the block prints, with
``...`` for what differs from machine to machine.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.megatron.runs import write_torchrun

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"^<!-- run( wide)? -->\n\n```(\w+)\n(.*?)^```$(?:\n\n<!-- output -->\n\n```\w*\n(.*?)^```$)?",
    flags=re.MULTILINE | re.DOTALL,
)
MARK = re.compile(r"^<!-- (?:run|run wide|output) -->$", flags=re.MULTILINE)
GUIDES = """quick-start adam-to-muon choosing troubleshooting from-megatrons-muon from-emerging-optimizers plain-torch
    presets overrides logical-matrices planning metrics""".split()


class Block(NamedTuple):
    """A runnable block, and what the page says that it prints; None where it says nothing."""

    language: str
    code: str
    output: str | None
    wide: bool


def blocks(page):
    """The runnable blocks of a page, in their order."""
    return [Block(language, code, output or None, bool(wide)) for wide, language, code, output in BLOCK.findall(page)]


def cases():
    """The blocks of each page that run one after another: those of one language, wide ones apart."""
    for page in sorted(ROOT.glob("docs/**/*.md")):
        found = blocks(page.read_text())
        for language, wide in sorted({(block.language, block.wide) for block in found}):
            own = [block for block in found if (block.language, block.wide) == (language, wide)]
            name = f"{page.relative_to(ROOT / 'docs')} {language}"
            yield pytest.param(own, id=name, marks=[pytest.mark.wide] if wide else [])


def prints(expected, printed):
    """Whether a text is what was printed, but for spaces at the ends of lines; ``...`` stands for anything."""
    found, wanted = ("\n".join(line.rstrip() for line in text.strip().splitlines()) for text in (printed, expected))
    return re.fullmatch(re.escape(wanted).replace(r"\.\.\.", ".*?"), found, flags=re.DOTALL) is not None


def environment(folder):
    here = folder / "bin"
    write_torchrun(here)
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(here), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
    }


def executed(own, folder):
    """Run blocks one after another in a fresh process each, those in Python in one; what each of them printed."""
    (language,) = {block.language for block in own}
    end = "<end of a block>"
    if language == "python":
        program = "".join(f"{block.code}\nprint({end!r}, flush=True)\n" for block in own)
        commands = [[sys.executable, "-c", program]]
    else:
        commands = [["bash", "-euo", "pipefail", "-c", f"{block.code}\necho '{end}'"] for block in own]
    printed = ""
    for command in commands:
        done = subprocess.run(
            command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=500, check=False
        )
        logs = [f"\n{log.name}:\n{log.read_text()[-4000:]}" for log in folder.glob("*.log")]
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:] + "".join(logs)
        printed += done.stdout
    return printed.split(f"{end}\n")[: len(own)]


@pytest.mark.parametrize("own", [*cases()])
def test_blocks_run_and_print_what_the_page_says(own, tmp_path):
    (tmp_path / "megatron_eopt").symlink_to(ROOT)
    for block, printed in zip(own, executed(own, tmp_path), strict=True):
        assert block.output is None or prints(block.output, printed), printed


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: page.stem)
def test_every_mark_is_before_a_block(page):
    text = page.read_text()
    found = blocks(text)
    marked = len(found) + sum(block.output is not None for block in found)
    assert len(MARK.findall(text)) == marked


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_has_a_block_that_runs(guide):
    assert blocks((ROOT / "docs" / f"{guide}.md").read_text())


def test_a_block_that_fails_or_prints_something_else_is_found(tmp_path):
    page = "<!-- run -->\n\n```python\nx = 1\nprint(x)\n```\n\n<!-- output -->\n\n```\n2\n```\n"
    page += "\n<!-- run -->\n\n```python\nprint(x + 1)\n```\n\n```python\nnever run\n```\n"
    found = blocks(page)
    assert found == [
        Block("python", "x = 1\nprint(x)\n", "2\n", False),
        Block("python", "print(x + 1)\n", None, False),
    ]
    assert executed(found, tmp_path) == ["1\n", "2\n"]
    assert not prints("2\n", "1\n")
    assert prints("a ...\nc", "a  x\ny\nc  \n")
    with pytest.raises(AssertionError, match="NameError"):
        executed([Block("bash", "python -c 'print(y)' | cat", None, False)], tmp_path)
