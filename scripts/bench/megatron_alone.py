"""Run a Megatron script with Megatron's own optimizers: ``python megatron_alone.py [--cpu] SCRIPT ARGS``."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    del sys.argv[0]
    if sys.argv[0] == "--cpu":
        import megatron_eopt.tools.cpu

        megatron_eopt.tools.cpu.install()
        del sys.argv[0]
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None  # a wheel has them built, and lacks the Makefile that a start runs
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
