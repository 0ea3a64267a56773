"""The command ``megatron-eopt``, without a GPU and without Megatron."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from megatron_eopt import __version__

COMMANDS = {  # name -> module, help
    "plan": (
        "megatron_eopt.tools.plan.command",
        "how the matrices of a model will be orthogonalized, and what that costs",
    ),
    "verify-checkpoint": (
        "megatron_eopt.tools.verify.command",
        "what is in a torch_dist checkpoint, and whether it is whole and finite",
    ),
    "doctor": ("megatron_eopt.tools.doctor", "what is installed, what works with it, and what to do about the rest"),
    "plot": ("megatron_eopt.tools.plot", "losses and figures of optimizers from TensorBoard files"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; ``argv`` defaults to the process's arguments."""
    given = list(sys.argv[1:] if argv is None else argv)
    flags = None
    if "--" in given:
        cut = given.index("--")
        given, flags = given[:cut], given[cut + 1 :]
    about = "Muon and its relatives for Megatron-Core: what a run will do, has saved, or needs."
    parser = argparse.ArgumentParser(prog="megatron-eopt", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what, allow_abbrev=False)
        command.set_defaults(parser=command)
        if given[:1] == [name]:  # --help and --version import no torch
            import_module(module).add_flags(command)
    options, unknown = parser.parse_known_args(given)
    takes_flags = "[-- " in str(options.parser.usage)
    if flags and not takes_flags:
        options.parser.error(f"nothing is expected after --, got {' '.join(flags)}")
    if unknown:
        ends = " (the flags of a run stand after --)" if flags is None and takes_flags else ""
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{ends}")
    try:
        status: int = options.run(options, flags)
    except ValueError as error:
        options.parser.error(str(error))
    return status


if __name__ == "__main__":
    sys.exit(main())
