"""The Newton-Schulz iteration that a group's settings ask for."""

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_eopt.kernels.precision import MatmulPrecision
from megatron_eopt.orthogonalize.coefficients import composite_range, set_length
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.settings.groups import warn


def iteration_of(group: Mapping[str, Any], fp32_matmul_prec: MatmulPrecision, products: str | None) -> NewtonSchulz:
    """The iteration of a group's matrices; a ``ValueError`` for an impossible one."""
    return NewtonSchulz(
        steps=group["num_ns_steps"],
        coefficient_type=group["coefficient_type"],
        fp32_matmul_prec=fp32_matmul_prec,
        products=products,
    )


def note_short_schedule(settings: NewtonSchulz, earlier: Iterable[NewtonSchulz]) -> None:
    """Warn of fewer, worse steps than were fitted together, unless ``earlier`` groups have them, too."""
    if settings.steps >= set_length(settings.coefficient_type) or settings in earlier:
        return
    low, high = composite_range(settings.schedule)
    if max(1 - low, high - 1) >= 0.005:
        warn(
            f"{settings.steps} Newton-Schulz steps of {settings.coefficient_type} are fewer than were fitted together: "
            f"singular values in [0.01, 1] become {low:.2f} to {high:.2f} instead of 1"
        )
