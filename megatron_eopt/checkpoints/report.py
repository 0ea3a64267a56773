"""What ``megatron-eopt verify-checkpoint`` says of a checkpoint: as plain values, and as text made of these."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from megatron_eopt.checkpoints.contents import Contents, StoredTensor
from megatron_eopt.checkpoints.data import Data
from megatron_eopt.checkpoints.problems import Problem
from megatron_eopt.checkpoints.states import MAIN, distributed_format, groups, optimizer_states, parameters, state_keys

_SIZES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
    "world size": "world_size",
}
_SHOWN = "optimizer lr max_lr min_lr weight_decay wd_mult momentum betas eps".split()


def summary(contents: Contents, data: Data | None) -> dict[str, Any]:
    """All that is said of a checkpoint but what is wrong with it, as values that JSON can hold.

    Args:
        contents: of the checkpoint.
        data: what reading it showed; None if that was not asked for.
    """
    args = contents.args
    model, kept = parameters(contents), state_keys(contents)
    optimizers = [
        {
            "name": each.name,
            "source": each.source,
            "settings": _plain(each.settings),
            "parameters": list(each.parameters),
            "states": {state: _totals(tensors) for state, tensors in each.states.items()},
        }
        for each in optimizer_states(contents)
    ]
    return {
        "folder": str(contents.folder),
        "iteration": contents.iteration,
        "megatron": contents.release,
        "sizes": {short: args[name] for short, name in _SIZES.items() if name in args},
        "precision": _precision(args),
        "model": _totals(model.values()),
        "main_copies": _totals(states[MAIN] for states in kept.values() if MAIN in states),
        "distributed_optimizer": distributed_format(contents),
        "optimizers": optimizers,
        "groups": {label: _plain(group) for label, group in groups(contents)},
        "data": data and {"archives": data.archives, "bytes": data.bytes, "sound": not data.problems},
        "args": _plain(args),
    }


def verdict(problems: Iterable[Problem]) -> dict[str, Any]:
    """The problems as plain values, and how many of each kind there are."""
    listed = list(problems)
    errors = sum(problem.severity == "error" for problem in listed)
    return {
        "problems": [asdict(problem) for problem in listed],
        "errors": errors,
        "warnings": len(listed) - errors,
        "ok": not errors,
    }


def text(said: dict[str, Any]) -> str:
    """The report for people.

    Args:
        said: of :func:`summary` and :func:`verdict`, and ``notes`` where a run's flags were given.
    """
    lines = [f"checkpoint  {said['folder']}", f"iteration   {_or_unknown(said['iteration'])}"]
    sizes = ", ".join(f"{short} {value}" for short, value in said["sizes"].items()) or "sizes not saved"
    lines.append(f"saved by    Megatron-Core {said['megatron']}; {sizes}; {said['precision']}")
    lines.append(f"model       {_total_text(said['model'])}")
    lines += _optimizer_lines(said)
    for label, group in said["groups"].items():
        shown = ", ".join(f"{name} {_value(group[name])}" for name in _SHOWN if group.get(name) is not None)
        lines.append(f"group {label:<5} {shown}")
    data = said["data"]
    read = f"{data['archives']:,} archives read, {_size(data['bytes'])}" if data else "not read (--no-data)"
    read += ": checksums right, all finite" if data and data["sound"] else ""
    lines.append(f"data        {read}")
    lines += [f"note        {note}" for note in said.get("notes", [])]
    for problem in said["problems"]:
        lines.append(f"{problem['severity'] + ':':<11} {problem['what']}")
        lines.append(f"{'':<11} -> {problem['advice']}")
    counts = [_count(said[f"{kind}s"], kind) for kind in ("error", "warning") if said[f"{kind}s"]]
    lines.append(", ".join(counts if said["errors"] else ["OK", *counts]))
    return "\n".join(lines)


def _optimizer_lines(said: dict[str, Any]) -> Iterator[str]:
    if said["distributed_optimizer"]:
        yield f"optimizer   Megatron's DistributedOptimizer, format {said['distributed_optimizer']}"
    for each in said["optimizers"]:
        yield f"optimizer   {each['name']} ({each['source']})"
        if each["settings"]:
            yield "  " + ", ".join(f"{name} {_value(value)}" for name, value in each["settings"].items())
        for state, totals in each["states"].items():
            yield f"  {state:<19} {_total_text(totals)}"
    if said["main_copies"]["tensors"]:
        yield f"  {MAIN:<19} {_total_text(said['main_copies'])}"
    if not said["optimizers"] and not said["distributed_optimizer"]:
        yield "optimizer   none"


def _totals(tensors: Iterable[StoredTensor]) -> dict[str, Any]:
    listed = list(tensors)
    return {
        "tensors": len(listed),
        "entries": sum(tensor.entries for tensor in listed),
        "bytes": sum(tensor.bytes for tensor in listed),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in listed}),
    }


def _total_text(totals: dict[str, Any]) -> str:
    dtypes = " and ".join(totals["dtypes"])
    return f"{_count(totals['tensors'], 'tensor')}, {totals['entries']:,} entries {dtypes}, {_size(totals['bytes'])}"


def _precision(args: dict[str, Any]) -> str:
    if not args:
        return "precision not saved"
    return next((name for name in ("bf16", "fp16") if args.get(name)), "fp32")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return f"of {len(value)} steps"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _or_unknown(value: Any) -> str:
    return "not saved" if value is None else f"{value:,}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _size(count: int) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
