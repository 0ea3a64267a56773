"""Run an unmodified Megatron script with this package's optimizers.

``torchrun ... -m megatron_eopt.run [--cpu] SCRIPT ARGS``, or ``[--cpu] -m MODULE ARGS``, as python takes them.
"""

import argparse
import functools
import importlib.util
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from megatron_eopt.screen import refuse_once, tell_torchrun

_NO_GPU = "no GPU was found: to run without one, over gloo, for tests and dry runs, put --cpu before the script"
_LOCAL = (
    "Transformer Engine is not installed: add --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion"
)
_RANKS = "start the ranks by torchrun, one alone too: torchrun --nproc-per-node RANKS -m megatron_eopt.run ..."
_NO_RATE = "--lr is missing: it is for all parameters that no other flag gives a rate"
ADVICE = {
    "environment variable MASTER_ADDR expected": _RANKS,
    "world size (1) is not divisible": f"one rank was started, and the flags need more: {_RANKS}",
    "Megatron requires CUDA": _NO_GPU,
    "Found no NVIDIA driver": _NO_GPU,
    "Torch not compiled with CUDA": _NO_GPU,
    "'NoneType' object is not callable": f"if it comes while the model is built, {_LOCAL}",
    "args.save_interval is not None": "--save needs --save-interval",
    "args.train_iters // args.eval_interval": (
        "--eval-interval is missing, which Megatron needs with --eval-iters 0, too: give the steps from one evaluation "
        "to the next"
    ),
    "lr must be a number, or a tensor of one entry, got None": _NO_RATE,
    "if not 0.0 <= lr": _NO_RATE,
    "OptimizerParamScheduler: class input value": (
        "the flags say another rate or schedule than the checkpoint: --override-opt-param-scheduler takes that of the "
        "flags, --use-checkpoint-opt-param-scheduler that of the checkpoint"
    ),
}
"""Part of an error, or of the line that raised it -> what to do, in the words of the command."""


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
    parser.error = functools.partial(refuse_once, parser)  # type: ignore[method-assign]
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
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's of checkpoints is no Exception
        tell_torchrun(_explained(error))
        raise


def _explained(error: BaseException) -> str:
    """An error and what to do, which becomes its note."""
    said = str(error)
    line = ""  # that raised it: of an assertion without a message the best description
    if error.__traceback__ is not None:
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    for part, advice in ADVICE.items():
        if part in said or part in line:
            error.add_note(advice)
    return "\n".join([f"{type(error).__name__}: {said or line}", *getattr(error, "__notes__", ())])


if __name__ == "__main__":
    main(sys.argv[1:])
