"""What optimizers with a factor of each side share: state, and the steps of whole matrices."""

from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.matrices import WHOLE, Split
from megatron_eopt.optimizers import whole_matrices
from megatron_eopt.optimizers.base import KERNEL, BaseOptimizer
from megatron_eopt.optimizers.factored_chunks import (
    EXP_AVG,
    MOST_BYTES,
    STEPS,
    Chunk,
    EqualMatrices,
    ParameterStep,
    Planned,
    Sides,
    chunks_of,
    factor_stacks,
    merge,
)
from megatron_eopt.optimizers.factored_norms import steps_of
from megatron_eopt.optimizers.foreach import stacked
from megatron_eopt.optimizers.held_norms import begin_norms, followed, kept_radii, norms_of_weights, radii
from megatron_eopt.optimizers.parameters import DescribedMatrix, checked_split, names_of_last
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.optimizers.traits import Traits
from megatron_eopt.optimizers.whole_matrices import CLOCK
from megatron_eopt.orthogonalize.choices import check_choice, check_count
from megatron_eopt.orthogonalize.kernels import KERNELS, made
from megatron_eopt.orthogonalize.precision import MatmulPrecision, validate_matmul_precision
from megatron_eopt.orthogonalize.products import Fp32Precision
from megatron_eopt.parallel.agreement import KernelProducts
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout, is_expert, on_one_rank, shared_out
from megatron_eopt.parallel.scheduler import rounds

Decay = Literal["decoupled", "independent", "palm"]
WeightNorm = Literal["none", "hold"]

Fused = tuple[bool, Callable[[Tensor], bool] | None, Sequence[int] | None]
"""``split_qkv``, ``is_qkv_fn`` and ``qkv_split_shapes``."""

Working = Generator[None, None, None]
"""A program, which yields while it waits."""


class FactoredOptimizer(BaseOptimizer):
    """Optimizers that keep a factor of the rows and one of the columns of each matrix.

    Each whole logical matrix has a compute rank, which alone keeps its factors. A subclass says what is made of a
    factor (:attr:`side_keys`), which moments lie as the parameter (:attr:`moments`), and its step (:meth:`program`).
    """

    traits = Traits(carried_settings=frozenset({CLOCK, KERNEL}), pairs_rows=True, multiplies=True)
    takes: ClassVar[whole_matrices.Takes] = "matrices"
    side_keys: ClassVar[Sides]
    moments: ClassVar[tuple[str, ...]] = (EXP_AVG,)
    choices: ClassVar[tuple[tuple[str, object], ...]] = (("weight_decay_method", Decay), ("weight_norm", WeightNorm))

    share_over_dp: bool
    _based: set[Tensor] | None = None  # parameters known to have factors
    _plans: dict[Tensor, list[Planned]] | None = None
    _updated: int = 0
    _radii_of: object = None  # the engine of the last step: another one may be of further matrices

    @abstractmethod
    def program(self, chunk: Chunk) -> Working:
        """One chunk's step."""

    def rests(self, group: Mapping[str, Any]) -> bool:
        """Whether the first gradient makes the factors alone."""
        return False

    def _set(self, symmetric_products: str | None, fused: Fused, **attributes: Any) -> None:
        """Set the attributes that constructors share, checked."""
        check_choice("symmetric_products", symmetric_products or "torch", KERNELS)
        vars(self).update(checked_split(type(self).__name__, *fused, self.traits.split_lengths))
        vars(self).update(attributes, symmetric_products=symmetric_products)

    def settings(self) -> dict[str, Any]:
        """Settings that a checkpoint describes."""
        return super().settings() | {"split_qkv": self.split_qkv}

    @property
    def matrices_updated(self) -> int:
        """Also counts matrices without a factor."""
        return self._updated

    def described_matrices(self, settled: bool = True) -> dict[Tensor, list[DescribedMatrix]]:
        """The logical matrices of each parameter."""
        return whole_matrices.described(self, {p: self._planned(p) for p in self._parameters()})

    def layout(self, parameter: Tensor) -> Layout:
        """The layout of a parameter; a vector is a column."""
        if parameter.ndim == 0 or (parameter.ndim == 1 and not isinstance(parameter, DTensor)):
            return on_one_rank((parameter.numel(), 1))
        layout, name = super().layout(parameter), "expt_dp" if is_expert(parameter) else "dp_cp"
        if not self.share_over_dp or isinstance(parameter, DTensor):
            return layout
        group, joint = (getattr(self.pg_collection, group_name, None) for group_name in (name, f"tp_{name}"))
        return layout if group is None else shared_out(layout, group, joint, name)

    def split_of(self, parameter: Tensor) -> Split:
        """The logical matrices of a parameter; others are never split."""
        return WHOLE if parameter.ndim < 2 else super().split_of(parameter)

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Moments, steps, and each matrix's factors, what is made of them, and its norm."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        return [
            *(StateTensor(key, dtype=wide) for key in self.moments),
            StateTensor(STEPS, dims=(), dtype=torch.float64),
            *(
                StateTensor(key, (length, length), part, wide, plan.compute_rank)
                for part, plan in enumerate(self._planned(parameter))
                for keys, length in zip(plan.sides, plan.layout.shape, strict=True)
                for key in keys
            ),
            *radii(self.key_ends(parameter) if self._holds(parameter) else [], optional=True),
        ]

    def _holds(self, parameter: Tensor) -> bool:
        return parameter.ndim > 1 and self.group_of(parameter)["weight_norm"] == "hold"

    def _check_ranges(self, group: Mapping[str, Any]) -> None:
        name = type(self).__name__
        for key, least in (("precondition_frequency", 1), ("max_dim", 0)):
            check_count(f"{name}: {key}", group[key], least)
        for key, choices in self.choices:
            check_choice(f"{key} of {name}", group[key], get_args(choices))
        validate_matmul_precision(group["fp32_matmul_prec"])

    def _check_group(self, group: dict[str, Any]) -> None:
        whole_matrices.check_group(self, group, self.takes)

    def _check_factors(self, group: Mapping[str, Any], parameters: Sequence[Tensor], why: str) -> None:
        """Refuse parameters of the last group with a matrix without a factor."""
        for parameter, called in zip(group["params"], names_of_last(self.param_groups), strict=True):
            shapes = [layout.shape for layout in self.matrix_layouts(parameter)]
            lacking = any(0 not in shape and min(shape) > group["max_dim"] for shape in shapes)
            if lacking and any(parameter is each for each in parameters):
                raise ValueError(
                    f"{type(self).__name__}{why} needs a factor of every matrix, and {called} has none: it is for "
                    f"matrices with a side of at most max_dim, here {group['max_dim']}; give it to another optimizer, "
                    f"such as AdamW"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state."""
        super().load_state_dict(state_dict)
        self._based, self._radii_of = None, None

    def kernel_products(self) -> KernelProducts:
        """Those that update factors, in the strictest precision of a group."""
        parameters, used = self._parameters(), {group["fp32_matmul_prec"] for group in self.param_groups}
        dtypes = sorted({torch.promote_types(p.dtype, torch.float32) for p in parameters}, key=str)
        stacks = factor_stacks([plan for p in parameters for plan in self._planned(p)])
        strictest: MatmulPrecision = "highest" if "highest" in used else "high"
        return stacks, dtypes, parameters[0].device, precision_of(strictest)

    def _described(self, name: str, parameter: Tensor) -> ParamSpec:
        spec = super()._described(name, parameter)
        return replace(spec, layout=self.layout(parameter), split=self.split_of(parameter))

    def _planned(self, parameter: Tensor) -> list[Planned]:
        if self._plans is None or parameter not in self._plans:
            self._plans = whole_matrices.planned(self, self.side_keys)
        return self._plans[parameter]

    def scale_rows(self, parameters: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Also scale the norms that matrices keep."""
        with followed(self, [parameter for parameter in parameters if self._holds(parameter)]):
            super().scale_rows(parameters, factors)

    def _take(self, accepted: Tensor) -> None:
        held = [parameter for parameter in self._parameters() if self._holds(parameter)]
        if held and self._radii_of is not self.engine:
            matrices, norms = norms_of_weights(self, held)
            kept = [radius for parameter in held for radius in kept_radii(self, parameter)]
            begin_norms(f"{type(self).__name__} with weight_norm 'hold'", matrices, kept, norms)
            self._radii_of = self.engine
        self._session.changing = True
        for group in self.param_groups:
            group[CLOCK] += 1
        if not (parameters := self._parameter_steps(accepted)):
            return
        steps = [p.state[STEPS] for p in parameters]
        counted = torch.stack(steps) + torch.stack([p.accepted for p in parameters])
        torch._foreach_copy_(steps, list(counted.unbind()))
        for chunks in chunks_of(parameters, MOST_BYTES):
            for _ in rounds(self.program(chunk) for chunk in chunks):
                pass
        self._updated += sum(len(p.plans) for p in parameters if p.parameter.ndim > 1)

    def _parameter_steps(self, accepted: Tensor) -> list[ParameterStep]:
        based = self._based = set() if self._based is None else self._based
        grouped = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        steps, states = [], self._states
        for index, ((parameter, group), flag) in enumerate(zip(grouped, accepted.unbind(), strict=True)):
            plans = self._planned(parameter)
            # also without a gradient where others wait for this rank's part
            held = group["weight_norm"] == "hold"
            if parameter.grad is not None or any(plan.gathered or (held and plan.layout.sharded) for plan in plans):
                state = self.state.get(parameter, {}) if parameter.grad is None else states.of(parameter, STEPS)
                first = parameter not in based and any(plan.cost for plan in plans)
                kind = first, self.rests(group), self.moments
                steps.append(ParameterStep(index, parameter, state, group, flag, *kind, plans))
        # a device is waited for until all factors are known to be there, and no longer
        if starting := [p for p in steps if p.first]:
            has_bases, makes_them = _known(starting, self.engine)
            based |= {p.parameter for p, *known in zip(starting, has_bases, makes_them, strict=True) if any(known)}
            old = {p.index for p, has in zip(starting, has_bases, strict=True) if has}
            steps = [replace(p, first=False) if p.index in old else p for p in steps]
        return [p for p in steps if not p.first or p.parameter in based]


def _known(parameters: Sequence[ParameterStep], engine: Engine) -> list[list[bool]]:
    """Which parameters have factors, and which can make them now."""
    has_entries = []  # what is made of a factor of nothing would follow the gradients to come only step by step
    for p in parameters:
        shards = zip(p.plans, engine.split([p.index], [p.gradient]), strict=True)
        has_entries.append(torch.stack([shard.any() for plan, shard in shards if plan.cost]).any().float())
    some = torch.stack(engine.sums(has_entries, [p.label for p in parameters])) > 0
    steps = torch.stack([p.state.get(STEPS, torch.zeros_like(has_entries[0])) for p in parameters])
    accepted = torch.stack([p.accepted for p in parameters])
    return torch.stack([steps > 0, accepted & some]).tolist()


def precision_of(precision: MatmulPrecision) -> Fp32Precision:
    """How a kernel names the precision of products of factors."""
    return "ieee" if precision == "highest" else "tf32"


def first_moment(equal: EqualMatrices, beta: float) -> list[Tensor]:
    """Update first moments; returns stacked gradients and all moments."""
    momentum, *others = map(stacked, equal.moments)
    gradient = stacked(equal.gradients).to(momentum.dtype)
    gradient = torch.where(equal.accepted, -gradient if equal.settings["maximize"] else gradient, 0.0)
    if equal.moves:
        taken = torch.where(equal.accepted, gradient, momentum)
        momentum = torch.lerp(momentum, taken, 1 - beta)
        torch._foreach_copy_(equal.moments[0], list(momentum.unbind()))
    return [gradient, momentum, *others]


Kept = list[list[list[Tensor]]]
"""Of each side the factors of some matrices, and what is made of them."""


def kept_sides(equal: EqualMatrices) -> tuple[Kept, list[list[Tensor]]]:
    """The state of the sides of this rank's matrices, as it lies and as stacks."""
    mine = equal.members[equal.own]
    sides = [[[p.state[key] for key in p.plans[i].sides[dim]] for p, i in mine] for dim in (0, 1)]
    kept = [[list(of_all) for of_all in zip(*of_side, strict=True)] for of_side in sides]
    return kept, [[stacked(of_all) for of_all in of_side] for of_side in kept]


def write_sides(kept: Kept, stacks: Sequence[Sequence[Tensor]]) -> None:
    """Write stacks back to where they came from."""
    for of_side, of_stack in zip(kept, stacks, strict=True):
        for old, new in zip(of_side, of_stack, strict=True):
            torch._foreach_copy_(old, list(new.unbind()))


def steps_taken(equal: EqualMatrices) -> Tensor:
    """Accepted steps of this rank's matrices, with this one, as a stack has dimensions."""
    accepted = equal.accepted[equal.own]
    return torch.stack([p.state[STEPS] for p, _ in equal.members[equal.own]]).view(accepted.shape)


def gram_of(settings: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """``X X^T`` of stacks by the kernel of the group."""

    def gram(x: Tensor) -> Tensor:
        return made(settings.get(KERNEL, "torch"), x.size(-2), precision_of(settings["fp32_matmul_prec"])).gram(x)

    return gram


def refreshes(settings: Mapping[str, Any]) -> bool:
    """Whether factors are worked on again in this step, counted from the first as SOAP's authors do."""
    return bool((settings[CLOCK] - 1) % settings["precondition_frequency"] == 0)


def apply(matrices: Sequence[EqualMatrices], stacks: Sequence[Sequence[Tensor]], engine: Engine) -> None:
    """Subtract updates, the first of each stack, and write the further moments that follow them."""
    moving = [(equal, stack) for equal, stack in zip(matrices, stacks, strict=True) if equal.moves]
    held = [(equal, stack[0]) for equal, stack in moving if equal.held]
    steps = dict(zip([id(equal) for equal, _ in held], steps_of(held, engine), strict=True)) if held else {}
    for equal, stack in moving:
        subtract(equal, stack[0], steps.get(id(equal)))
        for old, new in zip(equal.moments[1:], stack[1:], strict=True):
            torch._foreach_copy_(old, list(new.unbind()))
    merge(matrices, engine)


def subtract(equal: EqualMatrices, update: Tensor, held: tuple[Tensor, ...] | None = None) -> None:
    """``p <- (1 - lr weight_decay) p - lr U``, or as far as the norm is held."""
    lr, weights = equal.settings["lr"], stacked(equal.weights)
    accepted, decayed = equal.accepted, weights.to(update.dtype) * (1 - equal.decay)
    if held is None:
        moved = decayed - update * lr
    else:
        moves, step, resize = held
        accepted = accepted & (moves > 0)
        moved = (decayed - update * step.to(update.dtype)) * resize.to(update.dtype)
    torch._foreach_copy_(equal.weights, list(torch.where(accepted, moved.to(weights.dtype), weights).unbind()))
