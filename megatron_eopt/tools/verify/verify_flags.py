"""Flags of ``megatron-eopt verify-checkpoint``; without torch, for its help."""

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = "Exit status: 0 without errors, 1 with errors, 2 if it cannot be read."
    parser.add_argument("folder", type=Path, metavar="DIR", help="a checkpoint, or what a run's --save named")
    parser.add_argument("--manifest", action="store_true", help="also the optimizer of each parameter, as saved")
    parser.add_argument("--no-data", action="store_true", help="metadata and objects only: quick at any size")
    parser.add_argument(
        "--trust-checkpoint-globals",
        metavar="NAMES",
        default="",
        help="as for a run: classes and functions, with commas between, that it may name and have called",
    )
