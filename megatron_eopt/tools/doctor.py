"""The command ``megatron-eopt doctor``: what is installed, and what is wrong with it.

:func:`collect` imports what is installed and survives what is broken. The reports are pure functions of :class:`Facts`.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_eopt.megatron import releases
from megatron_eopt.megatron.releases import SUPPORTED
from megatron_eopt.orthogonalize.kernels import KERNELS, choose
from megatron_eopt.registry import list_optimizers

_NO_KERNELS = (
    "symmetric products are computed by torch, which takes more time and gives the same numbers up to rounding"
)


@dataclass(frozen=True)
class Package:
    """An installed package."""

    version: str
    error: str | None = None  # why it cannot be used

    def __str__(self) -> str:
        version = self.version or "of no version"
        return version if self.error is None else f"{version} ({self.error})"


@dataclass(frozen=True)
class Megatron:
    """What an imported Megatron-Core makes possible."""

    optimizers: tuple[str, ...]  # of this package, for --optimizer
    adam: str  # the module whose Adam Megatron builds
    training_error: str | None  # why megatron.training cannot be imported


@dataclass(frozen=True)
class Kernels:
    """Why no kernels compute symmetric products."""

    missing: str | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Facts:
    """All that was found; None: not installed."""

    python: str
    torch: str
    cuda: str | None
    gpu: str | None
    eopt: str | None
    core: Package | None
    triton: Package | None
    transformer_engine: Package | None
    apex: Package | None
    emerging_optimizers: str | None
    megatron: Megatron | None
    kernels: Kernels


class Problem(NamedTuple):
    """What is wrong, and what to do."""

    what: str
    do: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = "Exit status: 0 without problems, 1 with. A machine without a GPU is none."
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(run=_examine)


def _examine(options: argparse.Namespace, rest: Sequence[str] | None) -> int:
    facts = collect()
    found = list(problems(facts))
    if options.json:
        said = {
            "ok": not found,
            "facts": asdict(facts),
            "notes": list(notes(facts)),
            "problems": [problem._asdict() for problem in found],
        }
        print(json.dumps(said, indent=1))
    else:
        print(_text(facts, found))
    return 1 if found else 0


def collect() -> Facts:
    """Import what is installed; what that prints goes to stderr."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        core = _package("megatron.core", "megatron.core.optimizer")
        megatron = None
        if core is not None and core.error is None:
            megatron = _megatron()
        return Facts(
            python=platform.python_version(),
            torch=torch.__version__,
            cuda=torch.version.cuda,
            gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            eopt=_version("megatron-eopt"),
            core=core,
            triton=_package("triton"),
            transformer_engine=_package("transformer_engine", "transformer_engine.pytorch.optimizers"),
            apex=_apex(megatron),
            emerging_optimizers=_version("emerging-optimizers"),
            megatron=megatron,
            kernels=_kernels(),
        )


def _package(module: str, *further: str) -> Package | None:
    if not _found(module):
        return None
    error = None
    for name in (module, *further):
        failed = _import_error(name)
        if failed is not None:
            error = f"cannot be imported: {failed}"
            break
    version = str(getattr(sys.modules.get(module), "__version__", None) or _version(module) or "")
    # Megatron adds the commit of the git repository around it, such as that of a project with a .venv
    return Package(version.partition("+")[0] if module == "megatron.core" else version, error)


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # no parent package; a module without a specification
        return module in sys.modules


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken package may raise anything
        return f"{type(error).__name__}: {error}"
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _apex(megatron: Megatron | None) -> Package | None:
    """Look at its files: importing another apex runs foreign code."""
    if not _found("apex"):
        return None
    spec = importlib.util.find_spec("apex")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    error = None
    if not any(Path(folder, "optimizers", "fused_adam.py").is_file() for folder in folders):
        error = "is not NVIDIA's: the name on PyPI belongs to another project"
    elif not _found("amp_C") and (megatron is None or megatron.adam == "apex"):
        error = "was built without its CUDA extensions (amp_C), and its Adam cannot be made"
    return Package(_version("apex") or "", error)


def _megatron() -> Megatron | None:
    try:
        releases.check_supported()
    except ImportError:
        return None
    return Megatron(
        optimizers=tuple(list_optimizers()),
        adam=releases.core_optimizer().Adam.__module__.split(".")[0],
        training_error=_import_error("megatron.training.training"),
    )


def _kernels() -> Kernels:
    if not torch.cuda.is_available():
        return Kernels(missing="torch.cuda finds no GPU")
    device = torch.device("cuda")
    missing = KERNELS["triton"].missing(device)
    if missing is not None:
        return Kernels(missing)
    shapes = ((1024, 1024), (512, 2048), (2, 256, 1024))
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    return Kernels(failed=choose(shapes, dtypes, device).dropped.get("triton"))


def problems(facts: Facts) -> Iterator[Problem]:
    """What keeps training from working, causes first."""
    core = facts.core
    supported = f"{SUPPORTED[-1]} to {SUPPORTED[0]}"
    if core is None:
        yield Problem("megatron-core is not installed", f"pip install megatron-core, {supported} are supported")
    elif releases.number(core.version) < releases.number(SUPPORTED[-1]):
        yield Problem(f"megatron-core {core.version} is too old", f"take one of {supported}")
        core = None
    for name, package, do in (
        (
            "Transformer Engine",
            facts.transformer_engine,
            "reinstall it for this torch and CUDA, or uninstall it: Megatron fails with it, or takes another Adam",
        ),
        ("apex", facts.apex, "pip uninstall apex, or build NVIDIA's from source, with its extensions"),
        ("megatron-core", core, "mend what the error names; a broken package that Megatron imports breaks Megatron"),
        ("triton", facts.triton, "install the release torch asks for"),
    ):
        if package is not None and package.error is not None:
            yield Problem(" ".join(filter(None, (name, package.version, package.error))), do)
    if facts.kernels.failed is not None:
        yield Problem(
            f"the kernels for symmetric products cannot be used on {facts.gpu}: {facts.kernels.failed}",
            f"until then {_NO_KERNELS}; another release of triton or of the driver may help",
        )


def notes(facts: Facts) -> Iterator[str]:
    """Notes on what is no problem."""
    if facts.kernels.missing is not None:
        yield f"no kernels for symmetric products ({facts.kernels.missing}): {_NO_KERNELS}"
    caveat = None
    if facts.core is not None:
        caveat = releases.caveat(facts.core.version)
    if caveat is not None:
        yield caveat
    megatron = facts.megatron
    if megatron is None:
        return
    if megatron.training_error is not None:
        yield (
            f"megatron.training cannot be imported ({megatron.training_error}): Megatron's scripts need it (pip "
            f"install psutil pyyaml, which megatron-core does not declare), a training loop of your own does not"
        )
    if megatron.adam == "torch":
        yield "Adam, for what is no matrix, is torch's: Transformer Engine, or NVIDIA's Apex, would bring a fused one"


def _text(facts: Facts, found: list[Problem]) -> str:
    missing = "not installed"
    used = {"--optimizer": "unknown without Megatron-Core", "Adam beside them": "unknown without Megatron-Core"}
    if facts.megatron is not None:
        used = {"--optimizer": ", ".join(facts.megatron.optimizers), "Adam beside them": facts.megatron.adam}
    no_kernels = facts.kernels.missing or facts.kernels.failed
    used["symmetric products"] = "by triton kernels, checked on this GPU"
    if no_kernels is not None:
        used["symmetric products"] = f"by torch: {no_kernels}"
    installed = {
        "megatron_eopt": facts.eopt or "not installed as a package",
        "python": facts.python,
        "torch": facts.torch,
        "CUDA": facts.cuda or "torch is built without it",
        "GPU": facts.gpu or "none",
        "triton": str(facts.triton or missing),
        "megatron-core": str(facts.core or missing),
        "transformer-engine": str(facts.transformer_engine or missing),
        "apex": str(facts.apex or missing),
        "emerging-optimizers": f"{facts.emerging_optimizers or missing} (not needed)",
    }
    sections = {
        "Installed": _pairs(installed),
        "Used": _pairs(used),
        "Notes": list(notes(facts)) or ["none"],
        "Problems": [f"{problem.what}. What to do: {problem.do}" for problem in found] or ["none"],
    }
    return "\n\n".join("\n  ".join([title, *lines]) for title, lines in sections.items())


def _pairs(values: dict[str, str]) -> list[str]:
    width = max(map(len, values))
    return [f"{name:{width}}  {value}" for name, value in values.items()]
