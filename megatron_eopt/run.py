"""Run an unmodified Megatron script with this package's optimizers.

``torchrun ... -m megatron_eopt.run [--cpu] SCRIPT ARGS``, or ``[--cpu] -m MODULE ARGS``, as python takes them.
"""

import argparse
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> None:
    """Activate the package and run the script of ``argv``."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_eopt.run",
        usage="%(prog)s [-h] [--cpu] (SCRIPT | -m MODULE) [ARGS ...]",
        description="Run an unmodified Megatron script with the optimizers of megatron_eopt.",
        allow_abbrev=False,
    )
    parser.add_argument("--cpu", action="store_true", help="run without a GPU, over gloo: for tests and dry runs")
    # What follows is the script's.
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script and its arguments")
    options = parser.parse_args(argv)
    command = options.module or options.script
    if not command:
        parser.error("expected a script, or -m and a module")
    if options.module is None and not Path(command[0]).exists():
        parser.error(f"there is no script {command[0]!r}")
    # Before Megatron is imported: its source tree may be beside the script, or here.
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd() if options.module else Path(command[0]).resolve().parent)
    package = command[0].partition(".")[0]  # finding a module in it would import it too early
    if options.module and not (package and importlib.util.find_spec(package)):
        parser.error(f"there is no module {command[0]!r}")
    if options.cpu:
        from megatron_eopt.tools import cpu

        cpu.install()
    from megatron_eopt import activate

    activate()
    sys.argv = list(command)
    try:
        if options.module:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except Exception as error:
        from megatron_eopt.megatron.arguments import tell_torchrun

        tell_torchrun(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
