"""The launcher runs a script or a module as python itself does, with Megatron prepared."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_eopt.run import main

ROOT = Path(__file__).parent.parent
SCRIPT = """
import json, os, sys
import helper
from megatron.core.optimizer import _EMERGING_OPTIMIZERS
from megatron_eopt import EMERGING_OPTIMIZERS
from megatron_eopt.tools import cpu
print(json.dumps({
    "name": __name__, "argv": sys.argv, "helper": helper.__file__, "cpu": cpu.installed(),
    "ours": _EMERGING_OPTIMIZERS == dict(EMERGING_OPTIMIZERS),
}))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("")
    return tmp_path


def launch(cwd, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "megatron_eopt.run", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_a_script_with_its_arguments(folder):
    done = launch(folder.parent, str(folder / "script.py"), "--cpu", "-m", "x", "--help")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "name": "__main__",
        "argv": [str(folder / "script.py"), "--cpu", "-m", "x", "--help"],
        "helper": str(folder / "helper.py"),
        "cpu": False,
        "ours": True,
    }


@pytest.mark.wide
def test_a_module_with_its_arguments_on_the_cpu(folder):
    done = launch(folder, "--cpu", "-m", "script", "--lr", "1")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["argv"] == [str(folder / "script.py"), "--lr", "1"]
    assert said["cpu"] is said["ours"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a script, or -m and a module"),
        (["-m"], "expected a script, or -m and a module"),
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        (["-m", "nope", "--lr", "1"], "there is no module 'nope'"),
    ],
)
def test_what_cannot_be_run(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.setattr(sys, "path", [*sys.path])  # whose first entry becomes the script's
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    # under torchrun every rank says so to its report, which has it once
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit):
        main(arguments)
    assert capsys.readouterr().err == ""
    assert message in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


@pytest.mark.wide
def test_a_start_without_a_makefile_goes_on(folder):
    """Megatron's wheel has no Makefile, and what a start on a GPU builds by it is in the wheel."""
    (folder / "script.py").write_text(
        "from megatron.core.datasets import utils\nutils.compile_helpers()\n"
        "from megatron.core.datasets import helpers_cpp\nprint('went on')\n"
    )
    done = launch(folder, "script.py")
    assert done.stdout.splitlines()[-1:] == ["went on"], done.stderr
