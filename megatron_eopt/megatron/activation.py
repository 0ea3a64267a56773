"""Make Megatron-Core in this process know our optimizers."""

import functools
from collections.abc import Callable
from typing import Any

import megatron.core.optimizer as core_optimizer
from megatron.core import dist_checkpointing
from megatron.core.optimizer import optimizer_config

from megatron_eopt import registry
from megatron_eopt.matrices import ATTRIBUTE
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.arguments import DEFAULT_TP_MODE, amend, with_flags
from megatron_eopt.megatron.averaging import averaged
from megatron_eopt.megatron.checkpoints.finding import checked_base, checked_tracker
from megatron_eopt.megatron.checkpoints.layers import named_apart
from megatron_eopt.megatron.checkpoints.loading import checked_load, checked_save
from megatron_eopt.megatron.factory import allowing_owners, checked, with_registered
from megatron_eopt.optimizers.lion import Lion
from megatron_eopt.optimizers.skipping import NAME
from megatron_eopt.redirect import Redirection, Redirections

_active: Redirections | None = None


def activate() -> None:
    """Let ``--optimizer NAME`` build the optimizers of this package in whatever calls Megatron-Core from here on.

    Puts them in Megatron-Core's registry, so that ``megatron.core.optimizer.get_megatron_optimizer`` builds them, and,
    where ``megatron.training`` is installed, in its command line. Runs with adam and sgd stay as they are. A second
    call does nothing. It may come before or after a script imports Megatron, but before arguments are parsed.

    Raises:
        ImportError: if the release of Megatron-Core is too old.
    """
    global _active
    if _active is None:
        releases.check_supported()
        redirections = Redirections(_all_redirections())
        redirections.install()
        _active = redirections


def deactivate() -> None:
    """Undo :func:`activate`; nothing happens where it was not called."""
    global _active
    if _active is not None:
        _active.undo()
        _active = None


def _all_redirections() -> list[Redirection]:
    training = releases.has_training()
    core = _registry_redirections() if releases.has_registry() else _redirections_of_0_17(training)
    anywhere = [*_attributes_kept(), *_checkpoints_checked(), *_config_redirections()]
    return [*core, *anywhere, *(_training_redirections() if training else [])]


def _registry_redirections() -> list[Redirection]:
    theirs = releases.registry_module()
    # With the emerging-optimizers package those of theirs that have no counterpart here can still be built.
    kept = {
        name: entry
        for name, entry in theirs._EMERGING_OPTIMIZERS.items()
        if theirs.HAVE_EMERGING_OPTIMIZERS and name not in registry.EMERGING_OPTIMIZERS
    }
    reason = "Megatron looks optimizers up here, and this is our live registry"
    available = "without it Megatron demands the emerging-optimizers package, which is not needed"
    return [
        *(
            _replace(registry.EMERGING_OPTIMIZERS, name, entry, "built as before, by Megatron's own class")
            for name, entry in kept.items()
        ),
        *(
            _replace(module, name, getattr(registry, name), reason)
            for module in (theirs, core_optimizer)
            for name in ("_EMERGING_OPTIMIZERS", "_create_emerging_optimizer", "_get_qkv_split_shapes")
        ),
        *(
            _replace(theirs, name, getattr(registry, name), "the names that our coefficient sets have")
            for name in ("get_supported_coefficient_types", "validate_coefficient_type")
        ),
        *(_replace(module, "HAVE_EMERGING_OPTIMIZERS", True, available) for module in (theirs, core_optimizer)),
        _replace(core_optimizer, "Lion", Lion, "Megatron builds the scalar optimizer beside Muon by this name"),
        Redirection(
            owner=core_optimizer,
            name="check_config_overrides_consistency",
            make=allowing_owners,
            reason="overrides may name the optimizer of a parameter, which Megatron refuses",
        ),
        Redirection(
            owner=core_optimizer,
            name="_get_megatron_optimizer_based_on_param_groups",
            make=with_registered,
            reason="Megatron builds one registered optimizer in a run, and overrides may name several",
        ),
        Redirection(
            owner=core_optimizer,
            name="_get_megatron_emerging_optimizer",
            make=checked,
            reason="checks come before the model is touched, and one line says who owns what",
        ),
    ]


def _redirections_of_0_17(with_training: bool) -> list[Redirection]:
    module = releases.muon_factory_module()
    available = "without it Megatron demands the emerging-optimizers package, which is not needed"
    factory = checked(module.get_megatron_muon_optimizer)
    owners = [module]
    if with_training:
        import megatron.training.training as training

        owners.append(training)
    return [
        _replace(module, "TensorParallelMuon", releases.muon_of_0_17, "Megatron builds Muon by this name"),
        *(_replace(module, flag, True, available) for flag in ("HAVE_EMERGING_OPTIMIZERS", "HAVE_EO_V02")),
        *(
            _replace(owner, "get_megatron_muon_optimizer", factory, "checks come before the model is touched")
            for owner in owners
        ),
    ]


def _attributes_kept() -> list[Redirection]:
    from megatron.core.tensor_parallel import layers

    reason = "the fp32 copy of a bf16 parameter would lose its name, its padding, and which matrices it is made of"
    return [
        Redirection(
            owner=layers._MODEL_PARALLEL_ATTRIBUTE_DEFAULTS, name=name, make=lambda default: default, reason=reason
        )
        for name in ("qkv_split_shapes", "pad_length", ATTRIBUTE, NAME)
    ]


def _checkpoints_checked() -> list[Redirection]:
    refused = "another optimizer's state is refused with its reason, or imported, before anything is read"
    compared = "checksums of what is saved, which are compared when it is loaded"
    return [
        Redirection(owner=dist_checkpointing, name="load", make=checked_load, reason=refused),
        Redirection(owner=dist_checkpointing, name="save", make=checked_save, reason=compared),
    ]


def _config_redirections() -> list[Redirection]:
    classes = {
        value
        for value in vars(optimizer_config).values()
        if isinstance(value, type) and issubclass(value, optimizer_config.OptimizerConfig)
    }
    return [
        Redirection(
            owner=cls,
            name="__init__",
            make=_with_exact_tp_mode,
            reason="a config that does not name muon_tp_mode gets an exact one, as the command line does",
        )
        for cls in classes
    ]


def _with_exact_tp_mode(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_with_exact_tp_mode(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("muon_tp_mode", DEFAULT_TP_MODE)
        init(self, *args, **kwargs)

    return init_with_exact_tp_mode


def _training_redirections() -> list[Redirection]:
    import megatron.training.arguments as arguments
    import megatron.training.checkpointing as checkpointing
    import megatron.training.training as training

    whole = "a checkpoint that is not whole is refused with its reason, whatever is damaged"
    apart = "layers whose parameters have different owners cannot be stacked into one tensor"
    empty = "a save that was killed while it wrote the tracker file leaves it empty, and Megatron exits with status 0"
    return [
        Redirection(owner=checkpointing, name="_load_base_checkpoint", make=checked_base, reason=whole),
        Redirection(owner=checkpointing, name="_build_sharded_state_dict_metadata", make=named_apart, reason=apart),
        Redirection(owner=checkpointing, name="read_metadata", make=checked_tracker, reason=empty),
        Redirection(
            owner=arguments,
            name="add_megatron_arguments",
            make=lambda original: lambda parser: amend(original(parser), releases.unavailable()),
            reason="--optimizer and --muon-* take what our optimizers take, and refuse the rest when they are parsed",
        ),
        Redirection(
            owner=training,
            name="get_megatron_optimizer_config",
            make=with_flags,
            reason="what the flags of our optimizers say reaches the config, which has no fields for some of them",
        ),
        Redirection(
            owner=training,
            name="evaluate",
            make=averaged,
            reason="Schedule-Free trains at one point and is evaluated at another",
        ),
    ]


def _replace(owner: Any, name: str, value: Any, reason: str) -> Redirection:
    return Redirection(owner=owner, name=name, make=lambda _: value, reason=reason)
