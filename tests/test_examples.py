"""The examples for plain torch under torchrun: they train, and a resumed run prints the losses of the straight one."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_eopt

pytestmark = pytest.mark.wide

ROOT = Path(megatron_eopt.__file__).parent.parent
LOSS = re.compile(r"step (\d+) loss (\S+)")


def torchrun(script, *arguments):
    """Run an example on two ranks; its losses by step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *launcher, "--master-port", str(port), str(ROOT / "examples" / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(step): loss for step, loss in LOSS.findall(done.stdout)}


@pytest.mark.parametrize("script", ["train_fsdp2.py", "train_ddp.py"])
def test_an_example_trains_and_resumes_bit_for_bit(script, tmp_path):
    common = ("--optimizer", "muon", "--schedule", "restarts", "--restart-every", "6", "--steps", "10")
    straight = torchrun(script, *common, "--save", tmp_path, "--save-every", "8")
    assert list(straight) == list(range(1, 11))
    assert float(straight[10]) < float(straight[1]) - 0.5
    resumed = torchrun(script, *common, "--load", tmp_path / "8")
    assert resumed == {step: straight[step] for step in (9, 10)}
