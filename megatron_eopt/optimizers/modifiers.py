"""What a group may have done between the update of its matrices and their weights.

Each modifier is a setting, and they compose: with ``W`` a weight, ``U`` its update, scaled and before the learning
rate, and norms those of whole logical matrices::

    W <- W - lr weight_decay [sign(U) sign(W) >= 0] W     cautious weight decay [1], where it is on
    a  = lr                                               relative_update "none"
       = lr update_ratio ||W|| / ||U||                    "match" [2]
       = lr min(1, update_ratio ||W|| / ||U||)            "bound"
    W <- W - a U                                          weight_norm "none"
    W <- R normalize(W - lr R normalize(U))               "hold" [3], with R the norm of W before the first step
    W <- (||W|| + s d) normalize(W - a U)                 "brake" [2], with d = ||W - a U|| - ||W||, and s brake_outward
                                                          where the norm grows, else brake_inward

[1] Chen et al., Cautious Weight Decay, arXiv 2510.12402.  [2] RelativeUpdateHook and RadialBrakeHook of
emerging-optimizers 0.5, weight_update_hooks.  [3] Wen et al., Hyperball Optimization (2025).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from typing import Any, Literal, get_args

from torch import Tensor

from megatron_eopt.orthogonalize.choices import check_choice

WeightNorm = Literal["none", "hold", "brake"]
"""What is done to the norm of a weight."""

RelativeUpdate = Literal["none", "match", "bound"]
"""Whether the norm of an update is, or is at most, ``update_ratio`` times that of its weight."""

Moment2Method = Literal["none", "adamuon", "normuon", "namo"]
"""Whose second moment divides factors: see :mod:`~megatron_eopt.optimizers.second_moment`."""

RADIUS = "radius"  # kept of each logical matrix whose norm is held
MOMENT2_BUFFER = "moment2_buffer"

OPTIONAL = (RADIUS, MOMENT2_BUFFER)
"""State keys of modifiers, without the number of a matrix: a run with them goes on from a state without, and without
them from a state with."""

INSTEAD_OF_DECAY = "it keeps the norm of every matrix, whatever decays"

ONLY_WITH = {
    "brake_outward": ("weight_norm", ("brake",)),
    "brake_inward": ("weight_norm", ("brake",)),
    "update_ratio": ("relative_update", ("match", "bound")),
    "beta2": ("moment2_method", ("adamuon", "normuon", "namo")),
    "eps": ("moment2_method", ("adamuon", "normuon", "namo")),
    "align_rms": ("moment2_method", ("adamuon",)),
}
"""Setting -> another one, and the values of that with which it has an effect."""


@dataclass(frozen=True)
class Modifiers:
    """The modifiers of a group, checked at construction."""

    cautious_weight_decay: bool = False
    weight_norm: WeightNorm = "none"
    brake_outward: float = 0.5
    brake_inward: float = 1.0
    relative_update: RelativeUpdate = "none"
    update_ratio: float = 1.0
    moment2_method: Moment2Method = "none"
    beta2: float = 0.95
    eps: float = 1e-8
    align_rms: bool = True

    def __post_init__(self) -> None:
        for key in ("cautious_weight_decay", "align_rms"):
            if not isinstance(getattr(self, key), bool):
                raise TypeError(f"{key} must be True or False, got {getattr(self, key)!r}")
        check_choice("weight_norm", self.weight_norm, get_args(WeightNorm))
        check_choice("relative_update", self.relative_update, get_args(RelativeUpdate))
        check_choice("moment2_method", self.moment2_method, get_args(Moment2Method))
        if not isinstance(self.beta2, Tensor) and not 0 <= self.beta2 < 1:
            raise ValueError(f"beta2 must lie in [0, 1), got {self.beta2}")
        for key, value in (("eps", self.eps), ("update_ratio", self.update_ratio)):
            if not isinstance(value, Tensor) and not 0 < value < inf:
                raise ValueError(f"{key} must be a finite number above 0, got {value}")
        for key, part in (("brake_outward", self.brake_outward), ("brake_inward", self.brake_inward)):
            if not 0 <= part <= 1:
                raise ValueError(f"{key} must lie in [0, 1], got {part}")
        of_size = self.relative_update != "none" or not self.align_rms
        if self.weight_norm == "hold" and (of_size or self.cautious_weight_decay):
            raise ValueError(
                "relative_update, align_rms and cautious_weight_decay have no effect with weight_norm 'hold', whose "
                "updates have lr times the norm of the weight, and which has no weight decay: take them away"
            )

    def of_group(self, group: Mapping[str, Any]) -> "Modifiers":
        """These modifiers, with what a group says itself."""
        own = {key: group[key] for key in MODIFIERS if key in group}
        return replace(self, **own) if own else self

    def check_effect(self, given: Mapping[str, Any]) -> None:
        """Refuse given settings that depend on another one."""
        for key, (other, values) in ONLY_WITH.items():
            if key in given and getattr(self, other) not in values:
                raise ValueError(
                    f"{key} has no effect with {other} {getattr(self, other)!r}, got {given[key]!r}: it belongs to "
                    f"{' and '.join(map(repr, values))}"
                )

    def checked(self, name: str, has: Mapping[str, tuple[object, ...]]) -> "Modifiers":
        """Refuse what an optimizer lacks; ``has`` are the values that it has."""
        for key, values in has.items():
            value = getattr(self, key)
            if value not in values:
                wanted = " or ".join(map(repr, values))
                raise ValueError(f"{name} has no {key} {value!r}, only {wanted}: take the setting away")
        return self

    @property
    def by_torch(self) -> str:
        """What kernels of steps do not do; empty if they serve."""
        others = {key for key in self.described() if key not in ONLY_WITH} - {"weight_norm", "moment2_method"}
        brake = {"weight_norm 'brake'"} if self.weight_norm == "brake" else set()
        return " and ".join(sorted(others | brake))

    @property
    def measures(self) -> bool:
        """Whether norms of global matrices are needed."""
        return self.weight_norm != "none" or self.relative_update != "none"

    @property
    def sizes(self) -> str | None:
        """How large updates are, where scale settings have no effect."""
        if self.weight_norm == "hold":
            return "lr times the norm of the matrix, by weight_norm 'hold'"
        if self.relative_update == "match":
            return "lr times update_ratio times the norm of the matrix, by relative_update 'match'"
        return None

    @property
    def needs_norm(self) -> bool:
        """Whether a weight of norm 0 would never move."""
        return self.weight_norm == "hold" or self.relative_update != "none"

    def settable(self, has: Mapping[str, tuple[object, ...]]) -> dict[str, Any]:
        """Those that groups may set, where an optimizer ``has`` certain values of some."""
        free = {key for key in MODIFIERS if len(has.get(key, (True, False))) > 1}
        fixed = {key for key, (other, values) in ONLY_WITH.items() if other in has and not {*has[other]} & {*values}}
        fixed |= {"align_rms"} if has.get("weight_norm") == ("hold",) else set()
        return {key: value for key, value in asdict(self).items() if key in free - fixed}

    def described(self, has: Mapping[str, tuple[object, ...]] | None = None) -> dict[str, Any]:
        """What is not the default, for checkpoints."""
        return {key: value for key, value in self.settable(has or {}).items() if value != MODIFIERS[key]}


MODIFIERS: dict[str, Any] = {field.name: field.default for field in fields(Modifiers)}
"""Name -> default."""

OF_MOMENT = ("moment2_method", "beta2", "eps", "align_rms")
"""Those of the second moment, which programs of relatives lack."""

NUMBERS = tuple(key for key, default in MODIFIERS.items() if type(default) is float)
"""Those that are numbers."""

NONE = Modifiers()
