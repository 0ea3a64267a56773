"""The command ``megatron-eopt verify-checkpoint``."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence

from megatron_eopt.checkpoints.contents import CheckpointError, Contents, newest, read_contents
from megatron_eopt.checkpoints.faults import Problem, check_files, check_pickles
from megatron_eopt.checkpoints.gate import reading
from megatron_eopt.checkpoints.states import blocks_of
from megatron_eopt.checkpoints.sums import CHECKSUMS, Sums, saved_sums
from megatron_eopt.routing import from_json, table
from megatron_eopt.screen import counted, printable, wrapped
from megatron_eopt.tools.verify.data import check_data, check_sums, check_tiling

_SIZES = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
    "world_size": "world size",
}


def run(options: argparse.Namespace, flags: Sequence[str] | None) -> int:
    """Print the report of a checkpoint; returns the exit status."""
    problems: list[Problem] = []
    try:
        with reading(*options.trust_checkpoint_globals.split(",")):
            lines = list(_report(options, problems))
    except Exception as error:  # what is damaged or hostile raises anything
        print(printable(f"megatron-eopt verify-checkpoint: {type(error).__name__}: {error}"), file=sys.stderr)
        return 2
    for problem in problems:
        lines += [f"{problem.severity + ':':<11} {problem.what}", f"{'':<11} -> {problem.advice}"]
    errors = sum(problem.severity == "error" for problem in problems)
    lines.append(counted(errors, "error") if errors else "OK")
    for line in lines:
        print(wrapped(printable(line), hanging=" " * 12))
    return 1 if errors else 0


def _report(options: argparse.Namespace, problems: list[Problem]) -> Iterator[str]:
    """The lines about a checkpoint; ``problems`` gets what is wrong."""
    contents = read_contents(newest(options.folder))
    if options.manifest:
        yield from _manifest(contents)
    sizes = [f"{short} {contents.args[name]}" for name, short in _SIZES.items() if name in contents.args]
    yield f"checkpoint  {contents.folder}"
    yield f"iteration   {contents.iteration}"
    yield f"sizes       {', '.join(sizes) or 'not saved'}"
    optimizer = contents.common.get("optimizer")
    for block in blocks_of(optimizer):
        settings = ", ".join(f"{name} {value}" for name, value in block.get("settings", {}).items())
        yield f"optimizer   {block['optimizer']} {settings}"

    entries = {key: tensor.entries for key, tensor in contents.tensors.items()}
    yield f"tensors     {counted(len(entries), 'tensor')}, {sum(entries.values()):,} entries"
    problems += check_files(contents)
    number = re.fullmatch(r"iter_(\d+)", contents.folder.name)
    if number is not None and contents.iteration not in (None, int(number[1])):
        what = f"{contents.folder.name} has files of iteration {contents.iteration}"
        problems.append(Problem("error", what, "copy its own files into it, or take another checkpoint"))
    whole = not problems
    problems += check_tiling(contents)
    problems += check_pickles(contents)
    sums: Sums = {}
    try:
        sums = saved_sums(contents.common.get(CHECKSUMS), optimizer, entries)
    except CheckpointError as error:
        problems.append(Problem("error", str(error), "a run loads it with --no-checksums alone"))
    problems += check_sums(contents, sums)
    if options.no_data or not whole:
        yield "data        not read"
        return
    problems += check_data(contents, sums)
    compared = f"{counted(len(sums), 'tensor')} compared with what was saved"
    if not sums:
        compared = "no checksums of tensors, so exchanged data would not show"
    yield f"data        {counted(len(contents.chunks()), 'archive')} read; {compared}"


def _manifest(contents: Contents) -> Iterator[str]:
    for block in blocks_of(contents.common.get("optimizer")):
        if "manifest" in block:
            yield from table(from_json(block["manifest"])).splitlines()
            return
    yield "no manifest: another package has saved it"
