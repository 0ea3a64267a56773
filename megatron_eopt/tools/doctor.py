"""The command ``megatron-eopt doctor``: which versions are installed, what is wrong with them, and what to do.

It imports what is installed, and survives what is missing or broken. Its help imports no torch.
"""

import argparse
import contextlib
import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from typing import NamedTuple

from megatron_eopt.screen import wrapped

NO_MEGATRON = (
    "plain torch needs none; for its runs pip install 'megatron-eopt[megatron]', or name the folder of its sources in "
    "PYTHONPATH"
)


class _Package(NamedTuple):
    modules: tuple[str, ...]
    advice: str  # where they cannot be imported
    needed: bool = False


# Causes first: Megatron imports Transformer Engine.
_PACKAGES = {
    "torch": _Package(("torch",), "install it as https://pytorch.org says for this machine", needed=True),
    "transformer-engine": _Package(
        ("transformer_engine", "transformer_engine.pytorch.optimizers"),
        "reinstall it for this torch and CUDA, or uninstall it: Megatron fails with it, or takes another Adam",
    ),
    "megatron-core": _Package(
        ("megatron.core", "megatron.core.optimizer"),
        "mend what the error names, or pip install 'megatron-eopt[megatron]'",
    ),
    "triton": _Package(("triton",), "install the release torch asks for"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags, of which there are none."""
    parser.description = "Exit status: 0 without problems, 1 with. A machine without a GPU is none."


def run(options: argparse.Namespace, rest: Sequence[str] | None) -> int:
    """Print what was found; returns the exit status."""
    problems = []
    print(f"{'python':<20}{platform.python_version()}")
    for name, package in _PACKAGES.items():
        error = _import_error(package.modules)
        # of a package's own name, or of the namespace that it is in
        missing = isinstance(error, ModuleNotFoundError) and package.modules[0].startswith(str(error.name))
        version = "not installed" if missing else _version(name, package.modules[0])
        print(f"{name:<20}{version}")
        if error is not None:
            if package.needed or not missing:
                problems.append((f"{name} cannot be imported: {error!r}", package.advice))
            elif name == "megatron-core":
                print(wrapped(f"note: {NO_MEGATRON}", hanging="  "))
        elif name == "torch":
            print(f"{'GPU':<20}{_gpu()}")
        elif name == "megatron-core":
            print(wrapped(f"of {sys.modules['megatron.core'].__path__[0]}", "  ", "  "))
            problems += _problems_of_megatron(version)
    for what, advice in problems:
        print(wrapped(f"problem: {what}", hanging="  "))
        print(wrapped(f"what to do: {advice}", "  ", "  "))
    if not problems:
        print("Nothing to do.")
    return 1 if problems else 0


def _import_error(modules: Sequence[str]) -> Exception | None:
    """Import modules; what they print goes to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            for module in modules:
                importlib.import_module(module)
    except Exception as error:  # a broken package may raise anything
        return error
    return None


def _version(package: str, module: str) -> str:
    """The version that a module says, or its package's."""
    said = getattr(sys.modules.get(module), "__version__", None)
    if said is None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            said = importlib.metadata.version(package)
    return str(said)


def _gpu() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "none: train by the launcher's --cpu"


def _problems_of_megatron(release: str) -> list[tuple[str, str]]:
    from megatron_eopt.megatron.releases import SUPPORTED, caveat, number

    note = caveat(release)
    if note is not None:
        print(wrapped(f"note: {note}", hanging="  "))
    if number(release) >= number(SUPPORTED):
        return []
    return [(f"megatron-core {release} is too old", f"pip install 'megatron-core>={SUPPORTED}'")]
