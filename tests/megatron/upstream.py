"""Run a script with Megatron's own optimizers, on a CPU: nothing of this package but its CPU backend."""

import runpy
import sys

import megatron_eopt.tools.cpu

if __name__ == "__main__":
    megatron_eopt.tools.cpu.install()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
