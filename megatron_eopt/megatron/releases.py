"""What differs between the releases of Megatron-Core that are supported: 0.17, 0.18 and 0.19."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import megatron.core
import megatron.core.optimizer as core_optimizer

from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.redirect import Redirection, Redirections
from megatron_eopt.registry import list_optimizers


def version() -> str:
    """The release that is imported, without the commit that it adds of whatever git repository it lies in."""
    number: str = megatron.core.__version__.partition("+")[0]
    return number


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


@contextmanager
def package_not_needed() -> Iterator[None]:
    """While it is open, Megatron builds optimizers without asking for the emerging-optimizers package.

    Its flags are left alone otherwise: code behind them imports the package.
    """
    asked = [(core_optimizer, "HAVE_EMERGING_OPTIMIZERS")]
    if not has_registry():
        asked = [(muon_factory_module(), name) for name in ("HAVE_EMERGING_OPTIMIZERS", "HAVE_EO_V02")]
    reason = "the optimizers that Megatron builds are ours"
    flags = Redirections(
        [Redirection(owner=module, name=name, make=lambda _: True, reason=reason) for module, name in asked]
    )
    flags.install()
    try:
        yield
    finally:
        flags.undo()


def check_supported() -> None:
    """Refuse a release that is too old to build Muon.

    Raises:
        ImportError: naming the release that was found.
    """
    if not has_registry() and importlib.util.find_spec("megatron.core.optimizer.muon") is None:
        raise ImportError(f"megatron_eopt needs megatron-core 0.17 or later, found {version()}")


def unavailable() -> frozenset[str]:
    """Names for ``--optimizer``, Megatron's or registered, that cannot be built here.

    Without a registry (0.17) these are all that Megatron-Core has no code for; its lion is from another package.
    """
    registered = list_optimizers()
    if has_registry():
        buildable = set(registered)
    else:
        buildable = {"muon", "lion"} if hasattr(core_optimizer, "Lion") else {"muon"}
    return frozenset({"lion", "soap", "adaptive_muon", *registered} - buildable)


def scalar_optimizers() -> tuple[str, ...]:
    """What ``muon_scalar_optimizer`` may name: 0.18 reads it nowhere, and the lion of 0.17 is from another package."""
    reads = not version().startswith("0.18.")
    return ("adam", "lion") if reads and hasattr(core_optimizer, "Lion") else ("adam",)


def muon_of_0_17(
    params: Any, *, momentum_beta: float, use_nesterov: bool, mode: Any, **settings: Any
) -> TensorParallelMuon:
    """:class:`TensorParallelMuon` under the argument names by which 0.17 calls its own."""
    return TensorParallelMuon(params, momentum=momentum_beta, nesterov=use_nesterov, tp_mode=mode, **settings)


def is_plain_wrapper(optimizer: Any) -> bool:
    """True for Megatron's wrapper of one torch optimizer that saves its state by the shapes of the parameters."""
    wrapped = getattr(optimizer, "optimizer", None) is not None
    return wrapped and type(optimizer).__name__ in ("FP32Optimizer", "Float16OptimizerWithFloat16Params")


def training_args() -> Any:
    """The arguments of ``megatron.training``; None where it does not run."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def wants_schedule_of_checkpoint() -> bool:
    """Whether the user passed ``--use-checkpoint-opt_param-scheduler``."""
    return bool(getattr(training_args(), "use_checkpoint_opt_param_scheduler", False))
