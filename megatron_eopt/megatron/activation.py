"""Make Megatron-Core in this process use our optimizers."""

import dataclasses
import inspect
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import megatron.core.optimizer as core_optimizer
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import optimizer as state_of_parameters
from megatron.core.optimizer import emerging_optimizers, optimizer_config
from megatron.core.tensor_parallel import layers as megatrons_layers
from torch.distributed.checkpoint import FileSystemReader

from megatron_eopt import registry
from megatron_eopt.family import DEFAULT_TP_MODE
from megatron_eopt.from_config import with_fields
from megatron_eopt.matrices import ATTRIBUTE
from megatron_eopt.megatron import command_line, releases
from megatron_eopt.megatron.at_average import evaluated_at_average
from megatron_eopt.megatron.builders import checked_elsewhere, wrap_emerging_builder, wrap_group_builder
from megatron_eopt.megatron.checkpoints import fsdp_dtensor, group_settings, integrity, keys, loading
from megatron_eopt.megatron.makefile import without_makefile
from megatron_eopt.megatron.qk_clip import clip
from megatron_eopt.megatron.run_flags import FLAGS
from megatron_eopt.megatron.wrappers import shard_of
from megatron_eopt.optimizers.lion import Lion
from megatron_eopt.redirect import Original, Redirection, Redirections, around, becomes
from megatron_eopt.step.parameters import NAME, SAVED_BY_LAYOUT

logger = logging.getLogger(__name__)

# Names of ours that replace those of Megatron's module of emerging optimizers.
_NAMES = """EmergingOptimizerEntry TensorParallelAdaptiveMuon TensorParallelMuon _adaptive_muon_config_to_kwargs
    _create_emerging_optimizer _default_adam_based_eopt_config_to_kwargs _default_param_overrides_factory
    _eopt_init_state_fn _get_qkv_split_shapes _is_muon_excluded _is_nonlinear_or_embedding _kwargs_from_config
    _muon_config_to_kwargs get_supported_coefficient_types validate_coefficient_type""".split()

_active: Redirections | None = None


def activate() -> None:
    """As :func:`megatron_eopt.activate`, which explains it."""
    global _active
    if _active is None:
        releases.check_supported()
        redirections = _redirections()
        redirections.install()
        _forward_registry()
        _active = redirections


def deactivate() -> None:
    """Undo :func:`activate`; nothing happens where it was not called."""
    global _active
    if _active is not None:
        registry.EMERGING_OPTIMIZERS.forward_no_more()
        _active.undo()
        _active = None


def build_as_megatron(config: Any, model_chunks: Any, **settings: Any) -> Any:
    """What Megatron's own function builds, once it is ours."""
    return core_optimizer.get_megatron_optimizer(config, model_chunks, **settings)


def describe() -> dict[str, str]:
    """What :func:`activate` replaces -> why; equal reasons are together."""
    names: dict[str, list[str]] = {}
    for redirection in (_active or _redirections()).redirections:
        names.setdefault(redirection.reason, []).append(redirection.what)
    return {_together(those): reason for reason, those in names.items()}


def _together(names: Sequence[str]) -> str:
    homes = {name.rpartition(".")[0] for name in names}
    home = homes.pop()
    if len(names) == 1 or homes or not home:
        return ", ".join(names)
    return f"{home}.{{{', '.join(name.removeprefix(f'{home}.') for name in names)}}}"


def _redirections() -> Redirections:
    replaced = [*_of_registry(), *_of_core()]
    if _has_training():
        replaced += _of_training()
    return Redirections(replaced, importers=["megatron"])


def _has_training() -> bool:
    """Whether ``megatron.training`` and what it needs can be imported."""
    try:
        import megatron.training.training  # noqa: F401
    except ImportError:
        return False
    return True


def _of_registry() -> list[Redirection]:
    imported = "scripts that import Megatron's names get our optimizers"
    scalar = "Megatron builds the scalar optimizer beside Muon by this name"
    named_in = "overrides may name the optimizer of a parameter, which Megatron refuses"
    several = "Megatron builds one registered optimizer in a run, and overrides may name several"
    before = "checks come before the model is touched, and one line says which optimizer updates what"
    return [
        *(Redirection(emerging_optimizers, name, becomes(getattr(registry, name)), imported) for name in _NAMES),
        Redirection(core_optimizer, "Lion", becomes(Lion), scalar),
        Redirection(core_optimizer, "check_config_overrides_consistency", checked_elsewhere, named_in),
        Redirection(core_optimizer, "_get_megatron_optimizer_based_on_param_groups", wrap_group_builder, several),
        Redirection(core_optimizer, "_get_megatron_emerging_optimizer", wrap_emerging_builder, before),
    ]


def _of_core() -> list[Redirection]:
    attributes = megatrons_layers._MODEL_PARALLEL_ATTRIBUTE_DEFAULTS
    lost = "the fp32 copy of a bf16 parameter would lose its name, and which matrices it is made of"
    refused = "another optimizer's state is refused with its reason, or imported, before anything is read"
    shards = "Megatron knows a DTensor by its shard, for which newer releases of torch give it a new tensor each time"
    compared = "checksums of what is saved, which are compared when it is loaded"
    auto = (
        "a config that does not name muon_tp_mode gets auto, which is exact, as the command line does; and it takes "
        "settings that are flags of ours"
    )
    harmless = "what a run of ours loads of a checkpoint calls only what is harmless or trusted"
    later = "so does a config whose class a framework derives from Megatron's later"
    exact = partial(with_fields, default=DEFAULT_TP_MODE)
    configs = list(_and_derived(optimizer_config.OptimizerConfig))
    by_shard = around(lambda number, parameters: number(map(shard_of, parameters)))
    kept = ("qkv_split_shapes", ATTRIBUTE, NAME, SAVED_BY_LAYOUT)
    return [
        *(Redirection(attributes, name, lambda default: default, lost) for name in kept),
        Redirection(state_of_parameters, "get_optim_param_to_id_map", by_shard, shards),
        Redirection(dist_checkpointing, "load", loading.checked_load, refused),
        Redirection(dist_checkpointing, "save", integrity.checked_save, compared),
        Redirection(FileSystemReader, "read_metadata", integrity.gated_metadata, harmless),
        *(Redirection(config, "__init__", _with_our_settings, auto) for config in configs),
        Redirection(optimizer_config.OptimizerConfig.__dataclass_fields__, "muon_tp_mode", exact, later),
    ]


def _and_derived(config: Any) -> Iterator[Any]:
    """Megatron's class of configs, and derived ones with a constructor."""
    if "__init__" in vars(config) and "muon_tp_mode" in inspect.signature(config.__init__).parameters:
        yield config
    for derived in config.__subclasses__():
        yield from _and_derived(derived)


def _of_training() -> list[Redirection]:
    import megatron.training.arguments as parsing
    import megatron.training.checkpointing as checkpointing
    import megatron.training.training as training

    named = "pickles call nothing that is not trusted, and no rank waits for a pipe"
    apart = "layers whose parameters have different optimizers cannot be stacked into one tensor"
    in_place = (
        "what is no tensor of an optimizer has to be loaded too, which Megatron leaves out under torch FSDP2; and each "
        "group keeps its own rate, where Megatron 0.20 sets all to --lr for --override-opt-param-scheduler"
    )
    parsed = "--optimizer and the flags of Muon take what our optimizers take, and refuse the rest when parsed"
    amended = around(lambda add_arguments, parser: command_line.amend(add_arguments(parser)))
    fsdp = (
        "Megatron's checks allow its FSDPs with adam and sgd alone, and so check a run with ours as one with adam; and "
        "--optimizer-cpu-offload with an Adam that steps on the CPU; and --qk-clip with Transformer Engine; and what "
        "begins with random weights is refused before there is a model"
    )
    clipped = "QK-clip in every kind of layer and attention, and with negative logits"
    prepared = "Megatron prepares Adam's state alone for fsdp_dtensor, and finds no weights of a model in fp32"
    at_average = "Schedule-Free's average of the weights is what is evaluated"
    return [
        without_makefile(),
        Redirection(checkpointing, "_load_base_checkpoint", integrity.checked_base, named),
        Redirection(checkpointing, "generate_state_dict", keys.name_layers, apart),
        Redirection(checkpointing, "preprocess_fsdp_dtensor_state_dict", fsdp_dtensor.prepared, prepared),
        Redirection(checkpointing, "load_checkpoint", group_settings.with_optimizer, in_place),
        Redirection(parsing, "add_megatron_arguments", amended, parsed),
        Redirection(parsing, "validate_args", command_line.validated, fsdp),
        Redirection(training, "evaluate", evaluated_at_average, at_average),
        Redirection(training, "clip_qk", clip, clipped),
    ]


@around
def _with_our_settings(init: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    fields = {field.name for field in dataclasses.fields(self)}
    ours = {flag.dest for flag in FLAGS} & kwargs.keys() - fields
    for name in ours:
        setattr(self, name, kwargs.pop(name))
    init(self, *args, **{"muon_tp_mode": DEFAULT_TP_MODE, **kwargs})


def _forward_registry() -> None:
    theirs = emerging_optimizers._EMERGING_OPTIMIZERS
    package = getattr(emerging_optimizers, "registry", None)  # of emerging-optimizers
    named = [name for name in registry.EMERGING_OPTIMIZERS if name in theirs]
    replaced = [name for name in named if _is_megatrons_own(theirs[name])]
    for name in (name for name in named if name not in replaced):
        logger.warning(
            "--optimizer %s is what was put into Megatron's registry before activate(), and not the optimizer of "
            "megatron_eopt: register it under another name to have both",
            name,
        )
    brought = theirs.keys() & (package.get_optimizer_name_list() if package else [])
    untested = {each for each in brought - registry.EMERGING_OPTIMIZERS.keys() if _is_megatrons_own(theirs[each])}
    registry.EMERGING_OPTIMIZERS.forward(theirs, replaced, untested)


def _is_megatrons_own(entry: Any) -> bool:
    """Whether nothing in an entry is a user's."""
    routing = [getattr(getattr(key, "predicate", None), "fn", None) for key in entry.default_param_overrides]
    chosen = (entry.config_to_kwargs, getattr(entry, "config_to_cls", None))
    made_of = [type(entry), entry.optimizer_cls, entry.init_state_fn, *filter(None, chosen), *routing]
    homes = ("megatron.core.optimizer.emerging_optimizers", "emerging_optimizers.")
    return bool(routing) and all(str(getattr(each, "__module__", "")).startswith(homes) for each in made_of)
