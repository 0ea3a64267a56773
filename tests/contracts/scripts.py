"""Scripts as users have them, each in a process of its own, and what the page of frameworks tells users to write."""

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.megatron.runs import ROOT


def run_script(script, *folders, ranks=1, **more):
    """Run a script, which asserts, with folders on the path and more in the environment; what it has said."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
        **more,
    }
    command = [sys.executable, "-c", script]
    if ranks > 1:
        file = folders[0] / "script.py"
        file.write_text(script)
        command = [sys.executable, ROOT / "examples/loopback.py", "--nproc-per-node", str(ranks), file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def block(section):
    """What stands in the fence of a section of ``docs/frameworks.md``."""
    text = re.split(r"^## ", (ROOT / "docs/frameworks.md").read_text(), flags=re.MULTILINE)
    (found,) = [part for part in text if part.startswith(f"{section}\n")]
    return re.search(r"^```\w*\n(.*?)^```$", found, flags=re.MULTILINE | re.DOTALL)[1]


def words(section):
    """The words of a section's command."""
    return [word for word in shlex.split(block(section).replace("\\\n", "")) if word != "..."]


def own(package, path, *names, **around):
    """Functions and classes of a framework's own file, without the rest of it, which needs what is not there."""
    (folder,) = importlib.util.find_spec(package).submodule_search_locations
    tree = ast.parse((Path(folder) / path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
    named = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names)
    tree.body = [*named]
    exec(compile(tree, path, "exec"), around)
    return [around[name] for name in names]
