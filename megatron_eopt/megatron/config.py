"""The config that the optimizers of a run are built by."""

from typing import Any

from megatron_eopt.factors.factored import FactoredOptimizer
from megatron_eopt.family import LIKE_MUON, OPTIMIZERS
from megatron_eopt.from_config import with_fields
from megatron_eopt.megatron.given import TYPED
from megatron_eopt.megatron.support.facts import Run, on, primary_of
from megatron_eopt.settings.presets import PRESETS, PRESETS_OF_SOAP, Preset, described


def config_of_run(config: Any, run: Run) -> Any:
    """The config with its preset, and with our ways to offload and to share factors."""
    adjusted = with_preset(config, run.args)
    shares = [f"{name}_share_over_dp" for name, row in OPTIMIZERS.items() if issubclass(row.cls, FactoredOptimizer)]
    if on(adjusted, *shares) and not _can_share_factors(run):
        adjusted = with_fields(adjusted, **dict.fromkeys(shares, False))
    fraction = adjusted.optimizer_offload_fraction if on(adjusted, "optimizer_cpu_offload") else 0.0
    return with_fields(adjusted, offload_fraction=fraction, optimizer_cpu_offload=False)


def _can_share_factors(run: Run) -> bool:
    """Whether data-parallel ranks step the same parameters, and all of them save."""
    all_save = getattr(run.args, "ckpt_format", None) == "torch_dist" and not on(run.args, "ckpt_convert_format")
    return all_save and not run.layer_wise


def with_preset(config: Any, args: Any = None) -> Any:
    """The config with the settings of ``muon_preset``.

    A field was given if ``args`` of Megatron's parser say so, or if it differs from its default: that of the parser
    with ``args``, else the config's.
    """
    preset = getattr(config, "muon_preset", None)
    if preset is None:
        return config
    name = primary_of(config)
    known = _presets_of(name)
    if preset not in known:
        raise ValueError(
            f"{name} has no --muon-preset {preset}: expected one of {', '.join(known) or 'none, so leave it away'}"
        )
    settings = known[preset].settings
    prefix = "soap" if name == "soap" else "muon"
    defaults = {flag.setting: flag.default for flag in OPTIMIZERS[prefix].flags}
    typed = getattr(args, TYPED, None) or ()
    contradicting = {}
    for key, value in settings.items():
        field = f"{prefix}_{key}"
        own = getattr(config, field)
        default = defaults[key] if args is not None else getattr(type(config), field, defaults[key])
        if own != value and (own != default or field in typed):
            contradicting[key] = own
    if contradicting:
        raise ValueError(
            f"--muon-preset {preset} stands for {described(settings)}, but the run also says "
            f"{described(contradicting)}: keep the preset, or what it stands for as flags"
        )
    return with_fields(config, **{f"{prefix}_{key}": value for key, value in settings.items()})


def _presets_of(optimizer: str) -> dict[str, Preset]:
    if optimizer == "soap":
        return PRESETS_OF_SOAP
    return PRESETS if optimizer in LIKE_MUON else {}
