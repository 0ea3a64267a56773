"""Optimizers that orthogonalize the matrices of all their groups together, by a plan."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_eopt.optimizers.batch import local
from megatron_eopt.optimizers.group_settings import (
    COEFFICIENTS,
    EXTRA_SCALE,
    SCALE_MODE,
    STEPS,
    UpdateSettings,
    own_settings,
)
from megatron_eopt.optimizers.logical import DescribedMatrix
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer
from megatron_eopt.optimizers.sharded import ShardedMatrices
from megatron_eopt.optimizers.skipping import Skipping
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.parallel.cost import Rates
from megatron_eopt.parallel.plan import TpMode
from megatron_eopt.parallel.planned import Planned
from megatron_eopt.parallel.sharing import Parameter
from megatron_eopt.parallel.variants import Variant, Variants, plan_together

# Settings of a group with which a resumed run goes on, or it is not bit-equal: what computed symmetric products, and
# the rates that the plan was made with.
RUNG = "symmetric_products"
RATES = "plan_rates"


class PlannedOptimizer(ShardedMatrices, OrthogonalizedOptimizer):
    """An optimizer whose updates follow a plan, which is made of what each group says of them.

    Attributes:
        newton_schulz: the iteration of groups that say nothing else of it,
        scale_mode: likewise, and
        extra_scale_factor: likewise.
        tp_mode: what the user asked for.
        plan_rates: of the cost model, or ``measure``.
        symmetric_products: what the user wants to compute them; None for what the checkpoint says, or the fastest.
        newton_schulz_calls: how many logical matrices the steps of this optimizer have orthogonalized since it was
            made: those of which this rank has a part, whichever rank computed them. A matrix whose gradient was not
            finite counts too: it is orthogonalized, and the result is left out.
    """

    carried_settings = frozenset({RUNG, RATES})

    newton_schulz: NewtonSchulz
    scale_mode: ScaleMode
    extra_scale_factor: float
    tp_mode: TpMode
    plan_rates: Rates | Literal["measure"]
    symmetric_products: str | None
    newton_schulz_calls: int = 0

    # On the class, because torch leaves the attributes of an optimizer out of its pickles and copies.
    _planned: Planned | Variants | None = None
    _planned_for: object = None

    def settings_of_groups(self) -> dict[str, Any]:
        """Also those of the iteration and of the scale."""
        return super().settings_of_groups() | {
            STEPS: self.newton_schulz.steps,
            COEFFICIENTS: self.newton_schulz.coefficient_type,
            SCALE_MODE: self.scale_mode,
            EXTRA_SCALE: self.extra_scale_factor,
        }

    @property
    def _takes_any_dimensions(self) -> bool:
        """A plan is of matrices."""
        return False

    @property
    def planned(self) -> Planned | Variants:
        """All parameters, and the plan of a step.

        Settled when it is first asked for, by all ranks together, and again after a group was added or has other
        settings of the iteration or the scale.
        """
        wanted = (self.newton_schulz, self.scale_mode, self.extra_scale_factor, self._own_settings())
        if self._planned is None or self._planned_for != wanted:
            self._planned = self._settled()
            self._planned_for = wanted
        return self._planned

    def explain(self) -> str:
        """The plan of a step as a table."""
        return self.planned.explain()

    def explain_proposed(self) -> str:
        """What :meth:`explain` will say, before ranks agree."""
        return self.proposed.explain()

    @property
    def matrices_per_step(self) -> int:
        """How many logical matrices this rank has a part of: so many a step orthogonalizes if all have gradients."""
        return sum(len(self.matrix_layouts(parameter)) for parameter in self._parameters())

    @property
    def matrices_updated(self) -> int:
        """All that are planned are orthogonalized."""
        return self.newton_schulz_calls

    def described_matrices(self, settled: bool = True) -> dict[Tensor, list[DescribedMatrix]]:
        """The logical matrices of each parameter, by the plan."""
        plan = (self.planned if settled else self.proposed).plan
        schemes = {i: bucket.scheme.replace("_", " ") for bucket in plan.buckets for i in bucket.matrices}
        flat = iter(enumerate(plan.matrices))
        return {
            parameter: [
                DescribedMatrix(
                    within(matrix.name),
                    matrix.shape,
                    schemes[i],
                    self.update_settings(group).scale(*matrix.shape),
                    self.predicted_rms(*matrix.shape, group),
                )
                for i, matrix in islice(flat, len(self.matrix_layouts(parameter)))
            ]
            for group in self.param_groups
            for parameter in group["params"]
        }

    def predicted_rms(self, rows: int, cols: int, group: Mapping[str, Any] | None = None) -> float | None:
        """RMS of the entries of the first update of a matrix of full rank, before the learning rate.

        Args:
            rows: of the logical matrix.
            cols: likewise.
            group: the one it is in; None for one without settings of its own.

        Returns:
            None where it depends on the gradients.
        """
        return self.update_settings(group or {}).predicted_rms(rows, cols)

    def update_settings(self, group: Mapping[str, Any]) -> UpdateSettings:
        """The iteration and the scale that the matrices of a group get.

        Raises:
            ValueError: if the group says what the optimizer would refuse.
        """
        return UpdateSettings(self.newton_schulz, self.scale_mode, self.extra_scale_factor).of_group(group)

    @property
    def proposed(self) -> Planned | Variants:
        """What :attr:`planned` will be, before ranks agree on it: for a run that is only described. Made anew."""
        parameters = self._parameters()
        described = [
            Parameter(name, self.layout(p), self.split_of(p), local(p).dtype)
            for name, p in zip(self._names(), parameters, strict=True)
        ]
        settings = [self.update_settings(group) for group in self.param_groups]
        variants = [
            variant
            for group, variant in zip(self.param_groups, map(self._variant, settings), strict=True)
            for _ in group["params"]
        ]
        return plan_together(described, variants, local(parameters[0]).device, self.tp_mode, self._rates())

    def _planned_alone(
        self, described: Parameter, device: torch.device, group: Mapping[str, Any]
    ) -> Planned | Variants:
        """The plan of one tensor, with the settings of a group; what computes it is as in :attr:`planned`."""
        _ = self.planned
        variant = self._variant(self.update_settings(group))
        planned = plan_together([described], [variant], device, self.tp_mode, self._rates())
        planned.settle(self.symmetric_products, self.param_groups[0].get(RUNG))
        return planned

    def _settled(self) -> Planned | Variants:
        planned = self.proposed
        choice = planned.settle(self.symmetric_products, self.param_groups[0].get(RUNG))
        for group in self.param_groups:
            group[RUNG] = choice.kernel
            group[RATES] = planned.rates.state_dict()
        return planned

    def _rates(self) -> Rates | None:
        """Those of the checkpoint where they were measured; None where they have to be."""
        if isinstance(self.plan_rates, Rates):
            return self.plan_rates
        known = self.param_groups[0].get(RATES)
        return None if known is None else Rates.from_state_dict(known)

    def _variant(self, settings: UpdateSettings) -> Variant:
        """What the plan has to know of settings: the iteration, and what it multiplies orthogonal factors by."""
        return Variant(settings.name, settings.newton_schulz, settings.scale)

    def _own_settings(self) -> list[dict[str, Any]]:
        """What each group says of its updates: where that changes, the plan is made anew."""
        return own_settings(self.param_groups)

    def _count(self, places: Sequence[int]) -> None:
        """Count the matrices of the parameters that were worked on in a step."""
        self.newton_schulz_calls += sum(len(matrices) for matrices in self.planned.matrices(places))

    def _prepare(self, parameters: Sequence[Tensor]) -> Skipping:
        skipping = super()._prepare(parameters)
        _ = self.planned
        return skipping

    def _agree(self, flags: Tensor) -> Tensor:
        return flags if self.tp_mode == "blockwise" else self.planned.agree(flags)

    def _takes_part(self, place: int, parameter: Tensor) -> bool:
        # also without a gradient where others wait for this rank's part
        return super()._takes_part(place, parameter) or self.planned.shares(place)

    def _check_update_settings(self, group: Mapping[str, Any], number: int) -> None:
        try:
            self.update_settings(group)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: group {number}: {error}") from error


def within(name: str) -> str:
    """The name of a matrix within its parameter, from ``PARAMETER[NAME]``."""
    return name.partition("[")[2].rstrip("]")
