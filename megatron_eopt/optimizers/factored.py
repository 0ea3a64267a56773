"""Optimizers that keep the factors of weights, or are given them, and step with all of them together."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import batched
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.optimizers.parameters import local
from megatron_eopt.optimizers.factor_plan import Described, FactorPlan, Weight, is_tall
from megatron_eopt.optimizers.factor_step import Factor, Pair, RankSums, factor_gradients, project, step_pairs
from megatron_eopt.optimizers.group_settings import COEFFICIENTS, STEPS, UpdateSettings, own_settings
from megatron_eopt.optimizers.logical import DescribedMatrix
from megatron_eopt.optimizers.low_rank import (
    FACTOR_A,
    FACTOR_B,
    MOMENTUM,
    MOMENTUM_A,
    MOMENTUM_B,
    PROJECTED,
    U_A,
    U_B,
    LowRankState,
    U,
    wide_dtype,
)
from megatron_eopt.optimizers.planning import RUNG
from megatron_eopt.optimizers.skipping import Skipping, parameter_names
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.precision import fp32_products
from megatron_eopt.parallel.plan import TpMode
from megatron_eopt.parallel.sharing import Parameter, SharedParameters
from megatron_eopt.parallel.variants import Variant

logger = logging.getLogger(__name__)


class FactoredOptimizer(LowRankState):
    """The step of an optimizer of factors: from the gradients of weights to those of factors, and back to weights.

    Attributes:
        newton_schulz: the iteration of groups that say nothing else of it.
        num_power_iterations: of each step.
        tp_mode: how factors that are cut are orthogonalized.
        newton_schulz_calls: how many logical matrices the steps of this optimizer have updated since it was made, each
            by the orthogonalized momenta of its two factors; a parameter that is a factor itself counts as one.
    """

    carried_settings = frozenset({RUNG})

    newton_schulz: NewtonSchulz
    num_power_iterations: int
    tp_mode: TpMode
    newton_schulz_calls: int = 0

    # On the class, because torch leaves the attributes of an optimizer out of its pickles and copies.
    _plan: FactorPlan | None = None
    _planned_for: object = None
    _weights: dict[Tensor, Weight]
    _shared: SharedParameters
    _done: frozenset[Tensor] = frozenset()
    _errors: dict[str, float] | None = None

    def settings_of_groups(self) -> dict[str, Any]:
        """Also those of the iteration; whether a group is of pairs is no setting, but says what its parameters are."""
        own = {key: value for key, value in super().settings_of_groups().items() if key != "pairs"}
        return own | {STEPS: self.newton_schulz.steps, COEFFICIENTS: self.newton_schulz.coefficient_type}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices, or of pairs of factors.

        Raises:
            ValueError: for a parameter that the optimizer cannot have, or a setting out of its range.
        """
        super().add_param_group(param_group)
        self._plan = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state: of a weight that was projected the factors, which are not computed anew.

        Raises:
            ValueError: if the groups, their ranks or the shapes are others, or if a tensor is missing; nothing is
                changed then.
        """
        super().load_state_dict(state_dict)
        self._plan, self._done = None, frozenset()

    @property
    def projection_errors(self) -> dict[str, float]:
        """Relative errors of the projections that this optimizer made, by parameter, the largest where it is several
        matrices: ``||W - A B^T||_F / ||W||_F``.
        """
        return dict(self._errors or {})

    @property
    def matrices_per_step(self) -> int:
        """How many logical matrices this rank has a part of: so many a step updates if all have gradients."""
        return sum(len(self.matrix_layouts(parameter)) for parameter in self._parameters())

    def explain(self) -> str:
        """The plan by which factors are orthogonalized, as a table. All ranks ask together."""
        return self._planned().planned.explain()

    @property
    def matrices_updated(self) -> int:
        """All of them are updated."""
        return self.newton_schulz_calls

    def described_matrices(self, settled: bool = True) -> dict[Tensor, list[DescribedMatrix]]:
        """The logical matrices of each parameter; the size of their updates follows from the factors."""
        plan = self._planned() if settled else self._proposed()
        described = {}
        for parameter, weight in zip(self._parameters(), plan.weights, strict=True):
            names = self.split_of(parameter).names(self.layout(parameter).shape[0])
            named = zip(names, weight.matrices, plan.schemes(weight), strict=True)
            described[parameter] = [DescribedMatrix(name, each.shape, how, 1.0, None) for name, each, how in named]
        return described

    def explain_proposed(self) -> str:
        """What :meth:`explain` will say, before ranks agree."""
        return self._proposed().planned.explain()

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        try:
            self._variant(group)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: group {len(self.param_groups) - 1}: {error}") from error

    def _variant(self, group: Mapping[str, Any]) -> Variant:
        settings = UpdateSettings(self.newton_schulz, "spectral", 1.0).of_group(group)
        return Variant(settings.iteration_name, settings.newton_schulz, lambda rows, cols: 1.0)

    def _planned(self) -> FactorPlan:
        """The plan, made when it is first asked for and when the settings of a group have changed."""
        wanted = own_settings(self.param_groups), [group["rank"] for group in self.param_groups]
        if self._plan is None or self._planned_for != wanted:
            self._check_kept_ranks()
            self._plan = self._proposed()
            rung = self._plan.settle(self.param_groups[0].get(RUNG))
            self._planned_for = wanted
            self._weights = dict(zip(self._parameters(), self._plan.weights, strict=True))
            for group in self.param_groups:
                group[RUNG] = rung
        return self._plan

    def _proposed(self) -> FactorPlan:
        """The plan, before ranks agree on it."""
        described = [
            Described(
                one.name,
                one.layout,
                one.split,
                None if group["pairs"] else group["rank"],
                one.dtype,
                self._variant(group),
            )
            for one, group in zip(self._described(), map(self.group_of, self._parameters()), strict=True)
        ]
        return FactorPlan(described, self._parameters()[0].device, self.tp_mode)

    def _described(self) -> list[Parameter]:
        named = zip(parameter_names(self.param_groups), self._parameters(), strict=True)
        return [Parameter(name, self.layout(p), self.split_of(p), wide_dtype(p)) for name, p in named]

    def _prepare(self, parameters: Sequence[Tensor]) -> Skipping:
        skipping = super()._prepare(parameters)
        self._shared = SharedParameters(self._described(), parameters[0].device)
        _ = self._planned()
        return skipping

    def _agree(self, flags: Tensor) -> Tensor:
        return self._shared.agree(flags)

    def _taking_part(self) -> set[Tensor]:
        """Parameters with a gradient, and those whose parts other ranks wait for."""
        parameters = enumerate(self._parameters())
        return {p for place, p in parameters if p.grad is not None or self._shared.shares(place)}

    def _take(self, accepted: Tensor) -> None:
        plan = self._planned()
        flags = dict(zip(self._parameters(), accepted.unbind(), strict=True))
        taking = self._taking_part()
        sums = RankSums(self._shared.groups)
        with fp32_products("highest"):
            self._project(taking, flags)
            weights = [p for p in self._parameters() if p in taking and p in self._done]
            gradients = self._factor_gradients(weights, sums)
            pairs: list[Pair] = []
            for group in self.param_groups:
                if group["pairs"]:
                    pairs += self._given(group, taking, flags)
                else:
                    own = [p for p in group["params"] if p in gradients]
                    pairs += [pair for p in own for pair in self._kept(p, gradients[p], flags[p])]
            if not pairs:
                return
            step_pairs(pairs, plan.orthogonalize, self.num_power_iterations, sums)
            for parameter in weights:
                self._write(parameter, flags[parameter] & (self.group_of(parameter)["lr"] != 0))
        given = len(pairs) - sum(len(of_weight) for of_weight in gradients.values())
        self.newton_schulz_calls += len(pairs) + given

    def _project(self, taking: set[Tensor], flags: Mapping[Tensor, Tensor]) -> None:
        """Take the factors from the weights that step for the first time; waits for the device while there are any."""
        waiting = [p for p in self._parameters() if p in taking and p not in self._done]
        waiting = [p for p in waiting if not self.group_of(p)["pairs"]]
        self._done |= {p for p in waiting if (state := self.state.get(p)) and bool(state[PROJECTED])}
        new = [p for p in waiting if p not in self._done and self.group_of(p)["lr"] > 0 and bool(flags[p])]
        if new:
            self._take_factors(new)
        for parameter in waiting:
            self._state_of(parameter)  # also with lr=0: torch loads a checkpoint into what such a step makes

    def _take_factors(self, new: Sequence[Tensor]) -> None:
        known = [self._weights[p] for p in new]
        ranks = [self.group_of(p)["rank"] for p in new]
        found = iter(
            project(
                (piece.to(wide_dtype(p)) for p, w in zip(new, known, strict=True) for piece in w.rows.split(local(p))),
                [layout for w in known for layout in w.matrices],
                [rank for rank, w in zip(ranks, known, strict=True) for _ in w.matrices],
                [w.first // 2 + turn for w in known for turn in range(len(w.matrices))],
            )
        )
        factors = {p: [next(found) for _ in w.matrices] for p, w in zip(new, known, strict=True)}
        self._report(factors)
        for parameter, of_parameter in factors.items():
            state = self._state_of(parameter)
            for end, (A, B, _) in zip(self.key_ends(parameter), of_parameter, strict=True):
                local(state[FACTOR_A + end]).copy_(A)
                local(state[FACTOR_B + end]).copy_(B)
            state[PROJECTED].fill_(1)
        self._done |= factors.keys()

    def _report(self, factors: Mapping[Tensor, Sequence[tuple[Tensor, Tensor, float]]]) -> None:
        names = dict(zip(self._parameters(), parameter_names(self.param_groups), strict=True))
        errors = {names[p]: max(error for _, _, error in of_parameter) for p, of_parameter in factors.items()}
        bad = [names[p] for p, of_parameter in factors.items() if any(error != error for _, _, error in of_parameter)]
        if bad:
            raise ValueError(
                f"{type(self).__name__} cannot take factors from {bad[0]}: a matrix of it is zero, and factors of zero "
                f"never move, or is not finite. Initialize it otherwise, or give it to another optimizer"
            )
        self._errors = {**(self._errors or {}), **errors}
        if not dist.is_initialized() or dist.get_rank() == 0:
            worst = max(errors, key=lambda name: errors[name])
            logger.warning(
                "%s projects %s weights to their rank, which changes them by %.3g to %.3g of their norm, most %s",
                type(self).__name__,
                len(errors),
                min(errors.values()),
                errors[worst],
                worst,
            )

    def _factor_gradients(self, weights: Sequence[Tensor], sums: RankSums) -> dict[Tensor, list[tuple[Tensor, Tensor]]]:
        """The gradients of the factors of each weight."""
        pieces, factors, labels = [], [], []
        for parameter in weights:
            weight = self._weights[parameter]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            pieces += weight.rows.split(local(gradient))
            factors += [self._factors(parameter, end) for end in self.key_ends(parameter)]
            labels += [layout.label for layout in weight.factors]
        found = iter(factor_gradients(pieces, factors, labels, sums))
        return {p: [next(found) for _ in self._weights[p].matrices] for p in weights}

    def _kept(self, parameter: Tensor, gradients: Sequence[tuple[Tensor, Tensor]], accepted: Tensor) -> Iterator[Pair]:
        """The factors that are kept of a weight."""
        weight, state, group = self._weights[parameter], self.state[parameter], self.group_of(parameter)
        for part, (end, of_part) in enumerate(zip(self.key_ends(parameter), gradients, strict=True)):
            keys = ((FACTOR_A, MOMENTUM_A, U_A), (FACTOR_B, MOMENTUM_B, U_B))
            factors = []
            for number, (of_factor, gradient) in enumerate(zip(keys, of_part, strict=True), 2 * part):
                value, momentum, u = (local(state[key + end]) for key in of_factor)
                label = weight.factors[number].label
                factors.append(Factor(weight.first + number, value, momentum, u, gradient, label))
            yield _pair(factors, accepted, group)

    def _given(self, group: dict[str, Any], taking: set[Tensor], flags: Mapping[Tensor, Tensor]) -> Iterator[Pair]:
        """The factors that are parameters."""
        for both in batched(group["params"], 2):
            if taking.isdisjoint(both):
                continue
            factors = []
            for parameter in both:
                weight, state = self._weights[parameter], self._state_of(parameter)
                gradient = state[MOMENTUM] if parameter.grad is None else parameter.grad
                of_factor = [local(x) for x in (parameter, state[MOMENTUM], gradient)]
                value, momentum, gradient = of_factor if is_tall(weight.matrices[0]) else (x.mT for x in of_factor)
                label = weight.factors[0].label
                factors.append(Factor(weight.first, value, momentum, local(state[U]), gradient, label))
            yield _pair(factors, flags[both[0]] & flags[both[1]], group)

    def _write(self, parameter: Tensor, changed: Tensor) -> None:
        """``W = A B^T`` where it changed."""
        products = [A @ B.mT for A, B in (self._factors(parameter, end) for end in self.key_ends(parameter))]
        whole, before = self._weights[parameter].rows.merge(products), local(parameter)
        before.copy_(torch.where(changed, whole.to(before.dtype), before))

    def _factors(self, parameter: Tensor, end: str) -> tuple[Tensor, Tensor]:
        """This rank's rows of both factors of one logical matrix."""
        state = self.state[parameter]
        return local(state[FACTOR_A + end]), local(state[FACTOR_B + end])


def _pair(factors: Sequence[Factor], accepted: Tensor, group: Mapping[str, Any]) -> Pair:
    first, second = factors
    return Pair((first, second), accepted, group["lr"], group["weight_decay"], group["momentum_beta"])
