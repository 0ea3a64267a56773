"""Blocks of the pages, run as they are written.

The Python blocks of a page are one program. A comment ``<!-- given: CODE -->`` before one has what its reader has, such
as a model. Those in bash run after ``<!-- run -->``, one after another, in a folder in which ``megatron_eopt`` is this
repository. What stands in a fence after ``<!-- output -->`` is what the block prints, with ``...`` for what varies from
machine to machine.
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
    r"(?:^<!-- (run|given: .*?) -->\n\n)?^```(python|bash)\n(.*?)^```$(?:\n\n<!-- output -->\n\n```\n(.*?)^```$)?",
    flags=re.MULTILINE | re.DOTALL,
)
END = "<end of a block>"


class Block(NamedTuple):
    """A block, and what the page says that it prints: nothing is said by an empty text."""

    before: str
    language: str
    code: str
    output: str


def cases():
    """The blocks of each page that run one after another: those of one language."""
    for page in sorted({*ROOT.glob("docs/*.md")} - {ROOT / "docs/frameworks.md"}):  # whose blocks are of others
        found = [Block(*groups) for groups in BLOCK.findall(page.read_text())]
        python = [block for block in found if block.language == "python"]
        bash = [block for block in found if block.language == "bash" and block.before == "run"]
        yield from (pytest.param(own, id=f"{page.stem} {own[0].language}") for own in (python, bash) if own)


def programs(own):
    """What is run in a process each."""
    if own[0].language == "bash":
        return [["bash", "-euo", "pipefail", "-c", f"{block.code}\necho '{END}'"] for block in own]
    given = [block.before.removeprefix("given: ") if block.before.startswith("given") else "" for block in own]
    code = [f"{before}\n{block.code}\nprint({END!r})\n" for before, block in zip(given, own, strict=True)]
    return [[sys.executable, "-c", "".join(code)]]


@pytest.mark.wide
@pytest.mark.parametrize("own", [*cases()])
def test_blocks_run_and_print_what_the_page_says(own, tmp_path):
    (tmp_path / "megatron_eopt").symlink_to(ROOT)
    write_torchrun(tmp_path / "bin")
    paths = [tmp_path / "bin", Path(sys.executable).parent, os.environ["PATH"]]
    environment = os.environ | {"PATH": os.pathsep.join(map(str, paths)), "PYTHONPATH": str(ROOT)}
    environment |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    printed = ""
    for command in programs(own):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
        )
        logs = [log.read_text()[-4000:] for log in tmp_path.glob("*.log")]
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:] + "".join(logs)
        printed += done.stdout
    for block, found in zip(own, printed.split(f"{END}\n"), strict=False):
        found, wanted = ("\n".join(map(str.rstrip, text.strip().splitlines())) for text in (found, block.output))
        expected = re.escape(wanted).replace(r"\.\.\.", ".*?")
        assert not wanted or re.fullmatch(expected, found, flags=re.DOTALL), found
