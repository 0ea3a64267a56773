"""Optimizers that keep a factor of the rows and one of the columns of each matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.kernels.choice import products_for
from megatron_eopt.matrices import WHOLE, Split
from megatron_eopt.parallel.attributes import is_expert
from megatron_eopt.parallel.layout import Layout, on_one_rank, shared_out
from megatron_eopt.settings.records import FACTOR_PRECISION, Setting
from megatron_eopt.step.foreach import where
from megatron_eopt.step.held_norms import begin_norms, followed, radius_tensors
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.parameters import names_of_last
from megatron_eopt.step.state import StateTensor
from megatron_eopt.step.whole_matrices import CLOCK, EXP_AVG, WEIGHT, MatrixStack, ParameterStep, StackedOptimizer

STEPS = "steps"
KERNEL = "symmetric_products"
SIDE_KEYS = (("L", "Q_L"), ("R", "Q_R"))  # the state of the rows and of the columns, as Side has it

Decay = Literal["decoupled", "independent", "palm"]
WeightNorm = Literal["none", "hold"]


@dataclass(frozen=True)
class Side:
    """Stacked factors (n, length, length) of the rows or columns, and their eigenbases."""

    factor: Tensor
    basis: Tensor  # the eigenvectors are columns


class FactoredOptimizer(StackedOptimizer):
    """Optimizers that keep a factor of the rows and one of the columns of each matrix.

    Each whole logical matrix has a compute rank, which alone keeps its factors and their eigenbases. A subclass names
    the moments that lie as the parameter (:attr:`moments`).
    """

    own_settings: ClassVar[tuple[Setting, ...]] = (FACTOR_PRECISION,)
    persistent_group_keys = frozenset({CLOCK})
    counters = frozenset({CLOCK})
    row_order_matters = True

    share_over_dp: bool

    def skips_first_update(self, group: Mapping[str, Any]) -> bool:
        """Whether the first gradient makes the factors alone."""
        return False

    def layout(self, parameter: Tensor) -> Layout:
        """The layout of a parameter; a vector is a column."""
        if parameter.ndim == 0 or (parameter.ndim == 1 and not isinstance(parameter, DTensor)):
            return on_one_rank((parameter.numel(), 1))
        layout = super().layout(parameter)
        if not self.share_over_dp or isinstance(parameter, DTensor):
            return layout
        name = "expt_dp" if is_expert(parameter) else "dp_cp"
        group = getattr(self.pg_collection, name, None)
        if group is None:
            return layout
        return shared_out(layout, group, getattr(self.pg_collection, f"tp_{name}", None), name)

    def split_of(self, parameter: Tensor) -> Split:
        """The logical matrices of a parameter; others are never split."""
        return WHOLE if parameter.ndim < 2 else super().split_of(parameter)

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Moments, steps, and each matrix's factors, their eigenbases, and its norm."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        tensors = [StateTensor(key, dtype=wide, non_negative=key != EXP_AVG) for key in self.moments]
        tensors.append(StateTensor(STEPS, dims=(), dtype=torch.float64, non_negative=True))
        for part, plan in enumerate(self._planned(parameter)):
            for length, has_factor, keys in zip(plan.layout.shape, plan.has_factor, SIDE_KEYS, strict=True):
                if has_factor:
                    for key in keys:
                        tensors.append(StateTensor(key + plan.end, (length, length), part, wide, plan.compute_rank))
        if self._holds(parameter):
            tensors += radius_tensors(self.key_ends(parameter), optional=True)
        return tensors

    def _holds(self, parameter: Tensor) -> bool:
        return parameter.ndim > 1 and self.group_of(parameter)["weight_norm"] == "hold"

    def _check_factors(self, group: Mapping[str, Any], why: str = "") -> None:
        """Refuse a matrix without a factor in the last group."""
        for parameter, called in zip(group["params"], names_of_last(self.param_groups), strict=True):
            if parameter.ndim < 2:
                continue
            for layout in self.matrix_layouts(parameter):
                if 0 not in layout.shape and min(layout.shape) > group["max_dim"]:
                    raise ValueError(
                        f"{type(self).__name__}{why} needs a factor of every matrix, and {called} has none: it is for "
                        f"matrices with a side of at most max_dim, here {group['max_dim']}; give it to another "
                        "optimizer, such as AdamW"
                    )

    def scale_rows(self, parameters: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Also scale the norms that matrices keep."""
        with followed(self, list(filter(self._holds, parameters))):
            super().scale_rows(parameters, factors)

    def _take(self, ok: Flag) -> None:
        held = list(filter(self._holds, self._parameters()))
        begin_norms(self, f"{type(self).__name__} with weight_norm 'hold'", held, set(held))
        super()._take(ok)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        return self._states.of(parameter, STEPS)

    def _steps_of(self, ok: Flag) -> list[ParameterStep]:
        """Also looks which parameters have factors, or make them now; the host waits for that."""
        steps = super()._steps_of(ok)
        starting = []
        for p in steps:
            if any(plan.cost for plan in p.plans) and not self._has_begun(p.parameter, STEPS):
                starting.append(p)
        if starting:  # a device is waited for until all factors are known to be there, and no longer
            has_factors, makes_them = self._known(starting, ok)
            for p, has, makes in zip(starting, has_factors, makes_them, strict=True):
                p.first = not has
                p.skips_first_update = self.skips_first_update(p.group)
                if has or makes:
                    self._note_begun(p.parameter, STEPS)
                else:
                    steps.remove(p)
        if steps:
            counts = [p.state[STEPS] for p in steps]
            counted = torch.stack(counts) + (1 if ok is None else ok)
            torch._foreach_copy_(counts, list(counted.unbind()))
        return steps

    def _known(self, parameters: Sequence[ParameterStep], ok: Flag) -> list[list[bool]]:
        """Which parameters have factors, and which can make them now."""
        has_entries = []  # what is made of a factor of nothing would follow the gradients to come only step by step
        for p in parameters:
            shards = self.engine.split([p.index], [p.gradient])
            nonzero = [shard.any() for plan, shard in zip(p.plans, shards, strict=True) if plan.cost]
            has_entries.append(torch.stack(nonzero).any().float())
        anywhere = torch.stack(self.engine.sums(has_entries, [p.label for p in parameters])) > 0
        steps = torch.stack([p.state[STEPS] for p in parameters])
        known: list[list[bool]] = torch.stack([steps > 0, where(ok, anywhere, False)]).tolist()
        return known

    def _settings(self, stack: MatrixStack) -> dict[str, Any]:
        """Those of the group, and the kernel of products."""
        return {**stack.group, KERNEL: self.symmetric_products}

    def _sides(self, stack: MatrixStack) -> list[Side | None]:
        """The sides of own matrices; None where they have no factor."""
        sides = list[Side | None]()
        for (factor, basis), has_factor in zip(SIDE_KEYS, stack.matrices[0].plan.has_factor, strict=True):
            sides.append(Side(stack.kept(factor), stack.kept(basis)) if has_factor else None)
        return sides

    def _keep_sides(self, stack: MatrixStack, sides: Sequence[Side | None]) -> None:
        for (factor, basis), side in zip(SIDE_KEYS, sides, strict=True):
            if side is not None:
                stack.keep(factor, side.factor)
                stack.keep(basis, side.basis)


def gram(x: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """``X X^T`` of a stack, by the kernel of the group."""
    kernel = settings[KERNEL] or "torch"
    return products_for(kernel, x.device, x.dtype, settings["fp32_matmul_prec"]).gram(x)


def steps_taken(stack: MatrixStack) -> Tensor:
    """Steps of this rank's matrices, with this one, as a stack has dimensions."""
    steps = torch.stack([matrix.of.state[STEPS] for matrix in stack.matrices[stack.own]])
    return steps.view(-1, *[1] * stack.shards[WEIGHT][0].ndim)


def follow(factor: Tensor, product: Tensor, weight: Tensor, where: Flag) -> None:
    """``F += weight (product - F)`` in place, where so."""
    followed = product if where is None else torch.where(where, product, factor)
    factor.lerp_(followed, weight.to(factor.dtype))
