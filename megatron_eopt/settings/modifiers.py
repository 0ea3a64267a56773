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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_eopt.settings.records import DecayMethod, Moment2Method, WeightNorm

RADIUS = "radius"  # kept of each logical matrix whose norm is held
MOMENT2_BUFFER = "moment2_buffer"

OPTIONAL = (RADIUS, MOMENT2_BUFFER)
"""State keys of modifiers, without the number of a matrix: a run with them goes on from a state without, and without
them from a state with."""

INSTEAD_OF_DECAY = "it keeps the norm of every matrix, whatever decays"


def without_matrix(key: str) -> str:
    """A state key of a modifier without the number of a matrix."""
    return key if key in OPTIONAL else key.rpartition("_")[0]


@dataclass(frozen=True)
class Modified:
    """How a group's updates and weights are modified, found when the step is planned."""

    decay_method: DecayMethod
    moment2_method: Moment2Method
    cautious: bool  # whether weight decay waits for the signs of the update
    holds: bool  # whether matrices keep their norms
    measured: bool  # whether norms of whole matrices size the step
    needs_norm: bool  # whether a weight of norm 0 would never move


def modified(group: Mapping[str, Any], decay_method: DecayMethod) -> Modified:
    """What the settings of a group ask for."""
    return Modified(
        decay_method,
        moment2_of(group),
        cautious=is_cautious(group),
        holds=holds(group),
        measured=measures(group),
        needs_norm=needs_norm(group),
    )


def modifiers_in(group: Mapping[str, Any]) -> list[str]:
    """Settings of a group that say which modifiers it has."""
    names = ("cautious_weight_decay", "weight_norm", "relative_update", "max_update_rms", "moment2_method")
    return [name for name in names if name in group]


def weight_norm_of(group: Mapping[str, Any]) -> WeightNorm:
    """What is done to norms of weights; nothing by an optimizer without the setting, as below."""
    weight_norm: WeightNorm = group.get("weight_norm", "none")
    return weight_norm


def moment2_of(group: Mapping[str, Any]) -> Moment2Method:
    """Whose second moment divides factors."""
    method: Moment2Method = group.get("moment2_method", "none")
    return method


def matches(group: Mapping[str, Any]) -> bool:
    """Whether norms of updates follow those of weights."""
    return bool(group.get("relative_update", "none") == "match")


def bound_of(group: Mapping[str, Any]) -> float:
    """The largest RMS of an update; 0 for no bound."""
    bound: float = group.get("max_update_rms", 0.0)
    return bound


def is_cautious(group: Mapping[str, Any]) -> bool:
    """Whether weight decay waits for the signs of the update."""
    return bool(group.get("cautious_weight_decay", False))


def aligns_rms(group: Mapping[str, Any]) -> bool:
    """Whether updates of adamuon have Muon's size."""
    return bool(group.get("align_rms", True))


def holds(group: Mapping[str, Any]) -> bool:
    """Whether matrices keep their norms."""
    return weight_norm_of(group) == "hold"


def measures(group: Mapping[str, Any]) -> bool:
    """Whether norms of global matrices are needed."""
    return weight_norm_of(group) != "none" or matches(group) or bound_of(group) != 0


def needs_norm(group: Mapping[str, Any]) -> bool:
    """Whether a weight of norm 0 would never move."""
    return holds(group) or matches(group)


def sizes(group: Mapping[str, Any]) -> str | None:
    """How large updates are, where scale settings have no effect."""
    if holds(group):
        return "lr times the norm of the matrix, by weight_norm 'hold'"
    if matches(group):
        return "lr times update_ratio times the norm of the matrix, by relative_update 'match'"
    return None


def by_torch(group: Mapping[str, Any]) -> str:
    """What kernels of steps do not do; empty if they serve."""
    others = []
    if matches(group):
        others.append("relative_update")
    if bound_of(group):
        others.append("max_update_rms")
    if weight_norm_of(group) == "brake":
        others.append("weight_norm 'brake'")
    return " and ".join(others)


def check_modifiers(name: str, group: Mapping[str, Any]) -> None:
    """Refuse modifiers that have no effect beside held norms."""
    if matches(group) and bound_of(group):
        raise ValueError(f"{name}: max_update_rms has no effect with relative_update 'match', which sizes updates")
    of_size = matches(group) or bound_of(group) or not aligns_rms(group)
    if holds(group) and (of_size or is_cautious(group)):
        raise ValueError(
            f"{name}: relative_update, max_update_rms, align_rms and cautious_weight_decay have no effect with "
            f"weight_norm 'hold', whose updates have lr times the norm of the weight, and which has no weight decay: "
            f"take them away"
        )
