"""Published settings of Muon and of SOAP, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """What a publication sets of an update.

    Attributes:
        settings: arguments of the optimizer's class.
        source: the paper or repository.
        beside: flags of a run that were published with it, which a preset does not set.
    """

    settings: Mapping[str, Any]
    source: str
    beside: str = ""


_LIU = "Liu et al., arXiv 2502.16982"

PRESETS = {
    "megatron": Preset(
        {"scale_mode": "spectral", "extra_scale_factor": 1.0},
        "Megatron-Core's defaults",
    ),
    "match_adamw": Preset({"scale_mode": "spectral", "extra_scale_factor": 0.2}, _LIU),
    "keller": Preset(
        {"scale_mode": "shape_scaling", "extra_scale_factor": 1.0},
        "Jordan et al., https://kellerjordan.github.io/posts/muon/",
    ),
    "unit_rms": Preset(
        {"scale_mode": "unit_rms_norm", "extra_scale_factor": 1.0},
        "Bernstein, https://jeremybernste.in/writing/deriving-muon",
    ),
    "eo-0.5": Preset(
        {
            "scale_mode": "spectral",
            "extra_scale_factor": 0.2,
            "momentum": 0.9,
            "nesterov": False,
            "coefficient_type": "polar_express",
            "num_ns_steps": 16,
        },
        "arXiv 2607.20548, whose recipe emerging-optimizers 0.5 follows (its issue 259)",
        "--weight-decay 0.1",
    ),
    "kimi-k2": Preset(
        {
            "scale_mode": "spectral",
            "extra_scale_factor": 0.2,
            "momentum": 0.95,
            "nesterov": False,
            "coefficient_type": "simple",
            "num_ns_steps": 5,
        },
        f"Kimi Team, arXiv 2507.20534, Algorithm 1, with the iteration of {_LIU}",
        "--weight-decay 0.1 --qk-clip --qk-clip-threshold 100",
    ),
    "deepseek-v4": Preset(
        {
            "scale_mode": "spectral",
            "extra_scale_factor": 0.18,
            "momentum": 0.95,
            "nesterov": True,
            "coefficient_type": "deepseekv4",
            "num_ns_steps": 10,
        },
        "DeepSeek-AI, DeepSeek-V4 (2026), Algorithm 1, https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro",
        "--weight-decay 0.1",
    ),
    "modded-nanogpt": Preset(
        {
            "scale_mode": "shape_scaling",
            "extra_scale_factor": 1.0,
            "momentum": 0.95,
            "nesterov": True,
            "coefficient_type": ((2.0, -1.5, 0.5),),
            "num_ns_steps": 12,
        },
        "KellerJordan/modded-nanogpt, track 3, result 36 (the tuned baseline of June 2026)",
        "--muon-lr 0.025 --muon-weight-decay 0.05 --weight-decay 0.001 --adam-beta1 0.8 --adam-eps 1e-10",
    ),
}
"""Of Muon and what is like it: name -> preset.

RMS 0.2 of an update is AdamW's: see :func:`~megatron_eopt.orthogonalize.scale.muon_scale_factor`.
"""

PRESETS_OF_SOAP = {
    "megatron": Preset(
        {
            "use_kl_shampoo": True,
            "basis_of": "current",
            "sort_bases": "before",
            "basis_method": "qr",
            "precondition_frequency": 1,
        },
        "Megatron-Core's defaults",
    )
}


def described(settings: Mapping[str, Any]) -> str:
    """Settings as ``name value``, with commas between."""
    return ", ".join(f"{name} {_short(value)}" for name, value in settings.items())


def preset_line(name: str, optimizer: str) -> str:
    """What a preset sets of an optimizer, by whom, and what was published beside it."""
    preset = (PRESETS_OF_SOAP if optimizer == "soap" else PRESETS)[name]
    beside = f"; published with {preset.beside}, which a preset leaves to the run" if preset.beside else ""
    return f"--muon-preset {name} sets {described(preset.settings)} ({preset.source}){beside}"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
