"""Settings to begin with, and published ones of Muon and of SOAP, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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


RECOMMENDED = "match_adamw"
"""The preset of a call by name: in plain torch it stands for all that is in :data:`TO_BEGIN_WITH`."""


@dataclass(frozen=True)
class ToBeginWith:
    """What an optimizer is recommended with.

    Attributes:
        rate: of what it owns, in AdamW's rates of the same run.
        settings: arguments of its class.
        flags: of a run, beside those of the settings.
        why: in a few words.
    """

    rate: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    flags: str = ""
    why: str = ""


_MUON = {**PRESETS[RECOMMENDED].settings, "coefficient_type": "quintic", "fp32_matmul_prec": "medium", "momentum": 0.95}

TO_BEGIN_WITH = {
    "adamw": ToBeginWith(1.0),
    "muon": ToBeginWith(
        1.0,
        {**_MUON, "nesterov": True},
        why="updates the size of AdamW's; small models bear more",
    ),
    "adaptive_muon": ToBeginWith(1.0, {**_MUON, "nesterov": True, "moment2_method": "normuon"}, why="as Muon"),
    "spectron": ToBeginWith(
        20.0,
        {"momentum_beta": 0.95},
        "--spectron-rank 32",
        "the paper's momentum, and its rank, a quarter of a side",
    ),
    "soap": ToBeginWith(1.0, {"betas": (0.95, 0.95)}, why="Adam's updates, in another basis"),
    "shampoo": ToBeginWith(2.0),
    "kl_shampoo": ToBeginWith(3.0, {"precondition_frequency": 10}, why="new bases in every tenth step, as SOAP"),
    "psgd_kron": ToBeginWith(1 / 3, why="an update is as large as Lion's"),
    "lion": ToBeginWith(0.2, {}, "--weight-decay 0.1", "3 to 10 times less than AdamW's rate, as much more decay"),
    "signum": ToBeginWith(0.2, {}, "--weight-decay 0.1", "as Lion"),
    "schedule_free_adamw": ToBeginWith(
        2 / 3,
        {},
        "--lr-decay-style constant --lr-warmup-iters 0 --schedule-free-adamw-warmup-steps 10",
        "its own warm-up in the place of Megatron's",
    ),
    "ademamix": ToBeginWith(
        1.0,
        {},
        "--ademamix-alpha 8 --ademamix-alpha-warmup 200 --ademamix-beta3-warmup 200",
        "the authors' alpha, and warm-ups over the whole run",
    ),
    "scion": ToBeginWith(0.9, {"radius": 50.0}, why="the paper's radius for hidden matrices"),
    "polargrad": ToBeginWith(
        100 / 3,
        {"coefficient_type": "polar_express", "num_ns_steps": 8},
        why="steps that leave singular values at 1, as its size is a sum of them",
    ),
    "muon_hyperball": ToBeginWith(20.0, {"momentum": 0.95, "nesterov": True}, why="the rate is the angle of a step"),
    "mars_muon": ToBeginWith(1.0, _MUON, why="as Muon, without its look-ahead"),
    "dion": ToBeginWith(20 / 3, {"rank_fraction": 0.25}, why="one of the paper's fractions"),
    "dion2": ToBeginWith(20 / 3, {"fraction": 0.25}, why="Dion's rate, and the authors' fraction"),
    "sinkgd": ToBeginWith(1 / 3, why="an update is as large as Lion's"),
}
"""Name of an optimizer -> what it is recommended with; tables, examples and builders read it here.

Rates are those of a coarse sweep of the demo's model, divided by AdamW's there, 3e-3; Muon's is that at which its
updates are as large as AdamW's.
"""


def presets_of(optimizer: str) -> dict[str, Mapping[str, Any]]:
    """The presets of an optimizer of plain torch by name, each with all settings that are recommended with it."""
    to_begin_with = TO_BEGIN_WITH[optimizer].settings
    published: Mapping[str, Preset] = {}
    if "scale_mode" in to_begin_with:
        published = PRESETS
    elif optimizer == "soap":
        published = PRESETS_OF_SOAP
    return {RECOMMENDED: to_begin_with} | {
        name: {**to_begin_with, **preset.settings} for name, preset in published.items()
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
