"""Optimizers that keep a factor of the rows and one of the columns of each matrix."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.factors.sides import KERNEL, SIDE_KEYS, Side
from megatron_eopt.matrices import WHOLE, Split
from megatron_eopt.parallel.attributes import is_expert
from megatron_eopt.parallel.layout import Layout, on_one_rank, shared_out
from megatron_eopt.settings.records import GROUP_PRECISION, Setting
from megatron_eopt.step.foreach import where
from megatron_eopt.step.held_norms import begin_norms, followed, radius_tensors
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.parameters import local, names_of_last
from megatron_eopt.step.stacked_optimizer import CLOCK, StackedOptimizer
from megatron_eopt.step.stacks import Stack, wide
from megatron_eopt.step.state import EXP_AVG, STEPS, StateTensor

Decay = Literal["decoupled", "independent", "palm"]
HeldNorm = Literal["none", "hold"]


class FactoredOptimizer(StackedOptimizer):
    """Optimizers that keep a factor of the rows and one of the columns of each matrix.

    Each whole logical matrix has a compute rank, which alone keeps its factors and their eigenbases. A subclass names
    the moments that lie as the parameter (:attr:`moments`).
    """

    own_settings: ClassVar[tuple[Setting, ...]] = (GROUP_PRECISION,)
    moments: ClassVar[tuple[str, ...]] = (EXP_AVG,)
    persistent_group_keys = frozenset({CLOCK})
    fixed_by_state = ("max_dim",)
    counters = frozenset({CLOCK})
    row_order_matters = True

    share_over_dp: bool

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
        dtype = wide(parameter)
        tensors = [StateTensor(key, dtype=dtype, non_negative=key != EXP_AVG) for key in self.moments]
        tensors.append(StateTensor(STEPS, dims=(), dtype=torch.float64, non_negative=True))
        for part, plan in enumerate(self._planned(parameter)):
            for length, has_factor, keys in zip(plan.layout.shape, plan.has_factor, SIDE_KEYS, strict=True):
                if has_factor:
                    for key in keys:
                        tensors.append(StateTensor(key + plan.end, (length, length), part, dtype, plan.compute_rank))
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

    def _steps_of(self, ok: Flag) -> dict[int, bool]:
        """Also begins norms, and looks which parameters have factors, or make them now; the host waits for that."""
        held = list[Tensor]()
        for group in self.param_groups:
            if group["weight_norm"] == "hold":
                held += filter(self._holds, group["params"])
        if held:
            begin_norms(self, f"{type(self).__name__} with weight_norm 'hold'", held, set(held))
        steps = super()._steps_of(ok)
        parameters = self._parameters()
        starting = []
        for i in steps:
            if not self._has_begun(parameters[i], STEPS) and any(plan.cost for plan in self._planned(parameters[i])):
                starting.append(i)
        if starting:  # a device is waited for until all factors are known to be there, and no longer
            has_factors, makes_them = self._known(starting, ok)
            for i, has, makes in zip(starting, has_factors, makes_them, strict=True):
                steps[i] = not has
                if has or makes:
                    self._note_begun(parameters[i], STEPS)
                else:
                    del steps[i]
        self._session.changing = True
        if steps:
            counts = [self.state[parameters[i]][STEPS] for i in steps]
            counted = torch.stack(counts) + (1 if ok is None else ok)
            torch._foreach_copy_(counts, list(counted.unbind()))
        return steps

    def _known(self, indices: Sequence[int], ok: Flag) -> list[list[bool]]:
        """Which parameters have factors, and which can make them now."""
        parameters = self._parameters()
        has_entries = []  # what is made of a factor of nothing would follow the gradients to come only step by step
        labels = []
        steps = []
        for i in indices:
            p = parameters[i]
            plans = self._planned(p)
            shards = self.engine.split([i], [local(torch.zeros_like(p) if p.grad is None else p.grad)])
            nonzero = [shard.any() for plan, shard in zip(plans, shards, strict=True) if plan.cost]
            has_entries.append(torch.stack(nonzero).any().float())
            labels.append(plans[0].layout.label)
            steps.append(self.state[p][STEPS])
        anywhere = torch.stack(self.engine.sums(has_entries, labels)) > 0
        known: list[list[bool]] = torch.stack([torch.stack(steps) > 0, where(ok, anywhere, False)]).tolist()
        return known

    def _settings(self, stack: Stack) -> dict[str, Any]:
        """Those of the group, and the kernel of products."""
        return {**stack.group, KERNEL: self.execution.symmetric_products}

    def _sides(self, stack: Stack) -> list[Side | None]:
        """The sides of own matrices; None where they have no factor."""
        sides = list[Side | None]()
        for (factor, basis), has_factor in zip(SIDE_KEYS, stack.has_factor, strict=True):
            sides.append(Side(stack.owned(factor), stack.owned(basis)) if has_factor else None)
        return sides

    def _keep_sides(self, stack: Stack, sides: Sequence[Side | None]) -> None:
        for (factor, basis), side in zip(SIDE_KEYS, sides, strict=True):
            if side is not None:
                stack.keep_owned(factor, side.factor)
                stack.keep_owned(basis, side.basis)


def steps_taken(stack: Stack) -> Tensor:
    """Steps of this rank's matrices, with this one, as a stack has dimensions."""
    state = stack.chunk.optimizer.state
    steps = torch.stack([state[member.parameter][STEPS] for member in stack.own])
    return steps.view(-1, *[1] * (stack.ndim - 1))
