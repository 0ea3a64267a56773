"""Muon and its relatives for Megatron-Core and plain torch: parallel, exact, resumable, nothing silent.

Importing this package imports torch and not Megatron; :func:`activate` and :func:`get_megatron_optimizer` do. The
classes of the table of optimizers, :mod:`megatron_eopt.family`, are names of the package.
"""

from typing import TYPE_CHECKING, Any

from megatron_eopt import family, optimizers, registry
from megatron_eopt.metrics import watch as watch
from megatron_eopt.optimizers import DistributedMuon as DistributedMuon
from megatron_eopt.optimizers import OrthogonalizedOptimizer as OrthogonalizedOptimizer
from megatron_eopt.optimizers import factor_pairs as factor_pairs
from megatron_eopt.optimizers.with_adamw import Muon as Muon
from megatron_eopt.plain import OptimizerConfig as OptimizerConfig
from megatron_eopt.plain import build_optimizer as build_optimizer
from megatron_eopt.registry import EMERGING_OPTIMIZERS as EMERGING_OPTIMIZERS
from megatron_eopt.registry import EmergingOptimizerEntry as EmergingOptimizerEntry
from megatron_eopt.registry import get_optimizer_entry as get_optimizer_entry
from megatron_eopt.registry import list_optimizers as list_optimizers
from megatron_eopt.registry import register_optimizer as register_optimizer

if TYPE_CHECKING:  # type checkers and editors find the classes where the table imports them
    from megatron_eopt.family import *  # noqa: F403
else:
    globals().update(family.CLASSES)
    vars(optimizers).update(family.CLASSES)
    __all__ = [
        *("DistributedMuon", "EMERGING_OPTIMIZERS", "EmergingOptimizerEntry", "Muon", "OptimizerConfig"),
        *("OrthogonalizedOptimizer", "activate", "build_optimizer", "factor_pairs", "get_megatron_optimizer"),
        *("get_optimizer_entry", "list_optimizers", "register_optimizer", "watch"),
    ]
    __all__.extend(family.CLASSES)  # what reads the source for the reference takes strings alone


def activate() -> None:
    """Let ``--optimizer NAME`` build the optimizers of this package in whatever calls Megatron-Core from here on.

    Call it before Megatron parses its arguments. A second call does nothing, and
    :func:`megatron_eopt.megatron.activation.deactivate` takes all of it back. Optimizers that a user has put into
    Megatron's registry stay there, also under a name of ours, which is logged.

    Raises:
        ImportError: if the release of Megatron-Core is too old.
    """
    from megatron_eopt.megatron.activation import activate

    activate()


def get_megatron_optimizer(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
    """Build the optimizer of a Megatron model, for those who write their own training loop.

    Takes and returns what ``megatron.core.optimizer.get_megatron_optimizer`` does; with ``config.optimizer`` adam or
    sgd it is that function. :func:`activate` is called first.

    Args:
        config: Megatron's ``OptimizerConfig``.
        model_chunks: the model, one module per virtual pipeline stage.
        *args: further arguments of Megatron-Core's function.
        **kwargs: the same by name: ``config_overrides``, ``use_gloo_process_groups``, ``pg_collection``.

    Returns:
        Megatron's optimizer, around those of this package; its attribute ``megatron_eopt`` says what was decided.

    Raises:
        ValueError: for an unknown optimizer and for settings that it refuses, before anything is changed.
    """
    activate()
    from megatron_eopt.megatron import releases

    return releases.builder(config.optimizer)(config, model_chunks, *args, **kwargs)


def _to_adam(name: str, takes: Any) -> Any:
    from megatron_eopt.megatron.entries import to_adam

    return to_adam(name, takes)


registry.FROM_ABOVE["to_adam"] = _to_adam
