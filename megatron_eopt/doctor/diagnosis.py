"""What is wrong with what was found, and what to do about it: pure functions of :class:`Facts`."""

import re
from dataclasses import dataclass

from megatron_eopt.doctor.facts import Facts
from megatron_eopt.megatron.support.matrix import RELEASES, Row, support_matrix

OLDEST_PYTHON = (3, 12)
OLDEST_TORCH = (2, 6)
_NO_KERNELS = (
    "symmetric products are computed by torch, which takes more time and gives the same numbers up to rounding"
)


@dataclass(frozen=True)
class Problem:
    """What is wrong, and what to do."""

    what: str
    do: str


def problems(facts: Facts) -> list[Problem]:
    """What keeps training runs from working, or from working as its user believes."""
    found = [*_versions(facts), *_adam(facts), *_megatron(facts)]  # causes first
    if facts.triton is not None and facts.triton.error is not None:
        found.append(Problem(f"triton cannot be imported: {facts.triton.error}", "install the release torch asks for"))
    if facts.kernels.failed is not None:
        found.append(
            Problem(
                f"the kernels for symmetric products cannot be used on {facts.gpu}: {facts.kernels.failed}",
                f"until then {_NO_KERNELS}; another release of triton or of the driver may help",
            )
        )
    return found


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


def _versions(facts: Facts) -> list[Problem]:
    found = []
    if _number(facts.python) < OLDEST_PYTHON:
        found.append(Problem(f"Python {facts.python} is too old", f"take {_dotted(OLDEST_PYTHON)} or newer"))
    if _number(facts.torch) < OLDEST_TORCH:
        found.append(Problem(f"torch {facts.torch} is too old", f"take {_dotted(OLDEST_TORCH)} or newer"))
    return found


def _megatron(facts: Facts) -> list[Problem]:
    core = facts.core
    supported = f"{RELEASES[-1]} to {RELEASES[0]}"
    if core is None:
        return [Problem("megatron-core is not installed", f"pip install megatron-core, {supported} are supported")]
    if _number(core.version) < _number(RELEASES[-1]):
        return [Problem(f"megatron-core {core.version} is too old", f"take one of {supported}")]
    if core.error is not None:
        return [
            Problem(
                f"megatron-core {core.version} cannot be imported: {core.error}",
                "mend what the error names; a broken package that Megatron imports breaks Megatron",
            )
        ]
    return []


def _adam(facts: Facts) -> list[Problem]:
    found = []
    engine, apex = facts.transformer_engine, facts.apex
    if engine is not None and engine.error is not None:
        found.append(
            Problem(
                f"{_named('Transformer Engine', engine.version)} cannot be imported: {engine.error}",
                "reinstall it for this torch and CUDA, or uninstall it: Megatron fails with it, or takes another Adam",
            )
        )
    if apex is not None and not apex.nvidias:
        found.append(
            Problem(
                f"the package {_named('apex', apex.version)} is not NVIDIA's: "
                f"the name on PyPI belongs to another project",
                "pip uninstall apex; NVIDIA's is built from source",
            )
        )
    if apex is not None and apex.nvidias and not apex.compiled and (facts.megatron is None or _takes_apex(facts)):
        found.append(
            Problem(
                f"{_named('Apex', apex.version)} was built without its CUDA extensions (amp_C), "
                f"and its Adam cannot be made",
                "build it with them, or uninstall it",
            )
        )
    return found


def _named(name: str, version: str) -> str:
    return f"{name} {version}".strip()


def _takes_apex(facts: Facts) -> bool:
    return facts.megatron is not None and facts.megatron.adam == "apex"


def _number(version: str) -> tuple[int, int]:
    """Its first two numbers; zeros where it has none."""
    major, minor, *_ = *re.findall(r"\d+", version), "0", "0"
    return int(major), int(minor)


def _dotted(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))
