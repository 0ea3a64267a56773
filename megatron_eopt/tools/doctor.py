"""The command ``megatron-eopt doctor``: what is installed, and what is wrong with it.

It imports what is installed, and survives what is broken.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_eopt.megatron import releases
from megatron_eopt.megatron.releases import SUPPORTED
from megatron_eopt.orthogonalize.kernels import KERNELS, choose
from megatron_eopt.registry import list_optimizers

_NO_KERNELS = (
    "symmetric products are computed by torch, which takes more time and gives the same numbers up to rounding"
)
_MISSING = "not installed"


@dataclass
class Report:
    """What was found."""

    installed: dict[str, str] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[dict[str, str]] = field(default_factory=list)

    def add_problem(self, what: str, do: str) -> None:
        """Add what is wrong, and what to do."""
        self.problems.append({"what": what, "do": do})


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = "Exit status: 0 without problems, 1 with. A machine without a GPU is none."
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(run=_examine)


def _examine(options: argparse.Namespace, rest: Sequence[str] | None) -> int:
    report = examined()
    if options.json:
        found = {
            "ok": not report.problems,
            "facts": report.installed | report.used,
            "notes": report.notes,
            "problems": report.problems,
        }
        print(json.dumps(found, indent=1))
    else:
        print(_text(report))
    return 1 if report.problems else 0


def examined() -> Report:
    """Import what is installed; what that prints goes to stderr."""
    gpu = torch.cuda.is_available()
    report = Report()
    report.installed = {
        "megatron_eopt": _version("megatron-eopt") or "not installed as a package",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "torch is built without it",
        "GPU": torch.cuda.get_device_name() if gpu else "none",
    }
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        # causes first: Megatron imports Transformer Engine
        _look_at(
            report,
            "transformer-engine",
            "reinstall it for this torch and CUDA, or uninstall it: Megatron fails with it, or takes another Adam",
            "transformer_engine",
            "transformer_engine.pytorch.optimizers",
        )
        adam = _look_at_megatron(report)
        _look_at_apex(report, adam)
        _look_at(report, "triton", "install the release torch asks for", "triton")
        _look_at_kernels(report)
    report.installed["emerging-optimizers"] = f"{_version('emerging-optimizers') or _MISSING} (not needed)"
    return report


def _look_at(report: Report, name: str, do: str, *modules: str) -> None:
    """Import a package that Megatron or torch may use."""
    report.installed[name] = _MISSING
    if _is_found(modules[0]):
        error = _import_error(*modules)
        report.installed[name] = _version_of(modules[0])
        if error is not None:
            report.add_problem(f"{name} {report.installed[name]} cannot be imported: {error}", do)


def _look_at_megatron(report: Report) -> str | None:
    """Import Megatron; the package whose Adam it builds."""
    report.installed["megatron-core"] = _MISSING
    report.used["--optimizer"] = "unknown without Megatron-Core"
    report.used["Adam beside them"] = "unknown without Megatron-Core"
    supported = f"{SUPPORTED[-1]} to {SUPPORTED[0]}"
    if not _is_found("megatron.core"):
        report.add_problem("megatron-core is not installed", f"pip install megatron-core, {supported} are supported")
        return None
    error = _import_error("megatron.core", "megatron.core.optimizer")
    # Megatron adds the commit of the git repository around it, such as that of a project with a .venv
    release = _version_of("megatron.core").partition("+")[0]
    report.installed["megatron-core"] = release
    if releases.number(release) < releases.number(SUPPORTED[-1]):
        report.add_problem(f"megatron-core {release} is too old", f"take one of {supported}")
        return None
    if error is not None:
        report.add_problem(
            f"megatron-core {release} cannot be imported: {error}",
            "mend what the error names; a broken package that Megatron imports breaks Megatron",
        )
        return None
    adam = releases.core_optimizer().Adam.__module__.split(".")[0]
    report.used["--optimizer"] = ", ".join(list_optimizers())
    report.used["Adam beside them"] = adam
    caveat = releases.caveat(release)
    if caveat is not None:
        report.notes.append(caveat)
    error = _import_error("megatron.training.training")
    if error is not None:
        report.notes.append(
            f"megatron.training cannot be imported ({error}): Megatron's scripts need it (pip install psutil pyyaml, "
            f"which megatron-core does not declare), a training loop of your own does not"
        )
    if adam == "torch":
        report.notes.append(
            "Adam, for what is no matrix, is torch's: Transformer Engine, or NVIDIA's Apex, would bring a fused one"
        )
    return adam


def _look_at_apex(report: Report, adam: str | None) -> None:
    """Look at its files: importing another apex runs foreign code."""
    report.installed["apex"] = _MISSING
    if not _is_found("apex"):
        return
    version = _version_of("apex")
    report.installed["apex"] = version
    spec = importlib.util.find_spec("apex")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    if not any(Path(folder, "optimizers", "fused_adam.py").is_file() for folder in folders):
        report.add_problem(
            f"the package apex {version} is not NVIDIA's: the name on PyPI belongs to another project",
            "pip uninstall apex; NVIDIA's is built from source",
        )
    elif not _is_found("amp_C") and adam in (None, "apex"):
        report.add_problem(
            f"apex {version} was built without its CUDA extensions (amp_C), and its Adam cannot be made",
            "build it with them, or uninstall it",
        )


def _look_at_kernels(report: Report) -> None:
    device = torch.device("cuda")
    missing: str | None = "torch.cuda finds no GPU"
    failed = None
    if torch.cuda.is_available():
        missing = KERNELS["triton"].missing(device)
    if missing is not None:
        report.notes.append(f"no kernels for symmetric products ({missing}): {_NO_KERNELS}")
    else:
        shapes = ((1024, 1024), (512, 2048), (2, 256, 1024))
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        failed = choose(shapes, dtypes, device).dropped.get("triton")
    if failed is not None:
        report.add_problem(
            f"the kernels for symmetric products cannot be used on {report.installed['GPU']}: {failed}",
            f"until then {_NO_KERNELS}; another release of triton or of the driver may help",
        )
    reason = missing or failed
    used = f"by torch: {reason}" if reason else "by triton kernels, checked on this GPU"
    report.used["symmetric products"] = used


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # no parent package; a module without a specification
        return module in sys.modules


def _import_error(*modules: str) -> str | None:
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # a broken package may raise anything
        return f"{type(error).__name__}: {error}"
    return None


def _version_of(module: str) -> str:
    """The version that a module says, or its package's."""
    return str(getattr(sys.modules.get(module), "__version__", None) or _version(module) or "of no version")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(report: Report) -> str:
    problems = [f"{problem['what']}. What to do: {problem['do']}" for problem in report.problems]
    sections = {
        "Installed": _pairs(report.installed),
        "Used": _pairs(report.used),
        "Notes": report.notes or ["none"],
        "Problems": problems or ["none"],
    }
    parts = []
    for title, lines in sections.items():
        parts.append("\n  ".join([title, *lines]))
    return "\n\n".join(parts)


def _pairs(values: dict[str, str]) -> list[str]:
    width = max(map(len, values))
    return [f"{name:{width}}  {value}" for name, value in values.items()]
