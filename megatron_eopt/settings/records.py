"""The records of settings that several optimizers have; an optimizer's own stand in its file.

The signature of a constructor gives a setting its name, type and default. Its record says the rest: a sentence for its
flag and the docs, which values it may have, who has it, and with which other setting it has an effect. From both
follow defaults and checks of groups, flags, arguments from a config, and settings of overrides.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from megatron_eopt.kernels.choice import KERNELS
from megatron_eopt.orthogonalize.coefficients import MAX_STEPS
from megatron_eopt.settings.values import (
    ABOVE_0,
    AT_LEAST_0,
    BELOW_1,
    UP_TO_1,
    Check,
    count,
    flag,
    one_of,
    two_below_1,
)

DecayMethod = Literal["decoupled", "l2", "independent", "palm"]
"""What weight decay is: ``p -= lr * weight_decay * p`` [1]; ``g + weight_decay * p`` in place of ``g``;
``p -= weight_decay * p``, whatever the learning rate; ``p -= lr^2 * weight_decay * p``, after PaLM's of ``lr^2`` [2].

``independent`` decays at a rate of 0, too, and torch's ``get_optimizer_state_dict`` steps with that rate where there is
no state yet: call ``init_state()`` before it.

[1] Loshchilov and Hutter, arXiv 1711.05101.  [2] Chowdhery et al., arXiv 2204.02311.
"""

WeightNorm = Literal["none", "hold", "brake"]
"""What is done to the norm of a weight."""

RelativeUpdate = Literal["none", "match"]
"""Whether the norm of an update is ``update_ratio`` times that of its weight."""

Moment2Method = Literal["none", "adamuon", "normuon", "namo"]
"""Whose second moment divides factors: see :mod:`~megatron_eopt.transforms.second_moment`."""

StepForm = Literal["triton", "torch"]
"""What does the elementwise work of a step."""

MOMENTUM_DTYPES = {"fp32": None, "bf16": torch.bfloat16}
"""Name of a flag's -> ``momentum_dtype``, whose None is that of each parameter, fp32 in a run of Megatron."""


@dataclass(frozen=True)
class Setting:
    """What a signature cannot say of a setting.

    Attributes:
        name: argument of constructors, and key of groups.
        help: a sentence, for its flag and the docs; empty where it has no flag.
        check: which values it may have; filled in from the type in the signature.
        whole: whether it is of the optimizer as a whole, so that groups cannot have their own.
        planned: whether ranks plan by it: they compare it, and plan anew where it changes.
        only_with: another setting, and the values of that with which this one has an effect.
        megatrons: whether Megatron has the flag itself.
        choices: of a flag; filled in from a ``Literal``.
        metavar: what ``--help`` calls the flag's value.
        default: filled in from the signature, but where a ``TypedDict`` names the setting.
    """

    name: str
    help: str = ""
    check: Check | None = None
    whole: bool = False
    planned: bool = False
    only_with: tuple[str, tuple[object, ...]] | None = None
    megatrons: bool = False
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    default: Any = None


def _check_momentum_dtype(called: str, value: Any) -> None:
    if value not in MOMENTUM_DTYPES.values():
        raise ValueError(f"{called} is None, for that of each parameter, or torch.bfloat16, got {value!r}")


RATES = (
    Setting("lr", check=AT_LEAST_0),
    Setting("weight_decay", check=AT_LEAST_0),
)

DECAY = (
    Setting("use_decoupled_weight_decay", planned=True),
    Setting("weight_decay_method", planned=True),
)

MOMENTUM = (
    Setting("momentum", "Decay rate of the momentum, in [0, 1).", BELOW_1, megatrons=True),
    Setting("nesterov", "Look ahead, as Nesterov's momentum does.", megatrons=True),
)

PARAMETERS = (
    Setting("pg_collection", whole=True),
    Setting("execution", whole=True),
    Setting("split_qkv", "Orthogonalize fused projections whole.", whole=True, megatrons=True, default=False),
    Setting("is_qkv_fn", whole=True),
    Setting("qkv_split_shapes", whole=True),
)

ITERATION = (
    Setting("num_ns_steps", "Newton-Schulz steps.", count(1, MAX_STEPS), planned=True, megatrons=True),
    Setting("coefficient_type", "Coefficients of the Newton-Schulz steps.", planned=True, megatrons=True),
    Setting(
        "fp32_matmul_prec",
        "Precision of the Newton-Schulz products: bf16 (low, medium), TF32 (high) or fp32 (highest).",
        whole=True,
        megatrons=True,
    ),
    Setting(
        "tp_mode",
        "How sharded matrices are orthogonalized: exactly, but for blockwise, which takes each shard for a matrix. "
        "auto takes owner, and gram for what would leave ranks idle.",
        whole=True,
        megatrons=True,
    ),
)

SCALE = (
    Setting("scale_mode", "How the size of an update follows from the shape.", planned=True, megatrons=True),
    Setting(
        "extra_scale_factor",
        "Multiplies the update; 0.2 with spectral gives updates the size of AdamW's.",
        ABOVE_0,
        planned=True,
        megatrons=True,
    ),
)

NORM = (
    Setting(
        "weight_norm",
        "The norm of a matrix: hold keeps it, and steps have lr times the norm; brake lets a part of its change "
        "through.",
        planned=True,
        default="none",
    ),
    Setting(
        "brake_outward",
        "For brake: the part of a norm's growth, in [0, 1].",
        UP_TO_1,
        planned=True,
        only_with=("weight_norm", ("brake",)),
        default=0.5,
    ),
    Setting(
        "brake_inward",
        "For brake: the part of what a norm shrinks by, in [0, 1].",
        UP_TO_1,
        planned=True,
        only_with=("weight_norm", ("brake",)),
        default=1.0,
    ),
)
"""Modifiers of the norms of weights."""

RELATIVE = (
    Setting(
        "relative_update",
        "The norm of an update, before the rate: match makes it --muon-update-ratio times that of its weight.",
        planned=True,
        default="none",
    ),
    Setting(
        "update_ratio",
        "For --muon-relative-update: the norm of an update over that of its weight.",
        ABOVE_0,
        planned=True,
        only_with=("relative_update", ("match",)),
        default=1.0,
    ),
    Setting(
        "max_update_rms",
        "Largest RMS of the entries of an update; 0 for no bound.",
        AT_LEAST_0,
        planned=True,
        default=0.0,
    ),
)
"""Modifiers of the norms of updates."""

CAUTION = (
    Setting(
        "cautious_weight_decay",
        "Decay only entries whose signs do not differ from their update's (arXiv 2510.12402).",
        planned=True,
        default=False,
    ),
)

SECOND_MOMENT = (
    Setting(
        "moment2_method",
        "Whose second moment divides factors; none is Muon's own step.",
        planned=True,
        default="none",
    ),
    Setting(
        "beta2",
        "Decay rate of the second moment, in [0, 1).",
        BELOW_1,
        only_with=("moment2_method", ("adamuon", "normuon", "namo")),
        default=0.95,
    ),
    Setting(
        "eps",
        "Bounds the division by the second moment from below.",
        ABOVE_0,
        only_with=("moment2_method", ("adamuon", "normuon", "namo")),
        default=1e-8,
    ),
    Setting(
        "align_rms",
        "Leave adamuon's update as large as the division makes it.",
        planned=True,
        only_with=("moment2_method", ("adamuon",)),
        default=True,
    ),
)

EXECUTION = (
    Setting("data_parallel_group", whole=True),
    Setting(
        "cuda_graphs",
        "Replay the step as a CUDA graph, where no other rank shares a parameter.",
        flag,
        whole=True,
        default=False,
    ),
    Setting(
        "symmetric_products",
        "Kernel of symmetric products; by default that of a rule on device and dtype.",
        one_of(KERNELS, None),
        whole=True,
        choices=KERNELS,
    ),
    Setting("workspace", check=count(1), whole=True),
    Setting("offload_fraction", check=UP_TO_1, whole=True),
    Setting("momentum_dtype", check=_check_momentum_dtype, whole=True),
    Setting(
        "step_kernels",
        "What does the elementwise work of a step; by default that of a rule on device and dtype.",
        one_of(get_args(StepForm), None),
        whole=True,
        choices=get_args(StepForm),
    ),
)

ADAM = (
    Setting("betas", check=two_below_1),
    Setting("eps", check=ABOVE_0),
    Setting("maximize"),
)

GROUP_PRECISION = Setting("fp32_matmul_prec")
"""A setting of groups, where Muon's is of all its products."""

FACTORS = (
    Setting("shampoo_beta", "Decay rate of the factors, in [0, 1).", BELOW_1),
    Setting(
        "precondition_frequency",
        "Steps from one work on the factors to the next, counted from the first step: 4 works on them in steps 5, 9 "
        "and 13.",
        count(1),
    ),
    Setting(
        "share_over_dp",
        "Let every data-parallel rank keep and compute all factors.",
        whole=True,
    ),
)

TRANSFORMS = CAUTION + NORM + RELATIVE + SECOND_MOMENT
"""What may be done between the update of a matrix and its weight: see :mod:`~megatron_eopt.settings.modifiers`."""

_SHARED = ADAM + FACTORS + RATES + DECAY + MOMENTUM + PARAMETERS + ITERATION + SCALE + TRANSFORMS + EXECUTION

RECORDS = {record.name: record for record in _SHARED}
"""Name -> record, where an optimizer has none of its own."""


def names_of(records: tuple[Setting, ...]) -> tuple[str, ...]:
    """Names of records."""
    return tuple(record.name for record in records)
