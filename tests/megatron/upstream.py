"""pretrain.py with Megatron's own optimizers, on a CPU: nothing of this package but its CPU backend."""

import runpy
from pathlib import Path

import megatron_eopt.cpu

if __name__ == "__main__":
    megatron_eopt.cpu.install()
    runpy.run_path(str(Path(__file__).with_name("pretrain.py")), run_name="__main__")
