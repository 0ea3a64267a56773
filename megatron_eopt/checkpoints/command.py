"""The command ``megatron-eopt verify-checkpoint``."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_eopt.checkpoints import states
from megatron_eopt.checkpoints.bounds import printable
from megatron_eopt.checkpoints.contents import Contents, StoredTensor, newest, read_contents
from megatron_eopt.checkpoints.counts import check_counts
from megatron_eopt.checkpoints.problems import Data, check_data, check_integrity, check_pickles, check_structure
from megatron_eopt.checkpoints.sums import compare, read_sums
from megatron_eopt.checkpoints.would_load import SIZES, Flags, parse_flags, would_load
from megatron_eopt.routing import from_json, table

_SHOWN = "optimizer lr max_lr min_lr weight_decay wd_mult momentum betas eps".split()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = "Exit status: 0 without errors, 1 with errors, 2 if it cannot be read."
    parser.usage = "%(prog)s [-h] [--json] [--manifest] [--no-data] [--trust-globals NAMES] DIR [-- FLAGS OF A RUN]"
    parser.epilog = "Flags of a Megatron run after -- are compared with the checkpoint: would that run load it?"
    parser.add_argument("folder", type=Path, metavar="DIR", help="a checkpoint, or what a run's --save named")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument("--manifest", action="store_true", help="also the optimizer of each parameter, as saved")
    parser.add_argument("--no-data", action="store_true", help="metadata only: quick at any size")
    parser.add_argument(
        "--trust-globals",
        metavar="NAMES",
        default="",
        help="classes and functions that pickles may name besides Megatron's and torch's, with commas between",
    )
    parser.set_defaults(run=verify)


def verify(options: argparse.Namespace, flags: Sequence[str] | None) -> int:
    """Print the report of a checkpoint; returns the exit status."""
    run = None if flags is None else parse_flags(flags)
    try:
        said, report = _report(options, run)
    except Exception as error:  # what is damaged or hostile raises anything
        what = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        if options.json:
            print(json.dumps({"ok": False, "unreadable": what}))
        print(printable(f"megatron-eopt verify-checkpoint: {what}"), file=sys.stderr)
        return 2
    print(json.dumps(said, indent=1) if options.json else "\n".join(map(printable, report)))
    return 1 if said["errors"] else 0


def _report(options: argparse.Namespace, run: Flags | None) -> tuple[dict[str, Any], list[str]]:
    contents = read_contents(newest(options.folder))
    problems = [*check_structure(contents), *check_pickles(contents, {*options.trust_globals.split(",")})]
    sums, of_sums = read_sums(contents)
    problems += [*check_counts(contents), *of_sums]
    data = None if options.no_data else check_data(contents, sums)
    if data is not None:
        data.problems += compare(sums, data.sums)
        problems += [*data.problems, *check_integrity(contents.folder)]
    problems += states.check_states(contents, data.zeros if data else frozenset())
    said = _said(contents, data)
    if run is not None:
        of_run, said["notes"] = would_load(contents, *run)
        problems += of_run
    errors = sum(problem.severity == "error" for problem in problems)
    said |= {"problems": [problem._asdict() for problem in problems], "errors": errors}
    said |= {"warnings": len(problems) - errors, "ok": not errors}
    report = list(_lines(said))
    if options.manifest:
        blocks = states.blocks_of(contents.common.get("optimizer"))
        saved = said["manifest"] = next((block["manifest"] for block in blocks if "manifest" in block), None)
        missing = "no manifest: another package, or an earlier release of this one, has saved it"
        report = [*(table(from_json(saved)).splitlines() if saved is not None else [missing]), "", *report]
    return said, report


def _said(contents: Contents, data: Data | None) -> dict[str, Any]:
    args, kept = contents.args, states.state_keys(contents)
    sizes = {short: args[name] for name, short in [*SIZES.items(), ("world_size", "world size")] if name in args}
    precision = next((name for name in ("bf16", "fp16") if args.get(name)), "fp32")
    return {
        "folder": str(contents.folder),
        "iteration": contents.iteration,
        "megatron": contents.release,
        "sizes": _plain(sizes),
        "precision": precision if args else "precision not saved",
        "model": _totals(states.parameters(contents).values()),
        "main_copies": _totals(own[states.MAIN] for own in kept.values() if states.MAIN in own),
        "distributed_optimizer": states.distributed_format(contents),
        "optimizers": [
            {
                "name": optimizer.name,
                "source": optimizer.source,
                "settings": _plain(optimizer.block.get("settings") or {}),
                "parameters": optimizer.parameters,
                "states": {state: _totals(tensors) for state, tensors in optimizer.states.items()},
            }
            for optimizer in states.optimizer_states(contents)
        ],
        "groups": {label: _plain(group) for label, group in states.groups(contents)},
        "data": data and _of_data(data),
        "args": _plain(args),
    }


def _of_data(data: Data) -> dict[str, Any]:
    compared = sum(value is not None for value in data.sums.values())
    return {"archives": data.archives, "bytes": data.bytes, "compared": compared, "sound": not data.problems}


def _totals(tensors: Iterable[StoredTensor]) -> dict[str, Any]:
    listed = list(tensors)
    return {
        "tensors": len(listed),
        "entries": sum(tensor.entries for tensor in listed),
        "bytes": sum(tensor.bytes for tensor in listed),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in listed}),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _lines(said: dict[str, Any]) -> Iterator[str]:
    iteration = "not saved" if said["iteration"] is None else f"{said['iteration']:,}"
    sizes = ", ".join(f"{short} {value}" for short, value in said["sizes"].items()) or "sizes not saved"
    yield f"checkpoint  {said['folder']}"
    yield f"iteration   {iteration}"
    yield f"saved by    Megatron-Core {said['megatron']}; {sizes}; {said['precision']}"
    yield f"model       {_total_text(said['model'])}"
    if said["distributed_optimizer"]:
        yield f"optimizer   Megatron's DistributedOptimizer, format {said['distributed_optimizer']}"
    for optimizer in said["optimizers"]:
        yield f"optimizer   {optimizer['name']} ({optimizer['source']})"
        if settings := optimizer["settings"]:
            yield "  " + ", ".join(f"{name} {_value(value)}" for name, value in settings.items())
        for state, totals in optimizer["states"].items():
            yield f"  {state:<19} {_total_text(totals)}"
    if said["main_copies"]["tensors"]:
        yield f"  {states.MAIN:<19} {_total_text(said['main_copies'])}"
    if not said["optimizers"] and not said["distributed_optimizer"]:
        yield "optimizer   none"
    for label, group in said["groups"].items():
        shown = ", ".join(f"{name} {_value(group[name])}" for name in _SHOWN if group.get(name) is not None)
        yield f"group {label:<5} {shown}"
    if data := said["data"]:
        sound = ": checksums right, all finite" if data["sound"] else ""
        compared = f"{_count(data['compared'], 'tensor')} compared with what was saved"
        if not data["compared"]:
            compared = "no checksums of tensors, so exchanged data would not show"
        yield f"data        {data['archives']:,} archives read, {_size(data['bytes'])}{sound}; {compared}"
    else:
        yield "data        not read (--no-data)"
    for note in said.get("notes", []):
        yield f"note        {note}"
    for problem in said["problems"]:
        yield f"{problem['severity'] + ':':<11} {problem['what']}"
        yield f"{'':<11} -> {problem['advice']}"
    counts = [_count(said[f"{kind}s"], kind) for kind in ("error", "warning") if said[f"{kind}s"]]
    yield ", ".join(counts if said["errors"] else ["OK", *counts])


def _total_text(totals: dict[str, Any]) -> str:
    dtypes = " and ".join(totals["dtypes"])
    return f"{_count(totals['tensors'], 'tensor')}, {totals['entries']:,} entries {dtypes}, {_size(totals['bytes'])}"


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return f"of {len(value)} steps"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _size(count: int) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
