"""The builders of plain torch: ``(param_groups, config) -> Optimizer`` by name."""

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.optimizer import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from megatron_eopt.optimizers.hybrid import Muon
from megatron_eopt.optimizers.hyperball import MuonHyperball
from megatron_eopt.optimizers.lion import Lion
from megatron_eopt.optimizers.parts import HybridOptimizer
from megatron_eopt.optimizers.polar_grad import PolarGrad
from megatron_eopt.optimizers.schedule_free import ScheduleFreeAdamW
from megatron_eopt.optimizers.scion import Scion
from megatron_eopt.optimizers.signum import Signum
from megatron_eopt.optimizers.soap import SOAP
from megatron_eopt.optimizers.spectron import Spectron
from megatron_eopt.plain.config import OptimizerConfig
from megatron_eopt.plain.routing import Group, divided
from megatron_eopt.registry import register_optimizer

logger = logging.getLogger(__name__)

ADAM_BETAS = (0.9, 0.95)

# Where the FusedAdam of other packages is.
_FUSED_ADAM = {"transformer_engine": "transformer_engine.pytorch.optimizers", "apex": "apex.optimizers"}


@register_optimizer("adamw")
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


@register_optimizer("lion")
def build_lion(groups: list[Group], config: OptimizerConfig) -> Optimizer:
    """Lion for all parameters."""
    return Lion(groups, **_settings(config, **_betas(config)))


@register_optimizer("signum")
def build_signum(groups: list[Group], config: OptimizerConfig) -> Optimizer:
    """Signum for all parameters."""
    return Signum(groups, **_settings(config))


@register_optimizer("schedule_free_adamw")
def build_schedule_free_adamw(groups: list[Group], config: OptimizerConfig) -> Optimizer:
    """Schedule-Free AdamW for all parameters."""
    settings = {"eps": config.eps, "warmup_steps": config.schedule_free_warmup_steps}
    return ScheduleFreeAdamW(groups, **_settings(config, **settings, **_betas(config)))


@register_optimizer("soap")
def build_soap(groups: list[Group], config: OptimizerConfig) -> Optimizer:
    """SOAP for all parameters: those that are no matrices get Adam by SOAP itself."""
    return SOAP(groups, **_settings(config, eps=config.eps, **_betas(config)))


@register_optimizer("muon")
def build_muon(groups: list[Group], config: OptimizerConfig) -> Optimizer:
    """Muon for matrices, AdamW for the rest."""
    matrices, rest = divided(groups)
    adam = _adam(groups, config)
    settings = {
        "momentum": config.muon_momentum,
        "ns_steps": config.muon_ns_steps,
        "adam_lr": adam["lr"],
        "adam_betas": adam["betas"],
        "adam_eps": adam["eps"],
        "adam_fused": bool(adam["fused"]),
    }
    return Muon(matrices, rest, **_settings(config, **settings))


def _register_beside_adamw(name: str, optimizer_cls: type[Optimizer], **settings: Any) -> None:
    @register_optimizer(name)
    def build(groups: list[Group], config: OptimizerConfig) -> Optimizer:
        matrices, rest = divided(groups)
        own = {**settings, **_settings(config)}
        if not getattr(optimizer_cls, "decays_weights", True):
            own["weight_decay"] = 0.0
            matrices = [{**group, "weight_decay": 0.0} for group in matrices]
            _log(f"{config.name} bounds or keeps the norms of matrices: weight decay is for AdamW's parameters alone")
        return HybridOptimizer(matrices, rest, optimizer_cls, own, _adam(groups, config))


_register_beside_adamw("spectron", Spectron)
_register_beside_adamw("scion", Scion, tp_mode="auto")
_register_beside_adamw("polargrad", PolarGrad, tp_mode="auto")
_register_beside_adamw("muon_hyperball", MuonHyperball, tp_mode="auto")


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
