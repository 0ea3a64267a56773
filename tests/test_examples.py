"""The examples for plain torch under torchrun: they train, and a resumed run prints the losses of the straight one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_eopt

pytestmark = pytest.mark.wide

ROOT = Path(megatron_eopt.__file__).parent.parent
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # that torchrun sets
LOSS = re.compile(r"step (\d+) loss (\S+)")


def run(*command):
    """Run Python with a command line, and return what became of it."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {name: value for name, value in os.environ.items() if name not in RANKS}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


def torchrun(script, *arguments):
    """Run an example on two ranks; its losses by step."""
    done = run(ROOT / "examples/loopback.py", "--nproc-per-node", 2, ROOT / "examples" / script, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(step): loss for step, loss in LOSS.findall(done.stdout)}


@pytest.mark.parametrize("script", ["train_fsdp2.py", "train_ddp.py"])
def test_an_example_trains_and_resumes_bit_for_bit(script, tmp_path):
    common = ("--optimizer", "muon", "--schedule", "restarts", "--restart-every", "6")
    straight = torchrun(script, *common, "--steps", "11", "--save", tmp_path / "straight", "--save-every", "8")
    assert list(straight) == list(range(1, 12))
    assert float(straight[11]) < float(straight[1]) - 0.5
    assert sorted(path.name for path in (tmp_path / "straight").iterdir()) == ["11", "8"]
    again = tmp_path / "again"
    resumed = torchrun(script, *common, "--steps", "10", "--load", tmp_path / "straight/8", "--save", again)
    assert resumed == {step: straight[step] for step in (9, 10)}
    assert [path.name for path in again.iterdir()] == ["10"]  # its end, whatever the interval
    if script == "train_fsdp2.py":  # once, because a start takes seconds
        assert torchrun(script, *common, "--steps", "11", "--load", again / "10") == {11: straight[11]}


def test_an_example_without_torchrun_says_how_to_start_it():
    path = ROOT / "examples/train_ddp.py"
    done = run(path, "--steps", "3")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith(f" Write\n    torchrun --nproc-per-node 2 {path} --steps 3\n")
