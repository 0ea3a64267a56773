"""What differs between the releases of Megatron-Core that are supported: 0.17, 0.18 and 0.19."""

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import megatron.core
import megatron.core.optimizer as core_optimizer

from megatron_eopt.optimizers.muon import TensorParallelMuon


def version() -> str:
    """The release that is imported."""
    return megatron.core.__version__


def has_registry() -> bool:
    """True from 0.18 on, where ``core.optimizer.emerging_optimizers`` holds a registry."""
    return importlib.util.find_spec("megatron.core.optimizer.emerging_optimizers") is not None


def has_training() -> bool:
    """True where ``megatron.training`` can be imported; a training loop of the user's own may do without.

    The wheel has it, but does not declare all that it needs: where that is missing, there is no command line to change.
    """
    try:
        importlib.import_module("megatron.training.training")
    except ImportError:
        return False
    return True


def registry_module() -> ModuleType:
    """Megatron's registry of emerging optimizers (0.18 on)."""
    return importlib.import_module("megatron.core.optimizer.emerging_optimizers")


def muon_factory_module() -> ModuleType:
    """The module that builds Muon where there is no registry (0.17)."""
    return importlib.import_module("megatron.core.optimizer.muon")


def check_supported() -> None:
    """Refuse a release that is too old to build Muon.

    Raises:
        ImportError: naming the release that was found.
    """
    if not has_registry() and importlib.util.find_spec("megatron.core.optimizer.muon") is None:
        raise ImportError(f"megatron_eopt needs megatron-core 0.17 or later, found {version()}")


def scalar_optimizers() -> tuple[str, ...]:
    """What ``muon_scalar_optimizer`` may name: 0.18 reads it nowhere, and lion comes from a package of its own."""
    reads = not version().startswith("0.18.")
    return ("adam", "lion") if reads and hasattr(core_optimizer, "Lion") else ("adam",)


def muon_of_0_17(
    params: Any, *, momentum_beta: float, use_nesterov: bool, mode: Any, **settings: Any
) -> TensorParallelMuon:
    """:class:`TensorParallelMuon` under the argument names by which 0.17 calls its own."""
    return TensorParallelMuon(params, momentum=momentum_beta, nesterov=use_nesterov, tp_mode=mode, **settings)
