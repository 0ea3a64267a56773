"""Flags of ``megatron-eopt plan``; without torch, for its help."""

import argparse
from collections.abc import Sequence


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.usage = "%(prog)s [OPTIONS, which --help lists] -- FLAGS OF A RUN"
    parser.set_defaults(check=check)
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks of the run, 1 by default")
    parser.add_argument("--full", action="store_true", help="a line for each parameter, not for all that are alike")
    parser.add_argument("--json", metavar="FILE", help="write the optimizer of each parameter there, too")


def check(options: argparse.Namespace, flags: Sequence[str] | None) -> None:
    """Refuse a command without the flags of a run."""
    if not flags:
        raise ValueError("expected the flags of a pretrain command after --")
