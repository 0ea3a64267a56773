"""The messages that docs/troubleshooting.md quotes are messages of the package."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"(?<!<!-- output -->)\n\n```\n(.*?)```", PAGE, re.DOTALL)


def text_of(node):
    """A string of the code, with a mark for each value that is put into it."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in parts)


@pytest.fixture(scope="module")
def messages():
    trees = [ast.parse(path.read_text()) for path in (ROOT / "megatron_eopt").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    texts += [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(" ".join(text_of(node).split()) for node in texts)


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_is_one_of_the_package(quoted, messages):
    parts = [part.strip(" ,:") for part in " ".join(quoted.split()).split("...")]
    assert not [part for part in parts if part not in messages]
