"""The command ``megatron-eopt doctor``: exit status 0 without problems, 1 with."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_eopt.doctor.diagnosis import Problem, matrix, notes, problems
from megatron_eopt.doctor.facts import Facts, Package, collect

OK, PROBLEMS = 0, 1
_ADAMS = {
    "transformer_engine": "Transformer Engine's, fused",
    "apex": "Apex's, fused",
    "torch": "torch's, not fused",
}


def add_command(commands: Any) -> None:
    """Add the command's parser to those of the program."""
    parser = commands.add_parser(
        "doctor",
        help="what is installed, what works with it, and what to do about the rest",
        description="Exit status: 0 without problems, 1 with. A machine without a GPU is none.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(parser=parser, run=examine)


def examine(options: argparse.Namespace, rest: Sequence[str] | None) -> int:
    """Print what was found.

    Args:
        options: of the command's parser.
        rest: what followed ``--``; nothing may.

    Returns:
        The exit status.

    Raises:
        ValueError: for arguments after ``--``.
    """
    if rest:
        raise ValueError(f"nothing is expected after --, got {' '.join(rest)}")
    facts = collect()
    found = problems(facts)
    print(json.dumps(_json(facts, found), indent=1) if options.json else _text(facts, found))
    return PROBLEMS if found else OK


def _json(facts: Facts, found: list[Problem]) -> dict[str, Any]:
    return {
        "ok": not found,
        "facts": asdict(facts),
        "support": [row._asdict() for row in matrix(facts)],
        "notes": notes(facts),
        "problems": [asdict(problem) for problem in found],
    }


def _text(facts: Facts, found: list[Problem]) -> str:
    sections = [("Installed", _pairs(_installed(facts))), ("Used", _pairs(_used(facts)))]
    rows = matrix(facts)
    if rows and facts.core is not None:
        supported = [f"{row.works:3}  {row.feature}" + (f": {row.note}" if row.note else "") for row in rows]
        sections.append((f"With megatron-core {facts.core.version}", supported))
    sections.append(("Notes", notes(facts) or ["none"]))
    sections.append(("Problems", [f"{each.what}. What to do: {each.do}" for each in found] or ["none"]))
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections)


def _installed(facts: Facts) -> dict[str, str]:
    apex = facts.apex
    unneeded = "not needed"
    return {
        "megatron_eopt": facts.eopt or "not installed as a package",
        "python": facts.python,
        "torch": facts.torch,
        "CUDA": facts.cuda or "torch is built without it",
        "GPU": facts.gpu or "none",
        "triton": _said(facts.triton),
        "megatron-core": _said(facts.core),
        "transformer-engine": _said(facts.transformer_engine),
        "apex": "not installed"
        if apex is None
        else f"{apex.version} ({'' if apex.nvidias else 'not '}NVIDIA's)".strip(),
        "emerging-optimizers": f"{_said(facts.emerging_optimizers)} ({unneeded})",
    }


def _said(package: Package | None) -> str:
    if package is None:
        return "not installed"
    return (package.version or "of no version") + (" (cannot be imported)" if package.error is not None else "")


def _used(facts: Facts) -> dict[str, str]:
    megatron, kernels = facts.megatron, facts.kernels
    unknown = "unknown without Megatron-Core"
    reason = kernels.missing or kernels.failed
    return {
        "--optimizer": unknown if megatron is None else ", ".join(megatron.optimizers),
        "Adam beside them": unknown if megatron is None else _ADAMS.get(megatron.adam, megatron.adam),
        "symmetric products": "by triton kernels, checked on this GPU" if reason is None else f"by torch: {reason}",
    }


def _pairs(values: dict[str, str]) -> list[str]:
    width = max(map(len, values))
    return [f"{name:{width}}  {value}" for name, value in values.items()]
