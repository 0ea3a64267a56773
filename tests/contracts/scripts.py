"""Scripts as users have them, each in a process of its own."""

import os
import subprocess
import sys

from tests.megatron.runs import ROOT


def run_script(script, *folders, **more):
    """Run a script, which asserts, with folders on the path and more in the environment; what it has said."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT))),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
        **more,
    }
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr
