"""The command ``megatron-eopt verify-checkpoint``."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron_eopt.checkpoints.bounds import printable
from megatron_eopt.checkpoints.contents import TRACKER, CheckpointError, Contents, StoredTensor, newest, read_contents
from megatron_eopt.checkpoints.faults import Problem, check_files, check_pickles
from megatron_eopt.checkpoints.states import blocks_of
from megatron_eopt.checkpoints.sums import CHECKSUMS, Sums, saved_sums
from megatron_eopt.routing import from_json, table
from megatron_eopt.screen import counted, wrapped
from megatron_eopt.tools.verify import optimizers
from megatron_eopt.tools.verify.data import check_data, check_sums, check_tiling

_SIZES = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
    "world_size": "world size",
}
_SHOWN = "optimizer lr max_lr min_lr weight_decay wd_mult momentum betas eps".split()


def run(options: argparse.Namespace, flags: Sequence[str] | None) -> int:
    """Print the report of a checkpoint; returns the exit status."""
    try:
        report = _report(options)
        if options.json:
            text = json.dumps(report, indent=1, default=str)
        else:
            text = "\n".join(wrapped(printable(line), hanging=" " * 12) for line in _lines(report))
    except Exception as error:  # what is damaged or hostile raises anything
        what = str(error)
        if not isinstance(error, ValueError | OSError):
            what = f"{type(error).__name__}: {what}"
        if options.json:
            print(json.dumps({"ok": False, "unreadable": what}))
        print(printable(f"megatron-eopt verify-checkpoint: {what}"), file=sys.stderr)
        return 2
    print(text)
    return 0 if report["ok"] else 1


def _report(options: argparse.Namespace) -> dict[str, Any]:
    contents = read_contents(newest(options.folder))
    optimizer = contents.common.get("optimizer")
    problems = list(check_files(contents))
    read_data = not options.no_data and not problems
    problems += check_tiling(contents)
    folder = contents.folder
    if folder.name.startswith("iter_") and not (folder.resolve().parent / TRACKER).exists():
        advice = "Megatron would start anew from the folder above: write the iteration into that file"
        problems.append(Problem("warning", f"there is no {TRACKER} beside {folder.name}", advice))
    problems += check_pickles(contents, {*options.trust_globals.split(",")})
    entries = {key: tensor.entries for key, tensor in contents.tensors.items()}
    sums: Sums = {}
    try:
        sums = saved_sums(contents.common.get(CHECKSUMS), optimizer, entries)
    except CheckpointError as error:
        problems.append(Problem("error", str(error), "a run loads it with --no-checksums alone"))
    problems += check_sums(contents, sums)
    report = _about(contents)
    report["data"] = None
    if read_data:
        data = check_data(contents, sums)
        problems += data.problems
        report["data"] = {"archives": data.archives, "bytes": data.bytes, "compared": data.compared}
    problems += optimizers.check_states(contents)
    report["problems"] = [problem._asdict() for problem in problems]
    report["errors"] = sum(problem.severity == "error" for problem in problems)
    report["warnings"] = len(problems) - report["errors"]
    report["ok"] = not report["errors"]
    if options.manifest:
        report["manifest"] = None
        for block in blocks_of(optimizer):
            report["manifest"] = report["manifest"] or block.get("manifest")
    return report


def _about(contents: Contents) -> dict[str, Any]:
    sizes = {}
    for name, short in _SIZES.items():
        if name in contents.args:
            sizes[short] = contents.args[name]
    found = []
    for optimizer in optimizers.optimizer_states(contents):
        found.append(
            {
                "name": optimizer.name,
                "source": optimizer.source,
                "settings": optimizer.block.get("settings") or {},
                "states": {state: _totals(tensors) for state, tensors in optimizer.states.items()},
            }
        )
    return {
        "folder": str(contents.folder),
        "iteration": contents.iteration,
        "megatron": contents.release,
        "sizes": sizes,
        "model": _totals(optimizers.parameters(contents).values()),
        "distributed_optimizer": optimizers.distributed_format(contents),
        "optimizers": found,
        "groups": optimizers.groups(contents),
        "args": contents.args,
    }


def _totals(tensors: Iterable[StoredTensor]) -> str:
    listed = list(tensors)
    entries = sum(tensor.entries for tensor in listed)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in listed})
    return f"{counted(len(listed), 'tensor')}, {entries:,} entries {' and '.join(dtypes)}"


def _lines(report: dict[str, Any]) -> Iterator[str]:
    if "manifest" in report:
        if report["manifest"] is None:
            yield "no manifest: another package, or an earlier release of this one, has saved it"
        else:
            yield from table(from_json(report["manifest"])).splitlines()
        yield ""
    sizes = ", ".join(f"{short} {value}" for short, value in report["sizes"].items()) or "sizes not saved"
    yield f"checkpoint  {report['folder']}"
    yield f"iteration   {report['iteration']}"
    yield f"saved by    Megatron-Core {report['megatron']}; {sizes}"
    yield f"model       {report['model']}"
    if report["distributed_optimizer"]:
        yield f"optimizer   Megatron's DistributedOptimizer, format {report['distributed_optimizer']}"
    for optimizer in report["optimizers"]:
        yield f"optimizer   {optimizer['name']} ({optimizer['source']})"
        if optimizer["settings"]:
            yield f"  {_settings(optimizer['settings'])}"
        for state, totals in optimizer["states"].items():
            yield f"  {state:<19} {totals}"
    for label, group in report["groups"].items():
        shown = {name: group[name] for name in _SHOWN if group.get(name) is not None}
        yield f"group {label:<5} {_settings(shown)}"
    data = report["data"]
    if data:
        compared = f"{counted(data['compared'], 'tensor')} compared with what was saved"
        if not data["compared"]:
            compared = "no checksums of tensors, so exchanged data would not show"
        yield f"data        {data['archives']:,} archives read, {data['bytes']:,} bytes; {compared}"
    else:
        yield "data        not read"
    for problem in report["problems"]:
        yield f"{problem['severity'] + ':':<11} {problem['what']}"
        yield f"{'':<11} -> {problem['advice']}"
    ends = [] if report["errors"] else ["OK"]
    for kind in ("error", "warning"):
        number = report[f"{kind}s"]
        if number:
            ends.append(counted(number, kind))
    yield ", ".join(ends)


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in settings.items())


def _value(value: Any) -> str:
    match value:
        case [list() | tuple(), *_]:
            return f"of {len(value)} steps"
        case float():
            return f"{value:g}"
    return str(value)
