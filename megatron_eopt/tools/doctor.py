"""The command ``megatron-eopt doctor``: what is wrong with what is installed, and what to do.

It imports what is installed, and survives what is broken. Its help imports no torch.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_eopt.screen import wrapped

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
    parser.add_argument("--all", action="store_true", help="also notes, what is installed, and what is used of it")
    parser.add_argument("--json", action="store_true", help="all of it as JSON")


def run(options: argparse.Namespace, rest: Sequence[str] | None) -> int:
    """Print what was found; returns the exit status."""
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
        print("\n".join(_lines(report, options.all)))
    return 1 if report.problems else 0


def examined() -> Report:
    """Import what is installed; what that prints goes to stderr, and warnings nowhere."""
    import torch

    gpu = torch.cuda.is_available()
    report = Report()
    if not gpu:
        report.notes.append("torch.cuda finds no GPU: Megatron trains without one by the launcher's --cpu alone")
    report.installed = {
        "megatron_eopt": _version("megatron-eopt") or "not installed as a package",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "torch is built without it",
        "GPU": torch.cuda.get_device_name() if gpu else "none",
    }
    with _without_warnings(), contextlib.redirect_stdout(sys.stderr):
        # causes first: Megatron imports Transformer Engine
        _look_at(
            report,
            "transformer-engine",
            "reinstall it for this torch and CUDA, or uninstall it: Megatron fails with it, or takes another Adam",
            "transformer_engine",
            "transformer_engine.pytorch.optimizers",
        )
        _look_at_megatron(report)
        _look_at(report, "triton", "install the release torch asks for", "triton")
    report.installed["emerging-optimizers"] = f"{_version('emerging-optimizers') or _MISSING} (not needed)"
    return report


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Also those of loggers; what was set is set again."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _look_at(report: Report, name: str, do: str, *modules: str) -> None:
    """Import a package that Megatron or torch may use."""
    report.installed[name] = _MISSING
    if _is_found(modules[0]):
        error = _import_error(*modules)
        report.installed[name] = _version_of(modules[0])
        if error is not None:
            report.add_problem(f"{name} {report.installed[name]} cannot be imported: {error}", do)


def _look_at_megatron(report: Report) -> None:
    """Import Megatron."""
    from megatron_eopt.megatron import releases
    from megatron_eopt.registry import list_optimizers

    report.installed["megatron-core"] = _MISSING
    report.used["--optimizer"] = "unknown without Megatron-Core"
    report.used["Adam beside them"] = "unknown without Megatron-Core"
    supported = f"{releases.SUPPORTED[-1]} to {releases.SUPPORTED[0]}"
    if not _is_found("megatron.core"):
        report.add_problem("megatron-core is not installed", f"pip install megatron-core, {supported} are supported")
        return
    error = _import_error("megatron.core", "megatron.core.optimizer")
    # Megatron adds the commit of the git repository around it, such as that of a project with a .venv
    release = _version_of("megatron.core").partition("+")[0]
    report.installed["megatron-core"] = release
    if releases.number(release) < releases.number(releases.SUPPORTED[-1]):
        report.add_problem(f"megatron-core {release} is too old", f"take one of {supported}")
        return
    if error is not None:
        report.add_problem(
            f"megatron-core {release} cannot be imported: {error}",
            "mend what the error names; a broken package that Megatron imports breaks Megatron",
        )
        return
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


def _lines(report: Report, everything: bool) -> Iterator[str]:
    """Problems first, each with what to do; the rest if it is wanted."""
    notes = f"{len(report.notes)} note{'' if len(report.notes) == 1 else 's'}"
    rest = "" if everything else f" For {notes} and what is installed: megatron-eopt doctor --all"
    if not report.problems:
        yield wrapped(f"Nothing to do.{rest}")
    for problem in report.problems:
        yield wrapped(f"problem: {problem['what']}")
        yield wrapped(f"what to do: {problem['do']}", "  ", "  ")
    if report.problems and rest:
        yield rest.strip()
    if not everything:
        return
    for note in report.notes:
        yield ""
        yield wrapped(f"note: {note}", hanging="  ")
    for title, facts in (("Installed", report.installed), ("Used", report.used)):
        yield ""
        yield title
        width = max(map(len, facts))
        for name, value in facts.items():
            yield wrapped(f"{name:{width}}  {value}", "  ", " " * (width + 2))
