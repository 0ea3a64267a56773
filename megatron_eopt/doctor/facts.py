"""What is installed here, found out by importing it; nothing is assumed of what is missing or broken."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import platform
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_eopt.orthogonalize.kernels import KERNELS, choose
from megatron_eopt.registry import list_optimizers

_KERNELS = "triton"
# A square matrix, a wide one and a stack, as the matrices of a model are; in the dtypes that products are computed in.
_SHAPES = ((1024, 1024), (512, 2048), (2, 256, 1024))
_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Package:
    """An installed package: its version, empty if it says none, and why it cannot be imported, or None."""

    version: str
    error: str | None = None


@dataclass(frozen=True)
class Apex:
    """An installed package by the name apex: NVIDIA's, with or without its CUDA extensions, or another project's."""

    version: str
    nvidias: bool
    compiled: bool


@dataclass(frozen=True)
class Megatron:
    """What an imported Megatron-Core makes possible.

    Attributes:
        optimizers: names for ``--optimizer`` that are built by this package.
        adam: the module whose Adam Megatron builds.
        training_error: why ``megatron.training`` cannot be imported, or None.
    """

    optimizers: tuple[str, ...]
    adam: str
    training_error: str | None


@dataclass(frozen=True)
class Kernels:
    """What the kernels for symmetric products need and this machine has not, and why they failed a trial; or None."""

    missing: str | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Facts:
    """All that was found; None for what is not installed."""

    python: str
    torch: str
    cuda: str | None
    gpu: str | None
    eopt: str | None
    core: Package | None
    triton: Package | None
    transformer_engine: Package | None
    apex: Apex | None
    emerging_optimizers: Package | None
    megatron: Megatron | None
    kernels: Kernels


def collect() -> Facts:
    """Find out, by importing what is there; what that prints goes to stderr, and no setting of the process changes."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        emerging_optimizers = _version("emerging-optimizers")
        core = _package("megatron-core", "megatron.core", "megatron.core.optimizer")
        return Facts(
            python=platform.python_version(),
            torch=torch.__version__,
            cuda=torch.version.cuda,
            gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            eopt=_version("megatron-eopt"),
            core=core,
            triton=_package("triton", "triton"),
            transformer_engine=_package(
                "transformer-engine", "transformer_engine", "transformer_engine.pytorch.optimizers"
            ),
            apex=_apex(),
            # not imported: nothing here needs it, and Megatron asks for its version alone before it does
            emerging_optimizers=None if emerging_optimizers is None else Package(emerging_optimizers),
            megatron=_megatron() if core is not None and core.error is None else None,
            kernels=_kernels(),
        )


def _package(distribution: str, module: str, *further: str) -> Package | None:
    """A package, whose module and ``further`` ones must be importable; None if it is not installed."""
    if not _found(module):
        return None
    error = next(filter(None, map(_import_error, (module, *further))), None)
    said = str(getattr(sys.modules.get(module), "__version__", None) or _version(distribution) or "")
    # Megatron adds the commit of whatever git repository it is in, a project with a .venv for instance
    return Package(said.partition("+")[0] if module == "megatron.core" else said, error)


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # no parent package; or a module that was put there without a specification
        return module in sys.modules


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken package may raise anything
        return f"{type(error).__name__}: {error}"
    return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _apex() -> Apex | None:
    """Told apart by its files: importing the other one would run code that has nothing to do with this."""
    if not _found("apex"):
        return None
    specification = importlib.util.find_spec("apex")
    folders = specification.submodule_search_locations if specification is not None else None
    nvidias = any(Path(folder, "optimizers", "fused_adam.py").is_file() for folder in folders or ())
    return Apex(_version("apex") or "", nvidias, compiled=_found("amp_C"))


def _megatron() -> Megatron | None:
    """What the imported Megatron-Core makes possible; None if it is too old to be asked."""
    try:
        from megatron_eopt.megatron import releases

        releases.check_supported()
    except ImportError:
        return None
    return Megatron(
        optimizers=tuple(name for name in list_optimizers() if name not in releases.unavailable()),
        adam=releases.core_optimizer().Adam.__module__.split(".")[0],
        training_error=_import_error("megatron.training.training"),
    )


def _kernels() -> Kernels:
    if not torch.cuda.is_available():
        return Kernels(missing="torch.cuda finds no GPU")
    device = torch.device("cuda")
    missing = KERNELS[_KERNELS].missing(device)
    if missing is not None:
        return Kernels(missing=missing)
    return Kernels(failed=choose(_SHAPES, _DTYPES, device).dropped.get(_KERNELS))
