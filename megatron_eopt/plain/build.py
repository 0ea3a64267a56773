"""Build an optimizer of plain torch for a model."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from megatron_eopt.family import ADAMW_RMS, DEFAULT_TP_MODE, LIKE_MUON, OPTIMIZERS
from megatron_eopt.matrices import ATTRIBUTE, tag_declared, warn_of_unmatched
from megatron_eopt.optimizer_spec import OptimizerSpec
from megatron_eopt.optimizers.heavy_ball_muon import HeavyBallMuon
from megatron_eopt.optimizers.spectron import Spectron
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.optimizers.with_adamw import Muon, WithAdamW
from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.plain import kinds
from megatron_eopt.plain.kinds import Group, Rule, decays
from megatron_eopt.plain.options import OptimizerConfig, config_of, given_fields, set_fields
from megatron_eopt.registry import get_optimizer_builder, register_optimizer
from megatron_eopt.routing.checks import FAR
from megatron_eopt.screen import counted, listed, span
from megatron_eopt.settings.execution import gathered
from megatron_eopt.settings.of_class import check_values
from megatron_eopt.settings.presets import RECOMMENDED, TO_BEGIN_WITH, presets_of
from megatron_eopt.settings.records import RECORDS
from megatron_eopt.step.adamw import AdamW
from megatron_eopt.step.ownership import KIND, ownership
from megatron_eopt.step.parameters import FLATTENED, FSDP1_MESSAGE, NAME, parameters_in, warn_of_fp16
from megatron_eopt.step.reporting import ReportingOptimizer

logger = logging.getLogger(__name__)

OWN: dict[str, type[Optimizer]] = {  # name -> class, whose argument lr has the default rate
    "adamw": AdamW,
    **{row.name: row.cls for row in OPTIMIZERS.values()},
    "muon": Muon,
}
BESIDE_ADAMW = {row.name for row in OPTIMIZERS.values() if row.owns == "matrices"}
_OWN_FIELDS = {  # of the config, beside those that are arguments of the class
    "muon": {"muon_momentum", "muon_ns_steps", "muon_embeddings"},
    "schedule_free_adamw": {"schedule_free_warmup_steps"},
    "spectron": {"spectron_factor_pairs"},
}
ADAM_BETAS = (0.9, 0.95)
ADAM_LR = 3e-4  # beside an optimizer whose config names no rate
_FUSED_ADAM = {"transformer_engine": "transformer_engine.pytorch.optimizers", "apex": "apex.optimizers"}


def build_optimizer(model: nn.Module, config: OptimizerConfig | Any, **fields: Any) -> ReportingOptimizer:
    """Build an optimizer for a model, by name as it is recommended.

    ``build_optimizer(model, "muon", lr=3e-4)`` is all that most need: updates of the size of AdamW's, whose rate that
    is. It is ``OptimizerConfig(name="muon", preset="match_adamw", lr=3e-4)``. A config without ``preset`` has the sizes
    of the class, and a log says how large these are.

    Weight decay is for trainable parameters of more than one dimension without "bias" in their name: these are the
    builder's first group, and all others the second one; one of the two may be empty. Each parameter gets its name as
    the attribute ``name_in_model``. Call it when the model lies as it will be trained: after ``to(device)``,
    ``fully_shard`` and the like.

    Optimizers of matrices get hidden matrices and convolutions, and leave the rest to AdamW: see
    :func:`~megatron_eopt.plain.kinds.for_matrices`. Embeddings, output layers and first convolutions have the
    attribute ``is_embedding_or_output_parameter``; if absent, it is set on the weights of ``nn.Embedding`` and
    ``nn.EmbeddingBag`` (also where they are tied), and of output layers: those that a model returns by
    ``get_output_embeddings()`` or ``get_classifier()``, and those with one of the names in
    :data:`~megatron_eopt.plain.kinds.OUTPUT_LAYERS`. :func:`megatron_eopt.matrices.declare` is in force. The log and
    ``explain()`` have a table of who has what.

    Args:
        model: as it lies for training.
        config: an :class:`~megatron_eopt.plain.options.OptimizerConfig`, a mapping or any object with some of its
            fields, ``name`` among them; or the name alone. A builder that you registered gets the mapping or object as
            it is, so it may have further fields.
        **fields: of the config, beside a name.

    Returns:
        One torch optimizer, which says what it does; that of matrices has an AdamW for the rest inside. A builder that
        you registered returns what it makes.

    Raises:
        TypeError: for what is no config, and an unknown field.
        ValueError: for an unknown name, a field that the optimizer has no use of, FSDP1, what the optimizer refuses,
            and a builder that leaves out parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"build_optimizer takes the model, whose layers say what parameters are, got {type(model)}")
    if isinstance(config, str):
        preset = {"preset": RECOMMENDED} if config in OWN else {}
        config = config_of({"name": config, **preset, **fields}, config)
    elif fields:
        raise TypeError(f"{', '.join(fields)} go into the config; they stand beside a name alone")
    given = given_fields(config)
    optimizer_name = given["name"]
    weight_decay = given.get("weight_decay", OptimizerConfig.weight_decay)
    builder = get_optimizer_builder(optimizer_name)
    if optimizer_name in OWN:
        filled = config_of(config, optimizer_name)
        _check_idle(optimizer_name, config)
        config = filled
    named = []
    for name, parameter in model.named_parameters():
        name = name.replace("_orig_mod.", "")  # which torch.compile adds
        if isinstance(model, DistributedDataParallel):
            name = name.removeprefix("module.")
        named.append((name, parameter))
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trained:
        raise ValueError(f"{optimizer_name}: no parameter of the model is trained: all {len(named)} are frozen")
    for name, parameter in trained:
        if getattr(parameter, FLATTENED, False):
            raise ValueError(f"{name} {FSDP1_MESSAGE}")
    kinds.mark_other_than_hidden(model)
    kinds.mark_no_linear_maps(model)
    tag_declared(trained)
    kinds.declare_layers(model)
    last = kinds.taken_for_hidden(model) if optimizer_name in BESIDE_ADAMW else None
    if last:
        _log(
            f"no output layer is known by its name, so that {last}, the last linear map, is a hidden matrix of "
            f"{optimizer_name}: if it makes the output, set {kinds.MARK} = True on its weight before you build; False "
            "says that it does not",
            logging.WARNING,
        )
    warn_of_unmatched([name for name, _ in named])
    decayed = []
    others = []
    for name, parameter in trained:
        setattr(parameter, NAME, name)
        if decays(name, parameter):
            decayed.append(parameter)
            setattr(parameter, KIND, "matrices")
        else:
            others.append(parameter)
            setattr(parameter, KIND, f"{kinds.VECTORS}, biases")
    groups: list[Group] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer: Any = builder(groups, config)
    _check_built(optimizer_name, optimizer, trained)
    parts = [optimizer.matrices, optimizer.adamw] if isinstance(optimizer, WithAdamW) else [optimizer]
    table = ownership(filter(None, parts))
    frozen = len(named) - len(trained)
    _log(f"{optimizer_name}:\n{table}" + f"\n{counted(frozen, 'parameter')} frozen" * bool(frozen))
    if optimizer_name in OPTIMIZERS and given.get("preset") is None:
        _tell_size(optimizer_name, optimizer, given.get("lr"))
    return optimizer


def _tell_size(name: str, optimizer: Optimizer, lr: Any) -> None:
    """Say how large updates are beside AdamW's, where no preset sizes them."""
    row = OPTIMIZERS[name]
    sizes = [] if row.update_rms is None else [row.update_rms]
    if isinstance(optimizer, WithAdamW):
        for matrices in optimizer.matrices.described_matrices(settled=False).values():
            sizes += [matrix.rms for matrix in matrices if matrix.rms]
    if not sizes:
        return
    times = [size / ADAMW_RMS for size in sizes]
    if min(times) >= 1 / 2 and max(times) <= 2:
        return
    said = (
        f"{name} without a preset makes updates of RMS {span(sizes, 2)}, {span(times, 2)} times AdamW's {ADAMW_RMS:g}"
    )
    if lr is None or name not in LIKE_MUON or (min(times) * FAR >= 1 and max(times) <= FAR):
        _log(said)
        return
    advice = f"keep them if lr {lr:g} is chosen for that, or set preset={RECOMMENDED!r} for AdamW's size"
    _log(f"{said}: {advice}", logging.WARNING)


def _filled(config: OptimizerConfig) -> OptimizerConfig:
    """The config with what it leaves to us: rates of matrices and of AdamW, and ``eps``."""
    lr = config.lr
    adam_lr = config.muon_adam_lr
    check_values(config.name, RECORDS, {"lr": ADAM_LR if lr is None else lr})
    check_values(f"{config.name}: muon_adam_lr", RECORDS, {"lr": ADAM_LR if adam_lr is None else adam_lr})
    if config.preset is not None:
        check_choice(f"preset of {config.name}", config.preset, presets_of(config.name))
        ratio = TO_BEGIN_WITH[config.name].rate
        if adam_lr is None:
            adam_lr = ADAM_LR if lr is None else lr / ratio
        lr = adam_lr * ratio if lr is None else lr
    elif lr is None:
        lr = signature(OWN[config.name]).parameters["lr"].default
        adam_lr = ADAM_LR if adam_lr is None else adam_lr
    adam_lr = lr if adam_lr is None else adam_lr
    eps = 1e-8 if config.eps is None else config.eps
    return replace(config, lr=lr, muon_adam_lr=adam_lr, eps=eps)


def _check_idle(name: str, config: Any) -> None:
    """Refuse fields that an optimizer has no use of; warn where a parser may have filled them."""
    used = {"name", "preset", "options", "lr", "weight_decay", *signature(OWN[name]).parameters}
    used |= _OWN_FIELDS.get(name, set())
    if name in BESIDE_ADAMW:
        used |= {"betas", "eps", "fused", "muon_adam_lr"}
    idle = [f"{field}={value!r}" for field, value in set_fields(config).items() if field not in used]
    if not idle:
        return
    message = f"fields of the config have no effect on {name}: {', '.join(idle)}; leave them out, or set them to None"
    if isinstance(config, Mapping) or is_dataclass(config):
        raise ValueError(message)
    _log(message, logging.WARNING)


def _check_built(name: str, optimizer: Any, trained: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse an optimizer that leaves out parameters."""
    taken = set(parameters_in(optimizer.param_groups))
    for value in vars(optimizer).values():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Optimizer):
                taken.update(parameters_in(each.param_groups))
    left_out = [called for called, parameter in trained if parameter not in taken]
    if left_out:
        raise ValueError(
            f"the builder of {name!r} left out {len(left_out)} of {len(trained)} trainable parameters: "
            f"{listed(left_out)}. Give its optimizer the parameters of all groups, or freeze these by requires_grad"
        )


def register_builders() -> None:
    """Register the builders of the table's optimizers and torch's AdamW."""
    for name in OWN:
        register_optimizer(name)(partial(_build, name))


def _build(name: str, groups: list[Group], config: Any) -> ReportingOptimizer:
    filled = []
    for group in groups:
        if group["params"]:
            filled.append({**group, "params": list(group["params"])})
    settings = _filled(config_of(config, name))
    if name == "adamw":
        return build_adamw(filled, settings)
    return build_of_row(OPTIMIZERS[name], filled, settings)


def build_adamw(groups: list[Group], config: OptimizerConfig) -> ReportingOptimizer:
    """AdamW of torch, or the FusedAdam that ``config.fused`` names."""
    parameters = parameters_in(groups)
    _warn_of_fp16(parameters)
    betas = config.betas or ADAM_BETAS
    if not isinstance(config.fused, str):
        fused = _fused(parameters, config)
        return AdamW(groups, **_settings(config, AdamW, betas=betas, eps=config.eps, fused=fused))
    check_choice("fused", config.fused, _FUSED_ADAM)
    adam = import_module(_FUSED_ADAM[config.fused]).FusedAdam
    reporting: Any = type(adam.__name__, (ReportingOptimizer, adam), {})
    return reporting(groups, **_settings(config, adam, betas=betas, eps=config.eps, adam_w_mode=True))


def build_of_row(row: OptimizerSpec, groups: list[Group], config: OptimizerConfig) -> ReportingOptimizer:
    """One optimizer, or one of matrices beside an AdamW."""
    of_matrices = HeavyBallMuon if row.cls is TensorParallelMuon else row.cls
    config = replace(config, options=gathered(of_matrices, config.options))
    if row.owns == "all":
        return row.cls(groups, **_settings(config, row.cls))
    matrices, rest = _divided(row, groups, config)
    if config.options.get("share_over_dp") and any(isinstance(p, DTensor) for p in parameters_in(matrices)):
        raise ValueError(
            "share_over_dp=True has no effect on DTensors, whose ranks each have all factors: leave it out of options"
        )
    if isinstance(config.fused, str):
        raise ValueError(
            f"fused={config.fused!r} is for adamw, and the AdamW beside {config.name} is torch's: set True or False"
        )
    _warn_of_fp16(parameters_in(rest))
    adam: dict[str, Any] = {
        "betas": config.betas or ADAM_BETAS,
        "eps": config.eps,
        "fused": _fused(parameters_in(rest), config),
        "lr": config.muon_adam_lr,
    }
    if row.cls is TensorParallelMuon:
        of_adam = {f"adam_{key}": value for key, value in adam.items()}
        settings = _settings(config, Muon, momentum=config.muon_momentum, ns_steps=config.muon_ns_steps, **of_adam)
        return Muon(matrices, rest, **settings) if matrices else AdamW(rest, **adam)
    settings = _settings(config, row.cls)
    if not matrices:
        return AdamW(rest, **adam)
    if row.takes("tp_mode") and row.cls is not Spectron:
        settings.setdefault("tp_mode", DEFAULT_TP_MODE)
    if not row.cls.decays_weights:
        settings["weight_decay"] = 0.0
        matrices = [{**group, "weight_decay": 0.0} for group in matrices]
        _log(f"{config.name} bounds or keeps the norms of matrices: weight decay is for AdamW's parameters alone")
    return WithAdamW(row.cls(matrices, **settings), rest, adam)


def _divided(
    row: OptimizerSpec,
    groups: list[Group],
    config: OptimizerConfig,
) -> tuple[list[Group], list[Group]]:
    """Groups of matrices, and of what AdamW has; each parameter gets its kind."""
    why_adamw: Rule = kinds.for_matrices
    factors: list[Group] = []
    if row.cls is TensorParallelMuon:
        why_adamw = kinds.for_muon_of_all if config.muon_embeddings else kinds.for_muon
    elif row.cls is Spectron:
        factors, groups = kinds.without_factors(groups, config.spectron_factor_pairs)
    matrices, rest = kinds.divided(groups, why_adamw)
    adapters = kinds.adapters(matrices)
    if adapters:
        _log(
            f"{listed(adapters)}: adapters of small rank, which {config.name} takes for matrices of the model; leave "
            f"them to AdamW (set {kinds.MARK} = True on them), or pair them for spectron by spectron_factor_pairs",
            logging.WARNING,
        )
    fused = kinds.fused_by_name(matrices)
    if fused:
        _log(
            f"{listed(fused)}: fused projections by their names, each of which {config.name} takes for one matrix; "
            f"declare their parts by megatron_eopt.matrices.declare, or set {ATTRIBUTE} = matrices.WHOLE on them",
            logging.WARNING,
        )
    for parameter in parameters_in(factors):
        setattr(parameter, KIND, "pairs of factors")
    for parameter in parameters_in(matrices):
        setattr(parameter, KIND, kinds.kind_of_matrix(parameter))
    for parameter in parameters_in(rest):
        setattr(parameter, KIND, why_adamw(parameter))
    matrices = factors + matrices
    if not matrices:
        _log(f"{config.name} is for hidden matrices, and the model has none: this is AdamW alone", logging.WARNING)
    return matrices, rest


def _warn_of_fp16(parameters: Sequence[Tensor]) -> None:
    warn_of_fp16([getattr(p, NAME, "a parameter") for p in parameters], parameters)


def _settings(config: OptimizerConfig, cls: Callable[..., Optimizer], **own: Any) -> dict[str, Any]:
    """Arguments of a class: its own fields, those it shares with others, options, and what its preset says."""
    known: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name in OPTIMIZERS and OPTIMIZERS[config.name].betas:  # the eps of others is another
        shared = {"betas": config.betas, "eps": config.eps, "warmup_steps": config.schedule_free_warmup_steps}
        for name, value in shared.items():
            if value is not None and name in signature(cls).parameters:
                known[name] = value
    known |= {name: value for name, value in own.items() if value is not None}
    twice = known.keys() & config.options.keys()
    if twice:
        raise TypeError(f"options has {', '.join(sorted(twice))}, which the config says by a field: leave it to that")
    known |= config.options
    preset = {} if config.preset is None else dict(presets_of(config.name)[config.preset])
    if cls is Muon and "num_ns_steps" in preset:
        preset["ns_steps"] = preset.pop("num_ns_steps")
    return preset | known


def _fused(parameters: Sequence[Tensor], config: OptimizerConfig) -> bool | None:
    """Whether to use torch's fused kernel; logs why not."""
    if config.fused is False:
        return None
    devices = {p.device.type for p in parameters} - set(_get_fused_kernels_supported_devices())
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}
    if devices:
        reason = f"torch has no fused kernel for {', '.join(sorted(devices))}"
    elif not all(p.is_floating_point() for p in parameters):
        reason = "some parameters are not of floating point"
    elif len(meshes) > 1:
        reason = "parameters are on several device meshes, or some on none"
    else:
        return True
    _log(f"AdamW is not fused: {reason}")
    return None


def _log(message: str, level: int = logging.INFO) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.log(level, message)
