"""The command ``megatron-eopt verify-checkpoint``: exit status 0 without errors, 1 with, 2 for what is unreadable."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_eopt.checkpoints.contents import CheckpointError, newest, read_contents
from megatron_eopt.checkpoints.data import check_data, check_manifest
from megatron_eopt.checkpoints.flags import parse_flags
from megatron_eopt.checkpoints.problems import check_layout
from megatron_eopt.checkpoints.report import summary, text, verdict
from megatron_eopt.checkpoints.states import blocks, check_states
from megatron_eopt.checkpoints.would_load import would_load
from megatron_eopt.manifest import from_json, table

OK, PROBLEMS, UNREADABLE = 0, 1, 2


def add_command(commands: Any) -> argparse.ArgumentParser:
    """Add the command's parser to those of the program."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify-checkpoint",
        help="what is in a torch_dist checkpoint, whether it is whole and finite, and whether a run would load it",
        description="Exit status: 0 without errors, 1 with errors, 2 if it cannot be read.",
        epilog="Flags of a Megatron run after -- are compared with the checkpoint: would that run load it?",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a checkpoint, or what a run's --save named")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument("--manifest", action="store_true", help="also who owned which parameter in the run that saved")
    parser.add_argument("--no-data", action="store_true", help="metadata only: quick at any size")
    return parser


def verify(options: argparse.Namespace, flags: Sequence[str] | None) -> int:
    """Print the report of a checkpoint.

    Args:
        options: of the command's parser.
        flags: of a run; None if none are to be compared.

    Returns:
        The exit status.

    Raises:
        ValueError: for flags that cannot be parsed.
    """
    run = None if flags is None else parse_flags(flags)
    try:
        contents = read_contents(newest(options.folder))
    except (CheckpointError, OSError) as error:
        if options.json:
            print(json.dumps({"ok": False, "unreadable": str(error)}))
        print(f"megatron-eopt verify-checkpoint: {error}", file=sys.stderr)
        return UNREADABLE
    problems = check_layout(contents)
    data = None
    if not options.no_data:
        data = check_data(contents)
        problems += [*data.problems, *check_manifest(contents.folder)]
    problems += check_states(contents, data.zeros if data else None)
    said = summary(contents, data)
    if run is not None:
        comparison = would_load(contents, run)
        problems += comparison.problems
        said["notes"] = list(comparison.notes)
    said.update(verdict(problems))
    report = text(said)
    if options.manifest:
        said["manifest"] = next((block["manifest"] for block in blocks(contents) if "manifest" in block), None)
        report = f"{_manifest(said['manifest'])}\n\n{report}"
    print(json.dumps(said, indent=1) if options.json else report)
    return OK if said["ok"] else PROBLEMS


def _manifest(saved: dict[str, Any] | None) -> str:
    if saved is None:
        return "no manifest: another package, or an earlier release of this one, has saved it"
    return table(from_json(saved))
