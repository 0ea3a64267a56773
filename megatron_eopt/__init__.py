"""Muon and its relatives for Megatron-Core and plain torch.

Importing this package imports neither torch nor Megatron. A name brings torch; :func:`activate` and
:func:`get_megatron_optimizer` bring Megatron. The optimizer classes of :mod:`megatron_eopt.family` are names of the
package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_eopt.version import __version__ as __version__

if TYPE_CHECKING:  # type checkers and editors find the names where they are
    from megatron_eopt.family import *  # noqa: F403
    from megatron_eopt.metrics import watch as watch
    from megatron_eopt.optimizers import DistributedMuon as DistributedMuon
    from megatron_eopt.optimizers import OrthogonalizedOptimizer as OrthogonalizedOptimizer
    from megatron_eopt.optimizers import factor_pairs as factor_pairs
    from megatron_eopt.optimizers.with_adamw import Muon as Muon
    from megatron_eopt.optimizers.with_adamw import WithAdamW as WithAdamW
    from megatron_eopt.plain import OptimizerConfig as OptimizerConfig
    from megatron_eopt.plain import build_optimizer as build_optimizer
    from megatron_eopt.registry import EMERGING_OPTIMIZERS as EMERGING_OPTIMIZERS
    from megatron_eopt.registry import EmergingOptimizerEntry as EmergingOptimizerEntry
    from megatron_eopt.registry import get_optimizer_entry as get_optimizer_entry
    from megatron_eopt.registry import list_optimizers as list_optimizers
    from megatron_eopt.registry import register_optimizer as register_optimizer
    from megatron_eopt.settings.execution import Execution as Execution
    from megatron_eopt.step.reporting import ReportingOptimizer as ReportingOptimizer

_MODULES = {  # of the names that :mod:`megatron_eopt.family` has not
    "DistributedMuon": "optimizers",
    "Execution": "settings.execution",
    "OrthogonalizedOptimizer": "optimizers",
    "ReportingOptimizer": "step.reporting",
    "factor_pairs": "optimizers",
    "Muon": "optimizers.with_adamw",
    "WithAdamW": "optimizers.with_adamw",
    "OptimizerConfig": "plain",
    "build_optimizer": "plain",
    "EMERGING_OPTIMIZERS": "registry",
    "EmergingOptimizerEntry": "registry",
    "get_optimizer_entry": "registry",
    "list_optimizers": "registry",
    "register_optimizer": "registry",
    "watch": "metrics",
}


def __getattr__(name: str) -> Any:
    """Import the module of a name when it is used."""
    if name == "__all__":
        return ["activate", "get_megatron_optimizer", *_MODULES, *import_module("megatron_eopt.family").CLASSES]
    found = None
    if name in _MODULES:
        found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    elif name[:1].islower():
        found = _module(name)
    elif not name.startswith("_"):
        found = import_module("megatron_eopt.family").CLASSES.get(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, found)


def _module(name: str) -> Any:
    """A module of the package, imported; None if there is none."""
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        return None


def __dir__() -> list[str]:
    """All names, for shells and editors; this imports torch."""
    return sorted({*globals(), *__getattr__("__all__")})


def activate() -> None:
    """Let Megatron's ``--optimizer NAME`` build the optimizers of this package.

    Call it before Megatron parses its arguments. A second call does nothing;
    :func:`megatron_eopt.megatron.activation.deactivate` undoes it. Optimizers that a user has put into Megatron's
    registry stay there, also under a name of ours, which is logged. A too old Megatron-Core is an ``ImportError``.
    """
    from megatron_eopt.megatron.activation import activate

    activate()


def get_megatron_optimizer(
    config: Any,
    model_chunks: Any,
    config_overrides: Any = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
) -> Any:
    """Build a Megatron model's optimizer for your own training loop.

    Takes and returns what ``megatron.core.optimizer.get_megatron_optimizer`` does, and is that function for
    ``config.optimizer`` adam or sgd. Calls :func:`activate` first.

    Args:
        config: Megatron's ``OptimizerConfig``.
        model_chunks: the model, one module per virtual pipeline stage.
        config_overrides: Megatron's ``ParamKey``, or a selector -> settings.
        use_gloo_process_groups: as in Megatron-Core, as are the rest.

    Returns:
        Megatron's optimizer around ours; its attribute ``megatron_eopt`` says what was decided.

    Raises:
        TypeError: for a config that is not Megatron's.
        ValueError: for an unknown optimizer or settings that it refuses, before anything is changed.
    """
    if not hasattr(config, "optimizer"):
        cls = type(config)
        raise TypeError(
            f"get_megatron_optimizer takes Megatron-Core's OptimizerConfig, which has a field optimizer, got "
            f"{cls.__module__}.{cls.__name__}: import it from megatron.core.optimizer, or take build_optimizer"
        )
    activate()
    from megatron_eopt.megatron.activation import build_as_megatron

    return build_as_megatron(
        config,
        model_chunks,
        config_overrides=config_overrides,
        use_gloo_process_groups=use_gloo_process_groups,
        pg_collection=pg_collection,
        dump_param_to_param_group_map=dump_param_to_param_group_map,
    )
