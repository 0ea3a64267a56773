"""The command ``megatron-eopt``, without a GPU and without Megatron."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

from megatron_eopt import __version__
from megatron_eopt.screen import wrapped

_TOOLS = "megatron_eopt.tools"


class Command(NamedTuple):
    """Modules with ``add_flags``, which imports no torch, and with ``run``.

    ``add_flags`` may set a default ``check``, which refuses flags before the import of ``run`` takes seconds.
    """

    flags: str
    runs: str
    help: str


COMMANDS = {
    "plan": Command(
        f"{_TOOLS}.plan.plan_flags",
        f"{_TOOLS}.plan.plan_command",
        "how the matrices of a model will be orthogonalized, and what that costs",
    ),
    "verify-checkpoint": Command(
        f"{_TOOLS}.verify.verify_flags",
        f"{_TOOLS}.verify.verify_command",
        "what is in a torch_dist checkpoint, and whether it is whole and finite",
    ),
    "doctor": Command(f"{_TOOLS}.doctor", f"{_TOOLS}.doctor", "what is wrong with what is installed, and what to do"),
}


class _Parser(argparse.ArgumentParser):
    """One whose errors are wrapped on a terminal."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        lines = f"{self.prog}: error: {message}".splitlines()
        self.exit(2, "".join(f"{wrapped(line, to=sys.stderr)}\n" for line in lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; ``argv`` defaults to the process's arguments."""
    given = list(sys.argv[1:] if argv is None else argv)
    flags = None
    if "--" in given:
        cut = given.index("--")
        given, flags = given[:cut], given[cut + 1 :]
    about = "Muon and its relatives for Megatron-Core: what a run will do, has saved, or needs."
    parser = _Parser(prog="megatron-eopt", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        parser_of = commands.add_parser(name, help=command.help, allow_abbrev=False)
        parser_of.set_defaults(parser=parser_of, command=command, check=None)
        if given[:1] == [name]:
            import_module(command.flags).add_flags(parser_of)
    options, unknown = parser.parse_known_args(given)
    takes_flags = "-- FLAGS" in str(options.parser.usage)
    if flags and not takes_flags:
        options.parser.error(f"nothing is expected after --, got {' '.join(flags)}")
    if unknown:
        ends = " (the flags of a run stand after --)" if flags is None and takes_flags else ""
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{ends}")
    try:
        if options.check is not None:
            options.check(options, flags)
        status: int = import_module(options.command.runs).run(options, flags)
        sys.stdout.flush()
    except BrokenPipeError:  # as of head, which has read what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        options.parser.error(str(error))
    return status


if __name__ == "__main__":
    sys.exit(main())
