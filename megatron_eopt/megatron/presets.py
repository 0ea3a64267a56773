"""Presets for the size of updates, put into Megatron's config."""

import copy
from typing import Any

from megatron_eopt.family import LIKE_MUON
from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.orthogonalize.scale import PRESETS

_DEFAULT = PRESETS["megatron"]


def with_preset(config: Any) -> Any:
    """The config with what its ``muon_preset`` says; the same object where it has none.

    Raises:
        ValueError: for an unknown preset, with an optimizer whose updates have a size of their own, and where the
            config also has a scale mode or a factor that contradicts it.
    """
    preset = getattr(config, "muon_preset", None)
    if preset is None:
        return config
    check_choice("preset", preset, tuple(PRESETS))
    name = config.optimizer.removeprefix("dist_")
    if name not in LIKE_MUON:
        raise ValueError(
            f"--muon-preset {preset} is for {' and '.join(LIKE_MUON)}, and updates of {name} have a size of their own: "
            f"leave it away"
        )
    given = (config.muon_scale_mode, config.muon_extra_scale_factor)
    if given not in (_DEFAULT, PRESETS[preset]):
        mode, factor = PRESETS[preset]
        raise ValueError(
            f"--muon-preset {preset} stands for --muon-scale-mode {mode} --muon-extra-scale-factor {factor:g}, but the "
            f"run also says {given[0]} and {given[1]:g}: keep the preset or the two"
        )
    found = copy.copy(config)
    found.muon_scale_mode, found.muon_extra_scale_factor = PRESETS[preset]
    return found
