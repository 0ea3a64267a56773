"""The command line: what it takes, what it refuses, and what it says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_eopt
from megatron_eopt.cli import COMMANDS, main

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan --", "expected the flags of a pretrain command after --"),
        ("plan --num-layers 2", "unrecognized arguments: --num-layers 2 (the flags of a run stand after --)"),
        ("plan --world-size many -- --num-layers 2", "argument --world-size: invalid int value: 'many'"),
        ("doctor -- --bf16", "nothing is expected after --, got --bf16"),
    ],
)
def test_what_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main([*arguments.split()])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 2  # one of usage


def test_help_and_version_are_told_at_once():
    """Without torch, whose import takes longer than all else; the names of the package bring it when they are used."""
    code = (
        "import sys\n"
        "from megatron_eopt.cli import COMMANDS, main\n"
        "for line in ('--version', '--help', *(f'{name} --help' for name in COMMANDS)):\n"
        "    try:\n"
        "        main(line.split())\n"
        "    except SystemExit as ended:\n"
        "        assert ended.code == 0\n"
        "assert 'torch' not in sys.modules\n"
        "import megatron_eopt\n"
        "assert {'Muon', 'Lion', 'activate'} <= set(dir(megatron_eopt))\n"
        "from megatron_eopt.optimizers import Scion\n"
        "from megatron_eopt import *\n"
        "assert Scion is megatron_eopt.Scion is megatron_eopt.registry.get_optimizer_entry('scion').optimizer_cls\n"
        "assert all(name in globals() for name in megatron_eopt.__all__)\n"
        "assert not hasattr(megatron_eopt, 'OptimizerSpec') and not hasattr(megatron_eopt, 'nothing')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    version, *usage = done.stdout.splitlines()
    assert version == f"megatron-eopt {megatron_eopt.__version__}"
    assert usage[0] == "usage: megatron-eopt [-h] [--version] COMMAND ..."
    for command in COMMANDS:
        assert any(line.split()[:1] == [command] for line in usage)


def test_it_fits_a_terminal_of_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    main(["doctor"])
    with pytest.raises(SystemExit):
        main(["plan", "--world-size", "many", "--", "--num-layers", "2", "--hidden-size", "64"])
    said = capsys.readouterr()
    assert len(said.out.splitlines()) > 5
    assert "invalid int value: 'many'" in " ".join(said.err.splitlines())
    assert max(map(len, (said.out + said.err).splitlines())) <= 80


def test_a_reader_that_has_read_enough_is_no_error():
    code = "import sys; from megatron_eopt.cli import main; sys.exit(main(['doctor']))"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert "Broken pipe" not in process.stderr.read()
