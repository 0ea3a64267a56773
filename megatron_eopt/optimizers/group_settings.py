"""How momenta become updates: settings of an optimizer, of which each of its groups may have others."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from numbers import Real
from typing import Any

import torch.distributed as dist

from megatron_eopt.orthogonalize.coefficients import composite_range, set_length
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.scale import ScaleMode, muon_scale_factor, predicted_update_rms, validate_scale_mode

logger = logging.getLogger(__name__)

STEPS, COEFFICIENTS, SCALE_MODE, EXTRA_SCALE = "num_ns_steps", "coefficient_type", "scale_mode", "extra_scale_factor"

GROUP_SETTINGS = (STEPS, COEFFICIENTS, SCALE_MODE, EXTRA_SCALE)
"""What a group may say; what it does not say is the optimizer's."""


@dataclass(frozen=True)
class UpdateSettings:
    """The iteration, and the size of updates, checked when they are made.

    Attributes:
        newton_schulz: settings of the iteration.
        scale_mode: how the size of an update follows from the shape of the matrix.
        extra_scale_factor: multiplies it; any finite number.

    Raises:
        ValueError: for an unknown scale mode, or a factor that is not a finite number.
    """

    newton_schulz: NewtonSchulz
    scale_mode: ScaleMode
    extra_scale_factor: float

    def __post_init__(self) -> None:
        validate_scale_mode(self.scale_mode)
        factor = self.extra_scale_factor
        if not isinstance(factor, Real) or not isfinite(factor):
            raise ValueError(f"extra_scale_factor is a finite number, got {factor!r}")

    def of_group(self, group: Mapping[str, Any]) -> "UpdateSettings":
        """These settings, but for what a group says anew.

        Raises:
            ValueError: for values that the optimizer would refuse, or that do not go together.
        """
        iteration = self.newton_schulz
        try:
            own = replace(
                iteration,
                steps=group.get(STEPS, iteration.steps),
                coefficient_type=group.get(COEFFICIENTS, iteration.coefficient_type),
            )
        except TypeError as error:  # neither a name nor a list of three numbers each
            raise ValueError(f"unknown coefficient type {group[COEFFICIENTS]!r}: {error}") from error
        mode, factor = group.get(SCALE_MODE, self.scale_mode), group.get(EXTRA_SCALE, self.extra_scale_factor)
        return UpdateSettings(own, mode, factor)

    @property
    def iteration_name(self) -> str:
        """The iteration in words, which are equal for equal ones alone."""
        known = self.newton_schulz
        coefficients = known.coefficient_type if isinstance(known.coefficient_type, str) else str(known.schedule)
        return f"{known.steps} Newton-Schulz steps of {coefficients}"

    @property
    def name(self) -> str:
        """All of them in words, which are equal for equal settings alone."""
        return f"{self.iteration_name}, scale {self.scale_mode} times {float(self.extra_scale_factor)!r}"

    def scale(self, rows: int, cols: int) -> float:
        """Factor of an orthogonal factor, from the shape of the global matrix (of a piece under ``blockwise``)."""
        return self.extra_scale_factor * muon_scale_factor(rows, cols, self.scale_mode)

    def predicted_rms(self, rows: int, cols: int) -> float:
        """RMS of the entries of an update of a matrix of full rank, before the learning rate."""
        return predicted_update_rms(rows, cols, self.scale_mode, self.extra_scale_factor)


def own_settings(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each group says of :data:`GROUP_SETTINGS`."""
    return [{key: group[key] for key in GROUP_SETTINGS if key in group} for group in groups]


def note_short_schedule(settings: NewtonSchulz) -> None:
    """Warn, on the first rank, of fewer steps than were fitted together, unless they do as well to two digits."""
    first_rank = not dist.is_initialized() or dist.get_rank() == 0
    if not first_rank or settings.steps >= set_length(settings.coefficient_type):
        return
    ends = composite_range(settings.schedule)
    if all(f"{end:.2f}" == "1.00" for end in ends):
        return
    low, high = (f"{end:.4f}" if f"{end:.2f}" == "1.00" else f"{end:.2f}" for end in ends)
    logger.warning(
        "%s Newton-Schulz steps of %s are fewer than were fitted together: singular values in [0.01, 1] become %s to "
        "%s instead of 1",
        settings.steps,
        settings.coefficient_type,
        low,
        high,
    )
