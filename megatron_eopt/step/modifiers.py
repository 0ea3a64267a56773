"""What a group may have done between the update of its matrices and their weights.

Each modifier is a setting, and they compose: with ``W`` a weight, ``U`` its update, scaled and before the learning
rate, and norms those of whole logical matrices::

    W <- W - lr weight_decay [sign(U) sign(W) >= 0] W     cautious weight decay [1], where it is on
    a  = lr                                               relative_update "none"
       = lr update_ratio ||W|| / ||U||                    "match" [2]
    W <- W - a U                                          weight_norm "none"
    W <- R normalize(W - lr R normalize(U))               "hold" [3], with R the norm of W before the first step
    W <- (||W|| + s d) normalize(W - a U)                 "brake" [2], with d = ||W - a U|| - ||W||, and s brake_outward
                                                          where the norm grows, else brake_inward

[1] Chen et al., Cautious Weight Decay, arXiv 2510.12402.  [2] RelativeUpdateHook and RadialBrakeHook of
emerging-optimizers 0.5, weight_update_hooks.  [3] Wen et al., Hyperball Optimization (2025).
"""

from collections.abc import Mapping
from typing import Any

RADIUS = "radius"  # kept of each logical matrix whose norm is held
MOMENT2_BUFFER = "moment2_buffer"

OPTIONAL = (RADIUS, MOMENT2_BUFFER)
"""State keys of modifiers, without the number of a matrix: a run with them goes on from a state without, and without
them from a state with."""

INSTEAD_OF_DECAY = "it keeps the norm of every matrix, whatever decays"


def without_matrix(key: str) -> str:
    """A state key of a modifier without the number of a matrix."""
    return key if key in OPTIONAL else key.rpartition("_")[0]


def holds(settings: Mapping[str, Any]) -> bool:
    """Whether matrices keep their norms."""
    return settings.get("weight_norm") == "hold"


def measures(settings: Mapping[str, Any]) -> bool:
    """Whether norms of global matrices are needed."""
    return settings.get("weight_norm", "none") != "none" or settings.get("relative_update", "none") != "none"


def needs_norm(settings: Mapping[str, Any]) -> bool:
    """Whether a weight of norm 0 would never move."""
    return holds(settings) or settings.get("relative_update", "none") != "none"


def sizes(settings: Mapping[str, Any]) -> str | None:
    """How large updates are, where scale settings have no effect."""
    if holds(settings):
        return "lr times the norm of the matrix, by weight_norm 'hold'"
    if settings.get("relative_update") == "match":
        return "lr times update_ratio times the norm of the matrix, by relative_update 'match'"
    return None


def by_torch(settings: Mapping[str, Any]) -> str:
    """What kernels of steps do not do; empty if they serve."""
    others = []
    if settings["relative_update"] != "none":
        others.append("relative_update")
    if settings["weight_norm"] == "brake":
        others.append("weight_norm 'brake'")
    return " and ".join(others)


def check_modifiers(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse modifiers that have no effect beside held norms."""
    of_size = settings["relative_update"] != "none" or not settings["align_rms"]
    if holds(settings) and (of_size or settings["cautious_weight_decay"]):
        raise ValueError(
            f"{name}: relative_update, align_rms and cautious_weight_decay have no effect with weight_norm 'hold', "
            f"whose updates have lr times the norm of the weight, and which has no weight decay: take them away"
        )
