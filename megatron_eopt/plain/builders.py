"""The builders of plain torch: ``(param_groups, config) -> Optimizer`` by name."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.optimizer import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.hyperball import MuonHyperball
from megatron_eopt.optimizers.lion import Lion, Signum
from megatron_eopt.optimizers.polar_grad import PolarGrad
from megatron_eopt.optimizers.schedule_free import ScheduleFreeAdamW
from megatron_eopt.optimizers.scion import Scion
from megatron_eopt.optimizers.soap import SOAP
from megatron_eopt.optimizers.spectron import Spectron
from megatron_eopt.optimizers.with_adamw import HybridOptimizer, Muon
from megatron_eopt.plain.config import OptimizerConfig, as_config
from megatron_eopt.plain.routing import Group, Rule, divided, for_matrices, for_muon, for_muon_of_all, without_factors
from megatron_eopt.registry import register_optimizer

logger = logging.getLogger(__name__)

ADAM_BETAS = (0.9, 0.95)

# Where the FusedAdam of other packages is.
_FUSED_ADAM = {"transformer_engine": "transformer_engine.pytorch.optimizers", "apex": "apex.optimizers"}


Build = Callable[[list[Group], OptimizerConfig], Optimizer]


def _builder(name: str) -> Callable[[Build], Build]:
    """Register a builder, which gets the groups that have parameters, and the config as one of ours."""

    def decorate(build: Build) -> Build:
        @register_optimizer(name)
        @wraps(build)
        def of_any_config(groups: list[Group], config: Any) -> Optimizer:
            filled = [{**group, "params": list(group["params"])} for group in groups]
            return build([group for group in filled if group["params"]], as_config(config, name))

        return of_any_config

    return decorate


@_builder("adamw")
def build_adamw(groups: list[Group], config: OptimizerConfig) -> Optimizer:
    """AdamW of torch, or FusedAdam of the package that ``config.fused`` names.

    Raises:
        ValueError: if that package is not installed.
    """
    adam = {"betas": config.betas or ADAM_BETAS, "eps": config.eps}
    if isinstance(config.fused, bool):
        fused = config.fused and _fuses([p for group in groups for p in group["params"]])
        return AdamW(groups, **_settings(config, **adam, fused=fused or None))
    try:
        package = import_module(_FUSED_ADAM[config.fused])
    except ImportError as error:
        raise ValueError(f"fused={config.fused!r} needs {config.fused} installed: {error}") from error
    return package.FusedAdam(groups, **_settings(config, **adam, adam_w_mode=True))


@_builder("lion")
def build_lion(groups: list[Group], config: OptimizerConfig) -> Optimizer:
    """Lion for all parameters."""
    return Lion(groups, **_settings(config, **_betas(config)))


@_builder("signum")
def build_signum(groups: list[Group], config: OptimizerConfig) -> Optimizer:
    """Signum for all parameters."""
    return Signum(groups, **_settings(config))


@_builder("schedule_free_adamw")
def build_schedule_free_adamw(groups: list[Group], config: OptimizerConfig) -> Optimizer:
    """Schedule-Free AdamW for all parameters."""
    settings = {"eps": config.eps, "warmup_steps": config.schedule_free_warmup_steps}
    return ScheduleFreeAdamW(groups, **_settings(config, **settings, **_betas(config)))


@_builder("soap")
def build_soap(groups: list[Group], config: OptimizerConfig) -> Optimizer:
    """SOAP for all parameters: those that are no matrices get Adam by SOAP itself."""
    return SOAP(groups, **_settings(config, eps=config.eps, **_betas(config)))


@_builder("muon")
def build_muon(groups: list[Group], config: OptimizerConfig) -> Optimizer:
    """Muon for matrices, AdamW for the rest; AdamW alone where there are no matrices."""
    why_adamw = for_muon_of_all if config.muon_embeddings else for_muon
    matrices, rest = divided(groups, why_adamw)
    _log_counts(config, matrices, rest, why_adamw)
    adam = _adam(rest, config)
    settings = {
        "momentum": config.muon_momentum,
        "ns_steps": config.muon_ns_steps,
        "adam_lr": adam["lr"],
        "adam_betas": adam["betas"],
        "adam_eps": adam["eps"],
        "adam_fused": bool(adam["fused"]),
    }
    settings = _settings(config, **settings)
    return Muon(matrices, rest, **settings) if matrices else AdamW(rest, **adam)


@_builder("spectron")
def build_spectron(groups: list[Group], config: OptimizerConfig) -> Optimizer:
    """Spectron for matrices and for pairs of factors, AdamW for the rest; AdamW alone where there are none."""
    pairs, others = without_factors(groups, config.spectron_factor_pairs)
    matrices, rest = divided(others, for_matrices)
    return _beside_adamw(config, Spectron, [*pairs, *matrices], rest, _settings(config))


def _register_for_matrices(name: str, optimizer_cls: type[BaseOptimizer]) -> None:
    @_builder(name)
    def build(groups: list[Group], config: OptimizerConfig) -> Optimizer:
        settings = {"tp_mode": "auto", **_settings(config)}
        return _beside_adamw(config, optimizer_cls, *divided(groups, for_matrices), settings)


_register_for_matrices("scion", Scion)
_register_for_matrices("polargrad", PolarGrad)
_register_for_matrices("muon_hyperball", MuonHyperball)


def _beside_adamw(
    config: OptimizerConfig,
    optimizer_cls: type[BaseOptimizer],
    matrices: list[Group],
    rest: list[Group],
    settings: dict[str, Any],
) -> Optimizer:
    """An optimizer of matrices, and AdamW for the rest inside; AdamW alone where there are no matrices."""
    _log_counts(config, matrices, rest, for_matrices)
    if not getattr(optimizer_cls, "decays_weights", True):
        settings = {**settings, "weight_decay": 0.0}
        matrices = [{**group, "weight_decay": 0.0} for group in matrices]
        _log(f"{config.name} bounds or keeps the norms of matrices: weight decay is for AdamW's parameters alone")
    adam = _adam(rest, config)
    if not matrices:
        return AdamW(rest, **adam)
    return HybridOptimizer(optimizer_cls(matrices, **settings), rest, adam)


def _log_counts(config: OptimizerConfig, matrices: list[Group], rest: list[Group], why_adamw: Rule) -> None:
    reasons = Counter(why_adamw(parameter) for group in rest for parameter in group["params"])
    listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    _log(
        f"{config.name}: {_counted(matrices, 'matrices')}; AdamW beside it: {_counted(rest, 'parameters')}"
        + (f" ({listed})" if listed else "")
    )


def _counted(groups: list[Group], what: str) -> str:
    sizes = [p.numel() for group in groups for p in group["params"]]
    return f"{len(sizes)} {what} with {sum(sizes)} entries"


def _betas(config: OptimizerConfig) -> dict[str, Any]:
    return {} if config.betas is None else {"betas": config.betas}


def _settings(config: OptimizerConfig, **own: Any) -> dict[str, Any]:
    """Arguments of a class: the rates, its own and the options of the config.

    Raises:
        ValueError: for an option that a field of the config sets.
    """
    known = {"lr": config.lr, "weight_decay": config.weight_decay, **own}
    both = sorted(known.keys() & config.options.keys())
    if both:
        raise ValueError(f"options of the config have {', '.join(both)}, which its fields say: set these instead")
    return {**known, **config.options}


def _adam(groups: Sequence[Group], config: OptimizerConfig) -> dict[str, Any]:
    """Settings of the AdamW beside an optimizer of matrices."""
    if not isinstance(config.fused, bool):
        raise ValueError(
            f"fused={config.fused!r} is for adamw, and the AdamW beside {config.name} is torch's: set True or False"
        )
    return {
        "lr": config.lr if config.muon_adam_lr is None else config.muon_adam_lr,
        "betas": config.betas or ADAM_BETAS,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "fused": (config.fused and _fuses([p for group in groups for p in group["params"]])) or None,
    }


def _fuses(parameters: Sequence[Tensor]) -> bool:
    """Whether torch's fused kernel takes parameters together; logged on the first rank where it does not."""
    devices = {parameter.device.type for parameter in parameters} - set(_get_fused_kernels_supported_devices())
    meshes = {parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in parameters}
    reason = None
    if devices:
        reason = f"torch has no fused kernel for {', '.join(sorted(devices))}"
    elif not all(parameter.is_floating_point() for parameter in parameters):
        reason = "some parameters are not of floating point"
    elif len(meshes) > 1:
        reason = "parameters are on several device meshes, or some on none"
    if reason:
        _log(f"AdamW is not fused: {reason}")
    return reason is None


def _log(message: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info(message)
