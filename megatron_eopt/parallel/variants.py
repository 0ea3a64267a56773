"""Parameters that are orthogonalized together, but not all by the same iteration or to the same size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.kernels import Choice
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.agree import same_plan
from megatron_eopt.parallel.cost import Rates
from megatron_eopt.parallel.measure import measured_rates
from megatron_eopt.parallel.plan import Matrix, Plan, TpMode
from megatron_eopt.parallel.planned import Planned, choose_products, product_dtypes
from megatron_eopt.parallel.sharing import Parameter, SharedParameters


@dataclass(frozen=True, eq=False)
class Variant:
    """How matrices are orthogonalized and scaled.

    Attributes:
        name: for people; variants of equal name are one.
        settings: of the iteration.
        scale: factor of a logical matrix from its global rows and columns (a piece's own under ``blockwise``).
    """

    name: str
    settings: NewtonSchulz
    scale: Callable[[int, int], float]


class Variants(SharedParameters):
    """What :class:`Planned` is for parameters of one variant, for those of several: one plan for each of them.

    The plans are executed one after another, in the order of their names. This is the same on every rank, whatever else
    a rank has, and so is that of the collectives. Nothing of one plan is exchanged while another is computed.

    Args:
        parameters: in the same order on every rank.
        variants: of each parameter; all of one precision.
        device: of the updates.
        tp_mode: what the user asked for.
        rates: for the predictions of ``auto``; None measures them, for which all ranks come here together.

    Raises:
        ValueError: as for :class:`Planned`.

    Attributes:
        each: the plan of every variant, by name, in the order of execution.
        plan: all of them together, with the matrices in the order of the parameters.
        rates: what the costs were predicted with.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        variants: Sequence[Variant],
        device: torch.device,
        tp_mode: TpMode,
        rates: Rates | None = None,
    ) -> None:
        super().__init__(parameters, device)
        self.rates = rates or measured_rates(self.groups, device, product_dtypes(parameters, variants[0].settings)[0])
        known = {variant.name: variant for variant in variants}
        self.each: dict[str, Planned] = {}
        self._at: dict[int, tuple[str, int]] = {}
        for name in sorted(known):
            settings, scale = known[name].settings, known[name].scale
            places = [place for place, variant in enumerate(variants) if variant.name == name]
            own = [parameters[place] for place in places]
            self.each[name] = Planned(own, device, tp_mode, settings, scale, self.rates)
            self._at |= {place: (name, number) for number, place in enumerate(places)}
        self.plan = self._joined()

    def explain(self) -> str:
        """The plan of every variant as a table, under its name."""
        return "\n\n".join(f"{name}:\n{planned.explain()}" for name, planned in self.each.items())

    def settle(self, kernel: str | None = None, kept: str | None = None) -> Choice:
        """Agree with the other ranks on all plans, on the variant of each parameter, and on one kernel for all.

        See :meth:`Planned.settle`.
        """
        same_plan(self._with_variants(), self.groups, self.device)
        return choose_products(list(self.each.values()), self.lowest, kernel, kept)

    def orthogonalize(self, updates: list[Tensor], places: Sequence[int]) -> list[Tensor]:
        """See :meth:`Planned.orthogonalize`."""
        return [self.merge(*each) for each in zip(places, self.factors(updates, places), strict=True)]

    def factors(self, updates: list[Tensor], places: Sequence[int]) -> list[list[Tensor]]:
        """See :meth:`Planned.factors`."""
        indices = {name: [i for i, place in enumerate(places) if self._at[place][0] == name] for name in self.each}
        own = {name: [updates[i] for i in of_variant] for name, of_variant in indices.items()}
        updates.clear()
        found: dict[int, list[Tensor]] = {}
        for name, planned in self.each.items():
            factors = planned.factors(own[name], [self._at[places[i]][1] for i in indices[name]])
            found |= dict(zip(indices[name], factors, strict=True))
        return [found[i] for i in range(len(places))]

    def split(self, place: int, x: Tensor) -> list[Tensor]:
        """See :meth:`Planned.split`."""
        name, number = self._at[place]
        return self.each[name].split(number, x)

    def merge(self, place: int, parts: Sequence[Tensor]) -> Tensor:
        """See :meth:`Planned.merge`."""
        name, number = self._at[place]
        return self.each[name].merge(number, parts)

    def matrices(self, places: Sequence[int]) -> list[list[Matrix]]:
        """See :meth:`Planned.matrices`."""
        return [self.each[name].matrices([number])[0] for name, number in (self._at[place] for place in places)]

    def _names(self) -> list[str]:
        """The variant of every logical matrix."""
        places = range(len(self._parameters))
        return [self._at[place][0] for place in places for _ in self.matrices([place])[0]]

    def _joined(self) -> Plan:
        of_matrices = self._names()
        matrices: dict[int, Matrix] = {}
        buckets = []
        for name, planned in self.each.items():
            own = [i for i, other in enumerate(of_matrices) if other == name]
            matrices |= dict(zip(own, planned.plan.matrices, strict=True))
            buckets += [replace(b, matrices=tuple(own[i] for i in b.matrices)) for b in planned.plan.buckets]
        return Plan(tuple(matrices[i] for i in range(len(of_matrices))), tuple(buckets))

    def _with_variants(self) -> Plan:
        """The plan with names that tell the variants apart, so that ranks which differ in these are found."""
        pairs = zip(self.plan.matrices, self._names(), strict=True)
        return replace(self.plan, matrices=tuple(replace(m, name=f"{m.name}, {variant}") for m, variant in pairs))


def plan_together(
    parameters: Sequence[Parameter],
    variants: Sequence[Variant],
    device: torch.device,
    tp_mode: TpMode,
    rates: Rates | None = None,
) -> Planned | Variants:
    """One plan where all parameters are of one variant, else :class:`Variants`, with the same methods."""
    if len({variant.name for variant in variants}) > 1:
        return Variants(parameters, variants, device, tp_mode, rates)
    return Planned(parameters, device, tp_mode, variants[0].settings, variants[0].scale, rates)
