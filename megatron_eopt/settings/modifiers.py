"""What a group may have done between the update of its matrices and their weights.

Each modifier is a setting, and they compose: with ``W`` a weight, ``U`` its update, scaled and before the learning
rate, and norms those of whole logical matrices::

    W <- W - lr weight_decay [sign(U) sign(W) >= 0] W     cautious weight decay [1], where it is on
    a  = lr                                               relative_update "none"
       = lr min(1, max_update_rms / RMS(U))               where max_update_rms is not 0
       = lr update_ratio ||W|| / ||U||                    "match" [2]
    W <- W - a U                                          weight_norm "none"
    W <- R normalize(W - lr R normalize(U))               "hold" [3], with R the norm of W before the first step
    W <- (||W|| + s d) normalize(W - a U)                 "brake" [2], with d = ||W - a U|| - ||W||, and s brake_outward
                                                          where the norm grows, else brake_inward

[1] Chen et al., Cautious Weight Decay, arXiv 2510.12402.  [2] RelativeUpdateHook and RadialBrakeHook of
emerging-optimizers 0.5, weight_update_hooks.  [3] Wen et al., Hyperball Optimization (2025).
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_eopt.settings.groups import DECOUPLED, METHOD
from megatron_eopt.settings.records import RECORDS, DecayMethod, Moment2Method, RelativeUpdate, Setting, WeightNorm

RADIUS = "radius"  # kept of each logical matrix whose norm is held
MOMENT2_BUFFER = "moment2_buffer"

OPTIONAL = {RADIUS: "weight_norm", MOMENT2_BUFFER: "moment2_method"}
"""State keys of modifiers, without the number of a matrix -> the setting. Where that may be ``none``, a run with it
goes on from a state without, and without it from a state with."""

INSTEAD_OF_DECAY = "it keeps the norm of every matrix, whatever decays"


def without_matrix(key: str) -> str:
    """A state key of a modifier without the number of a matrix."""
    return key if key in OPTIONAL else key.rpartition("_")[0]


def optional_states(known: Mapping[str, Setting]) -> list[str]:
    """Those of :data:`OPTIONAL` that an optimizer with these settings may be without."""
    return [key for key, setting in OPTIONAL.items() if setting in known and "none" in known[setting].choices]


@dataclass(frozen=True, kw_only=True)
class GroupModifiers:
    """What a group has done to its updates and weights, by its settings."""

    decay_method: DecayMethod
    cautious_weight_decay: bool
    weight_norm: WeightNorm
    brake_outward: float
    brake_inward: float
    relative_update: RelativeUpdate
    update_ratio: float
    max_update_rms: float
    moment2_method: Moment2Method
    align_rms: bool

    @classmethod
    def of(cls, group: Mapping[str, Any], known: Container[str]) -> "GroupModifiers":
        """Those of a group, whose keys mean what records say only if an optimizer has these settings, ``known``."""
        found = {key: group[key] if key in known else RECORDS[key].default for key in MODIFIERS}
        method: DecayMethod | None = group[METHOD] if METHOD in known else "decoupled"
        if method is None:
            method = "decoupled" if group[DECOUPLED] else "l2"
        return cls(decay_method=method, **found)

    @property
    def holds(self) -> bool:
        """Whether matrices keep their norms."""
        return self.weight_norm == "hold"

    @property
    def matches(self) -> bool:
        """Whether norms of updates follow those of weights."""
        return self.relative_update == "match"

    @property
    def measured(self) -> bool:
        """Whether norms of whole matrices size the step."""
        return self.weight_norm != "none" or self.matches or self.max_update_rms != 0

    @property
    def needs_norm(self) -> bool:
        """Whether a weight of norm 0 would never move."""
        return self.holds or self.matches

    @property
    def size(self) -> str | None:
        """How large updates are, where scale settings have no effect."""
        if self.holds:
            return "lr times the norm of the matrix, by weight_norm 'hold'"
        if self.matches:
            return "lr times update_ratio times the norm of the matrix, by relative_update 'match'"
        return None

    @property
    def by_torch(self) -> str:
        """What kernels of steps do not do; empty if they serve."""
        others = []
        if self.matches:
            others.append("relative_update")
        if self.max_update_rms:
            others.append("max_update_rms")
        if self.weight_norm == "brake":
            others.append("weight_norm 'brake'")
        return " and ".join(others)

    def check(self, owner: str) -> None:
        """Refuse modifiers that have no effect beside others."""
        if self.matches and self.max_update_rms:
            raise ValueError(f"{owner}: max_update_rms has no effect with relative_update 'match', which sizes updates")
        of_size = self.matches or self.max_update_rms or not self.align_rms
        if self.holds and (of_size or self.cautious_weight_decay):
            raise ValueError(
                f"{owner}: relative_update, max_update_rms, align_rms and cautious_weight_decay have no effect with "
                f"weight_norm 'hold', whose updates have lr times the norm of the weight, and which has no weight "
                f"decay: take them away"
            )


MODIFIERS = [name for name in GroupModifiers.__annotations__ if name in RECORDS]
