"""The command ``megatron-eopt doctor``: what is wrong with what was found, and what to do about it.

Exit status 0 without problems, 1 with. All but the command itself are pure functions of :class:`Facts`.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_eopt.doctor.facts import Facts, Package, collect
from megatron_eopt.megatron.support.matrix import RELEASES, Row, support_matrix

OK, PROBLEMS = 0, 1
OLDEST_PYTHON, OLDEST_TORCH = "3.12", "2.6"
_NO_KERNELS = (
    "symmetric products are computed by torch, which takes more time and gives the same numbers up to rounding"
)
_ADAMS = {
    "transformer_engine": "Transformer Engine's, fused",
    "apex": "Apex's, fused",
    "torch": "torch's, not fused",
}


@dataclass(frozen=True)
class Problem:
    """What is wrong, and what to do."""

    what: str
    do: str


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
    if options.json:
        said = {
            "ok": not found,
            "facts": asdict(facts),
            "support": [row._asdict() for row in matrix(facts)],
            "notes": notes(facts),
            "problems": [asdict(problem) for problem in found],
        }
        print(json.dumps(said, indent=1))
    else:
        print(_text(facts, found))
    return PROBLEMS if found else OK


def problems(facts: Facts) -> list[Problem]:
    """What keeps training runs from working, or from working as its user believes; causes come first."""
    return [Problem(what, do) for what, do in _problems(facts)]


def _problems(facts: Facts) -> Iterator[tuple[str, str]]:
    for name, version, oldest in (("Python", facts.python, OLDEST_PYTHON), ("torch", facts.torch, OLDEST_TORCH)):
        if _number(version) < _number(oldest):
            yield f"{name} {version} is too old", f"take {oldest} or newer"
    engine, apex, core, supported = facts.transformer_engine, facts.apex, facts.core, f"{RELEASES[-1]} to {RELEASES[0]}"
    if engine is not None and engine.error is not None:
        yield (
            f"{_named('Transformer Engine', engine.version)} cannot be imported: {engine.error}",
            "reinstall it for this torch and CUDA, or uninstall it: Megatron fails with it, or takes another Adam",
        )
    if apex is not None and not apex.nvidias:
        yield (
            f"the package {_named('apex', apex.version)} is not NVIDIA's: the name on PyPI belongs to another project",
            "pip uninstall apex; NVIDIA's is built from source",
        )
    elif apex is not None and not apex.compiled and (facts.megatron is None or facts.megatron.adam == "apex"):
        yield (
            f"{_named('Apex', apex.version)} was built without its CUDA extensions (amp_C), and its Adam cannot be "
            "made",
            "build it with them, or uninstall it",
        )
    if core is None:
        yield "megatron-core is not installed", f"pip install megatron-core, {supported} are supported"
    elif _number(core.version) < _number(RELEASES[-1]):
        yield f"megatron-core {core.version} is too old", f"take one of {supported}"
    elif core.error is not None:
        yield (
            f"megatron-core {core.version} cannot be imported: {core.error}",
            "mend what the error names; a broken package that Megatron imports breaks Megatron",
        )
    if facts.triton is not None and facts.triton.error is not None:
        yield f"triton cannot be imported: {facts.triton.error}", "install the release torch asks for"
    if facts.kernels.failed is not None:
        yield (
            f"the kernels for symmetric products cannot be used on {facts.gpu}: {facts.kernels.failed}",
            f"until then {_NO_KERNELS}; another release of triton or of the driver may help",
        )


def notes(facts: Facts) -> list[str]:
    """What is no problem and good to know."""
    said = []
    if facts.kernels.missing is not None:
        said.append(f"no kernels for symmetric products ({facts.kernels.missing}): {_NO_KERNELS}")
    if facts.core is not None and _number(facts.core.version) > _number(RELEASES[0]):
        said.append(f"megatron-core {facts.core.version} is newer than {RELEASES[0]}, the latest that was tried")
    if facts.megatron is not None and facts.megatron.training_error is not None:
        said.append(
            f"megatron.training cannot be imported ({facts.megatron.training_error}): Megatron's scripts need it (pip "
            f"install psutil pyyaml, which megatron-core does not declare), a training loop of your own does not"
        )
    if facts.megatron is not None and facts.megatron.adam == "torch":
        said.append(
            "Adam, for what is no matrix, is torch's: Transformer Engine, or NVIDIA's Apex, would bring a fused one"
        )
    return said


def matrix(facts: Facts) -> list[Row]:
    """What the Megatron-Core that was found supports; empty without one, or with one that is too old."""
    if facts.core is None or _number(facts.core.version) < _number(RELEASES[-1]):
        return []
    return support_matrix(facts.core.version)


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
    whose = "" if apex is None else f"{apex.version} ({'' if apex.nvidias else 'not '}NVIDIA's)".strip()
    return {
        "megatron_eopt": facts.eopt or "not installed as a package",
        "python": facts.python,
        "torch": facts.torch,
        "CUDA": facts.cuda or "torch is built without it",
        "GPU": facts.gpu or "none",
        "triton": _said(facts.triton),
        "megatron-core": _said(facts.core),
        "transformer-engine": _said(facts.transformer_engine),
        "apex": whose or "not installed",
        "emerging-optimizers": f"{_said(facts.emerging_optimizers)} (not needed)",
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


def _named(name: str, version: str) -> str:
    return f"{name} {version}".strip()


def _number(version: str) -> tuple[int, int]:
    """Its first two numbers; zeros where it has none."""
    major, minor, *_ = *re.findall(r"\d+", version), "0", "0"
    return int(major), int(minor)
