"""A step as a program sees it: parameters of a chunk, their state by name, and the verbs of papers."""

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.parallel.rectangles import Shape
from megatron_eopt.parallel.scheduler import Shards
from megatron_eopt.parallel.statistics import StatisticsRequest
from megatron_eopt.settings.groups import MOMENTUM_STEPS
from megatron_eopt.settings.values import Scalar
from megatron_eopt.step import foreach
from megatron_eopt.step.foreach import MomentumRule, Tensors
from megatron_eopt.step.modifiers import RADIUS, Modified
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.rounding import store
from megatron_eopt.step.state import MOMENTUM_BUFFER
from megatron_eopt.step.weight_step import (
    decay_cautiously,
    move,
    norms_of_shards,
    on_spheres,
    resized,
    squares_and_products,
    squares_of_shards,
    write_back,
)

Scales = Sequence[float | Tensor]  # of logical matrices


@dataclass(frozen=True)
class Batch:
    """Parameters of one group in a step."""

    indices: list[int]  # among all parameters of the optimizer
    parameters: list[Tensor]
    weights: list[Tensor]  # this rank's shards of them
    gradients: list[Tensor]  # of each; cast_to_average() has them in its dtype
    state: list[dict[str, Tensor]]  # of each, by key: this rank's shards of what a step changes
    group: Mapping[str, Any]  # with its settings
    lr: Scalar
    beta: float  # of the momentum in this step
    nesterov: bool
    weight_decay: Scalar
    decays: bool  # whether there is a weight decay; a tensor may be one, since no device is asked
    modified: Modified
    ok: Flag = None
    rounded: bool = False  # whether momenta are in bf16, and rounded at random

    @cached_property
    def momenta(self) -> list[Tensor]:
        """The momentum of each parameter."""
        return self.states(MOMENTUM_BUFFER)

    def states(self, key: str) -> list[Tensor]:
        """State of each parameter under a key."""
        return [state[key] for state in self.state]

    def matrix_states(self, key: str) -> list[list[Tensor]]:
        """State of each parameter's logical matrices, under a key with their endings."""
        return [[x for name, x in state.items() if name.startswith(key)] for state in self.state]

    @property
    def changed(self) -> list[list[Tensor]]:
        """What a step changes of each parameter: its weight and state."""
        return [[weight, *state.values()] for weight, state in zip(self.weights, self.state, strict=True)]

    def if_ok(self, value: Scalar) -> Tensor:
        """A number in fp64, or 0 where the step is skipped."""
        if self.ok is None:
            return torch.as_tensor(value, dtype=torch.float64, device=self.weights[0].device)
        return self.ok.double() * value  # without a copy from the host, for which a GPU would wait

    def subset(self, positions: Sequence[int]) -> "Batch":
        """The batch of the parameters at these positions in it."""
        return replace(
            self,
            indices=[self.indices[n] for n in positions],
            parameters=[self.parameters[n] for n in positions],
            weights=[self.weights[n] for n in positions],
            gradients=[self.gradients[n] for n in positions],
            state=[self.state[n] for n in positions],
        )


@dataclass(frozen=True)
class Step:
    """What a program works on: the parameters of a chunk.

    Lists of logical matrices have this rank's shards of them, in the order of the parameters.
    """

    batches: list[Batch]  # one for each group
    indices: Sequence[int]  # of the parameters, ascending
    scales: list[float]  # what multiplies the orthogonal factor of each of their logical matrices
    engine: Engine
    kernels: Any = None  # StepKernels, which do the elementwise work; None for torch

    @property
    def weights(self) -> list[Tensor]:
        """This rank's shards of the parameters."""
        return [weight for batch in self.batches for weight in batch.weights]

    @property
    def gradients(self) -> list[Tensor]:
        """Gradients of the parameters."""
        return [gradient for batch in self.batches for gradient in batch.gradients]

    @property
    def has_views(self) -> bool:
        """Whether kernels read factors where they lie, which nothing may write to."""
        return self.kernels is not None and not self.batches[0].modified.measured

    def split(self, tensors: list[Tensor]) -> list[Tensor]:
        """Logical matrices of tensors as the parameters; empties the list."""
        return self.engine.split(self.indices, tensors)

    def merge(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of :meth:`split`."""
        return self.engine.merge(self.indices, matrices)

    def counts(self, batch: Batch) -> list[int]:
        """How many logical matrices each parameter of a batch has."""
        return [len(self.engine.matrices[i]) or 1 for i in batch.indices]  # without a layout one update

    def by_batch(self, of_matrices: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors of logical matrices that belong to each batch."""
        remaining = iter(of_matrices)
        return [list(islice(remaining, sum(self.counts(batch)))) for batch in self.batches]

    def with_gradients(self, gradients: Tensors) -> "Step":
        """The step with other gradients."""
        remaining = iter(gradients)
        batches = []
        for batch in self.batches:
            batches.append(replace(batch, gradients=list(islice(remaining, len(batch.indices)))))
        return replace(self, batches=batches)

    def decay(self) -> None:
        """``p -= lr * weight_decay * p``.

        L2 decay is of the gradient; kernels decay when they subtract; cautious decay waits for the update.
        """
        if self.kernels is not None:
            return
        for batch in self.batches:
            method = batch.modified.decay_method
            if batch.decays and method != "l2" and not batch.modified.cautious:
                factor = 1 - foreach.decay_power(batch.lr, method) * batch.weight_decay
                foreach.scale(batch.weights, factor, batch.ok)

    def momentum(self, rule: MomentumRule = foreach.average) -> Shards:
        """``m += (1 - beta) (g - m)``, or another rule; logical matrices of ``m`` after the look-ahead.

        Without a look-ahead these may be the momenta themselves. L2 decay adds ``weight_decay * p`` to ``g``. Momenta
        in bf16 are averaged, and looked ahead from, in fp32. With kernels the result is what writes the matrices, and a
        ``ValueError`` is for a rule that they do not have.
        """
        if self.kernels is not None:
            if rule not in (foreach.average, foreach.heavy_ball):
                raise ValueError(f"kernels of steps have no rule {rule.__name__} of momenta: set step_kernels='torch'")
            return partial(self.kernels.momentum, self.batches, heavy=rule is foreach.heavy_ball)
        updates = list[Tensor]()
        for batch in self.batches:
            momenta = batch.momenta
            gradients = batch.gradients
            if batch.rounded:
                momenta = [x.float() for x in momenta]
                gradients = [x.float() for x in gradients]
            if batch.decays and batch.modified.decay_method == "l2":
                gradients = foreach.with_decay(gradients, batch.weights, batch.weight_decay)
            u = rule(momenta, gradients, batch.beta, batch.nesterov, batch.ok)
            if batch.rounded:
                store(batch.momenta, momenta, batch.group[MOMENTUM_STEPS])
                u = [x.to(weight.dtype) for x, weight in zip(u, batch.weights, strict=True)]
            updates += u
        return self.split(updates)

    def compared_momentum(self, compared: bool) -> tuple[Shards, list[Tensor], list[Tensor]]:
        """As :meth:`momentum`, and, to be compared, shards with the norms of gradients and of updates.

        Kernels leave these when they write the matrices. Without kernels that read factors where they lie these are
        copies, to write to.
        """
        if not self.has_views:
            updates = self.momentum_tensors()
            return updates, *((self.split(self.gradients), list(updates)) if compared else ([], []))
        if not compared:
            return self.momentum(), [], []
        of_gradients = list[Tensor]()
        of_updates = list[Tensor]()

        def written(updates: Tensors) -> None:
            norms = self.kernels.momentum(self.batches, updates, measured=True)
            of_gradients.extend(norms[0])
            of_updates.extend(norms[1])

        return written, of_gradients, of_updates

    def momentum_tensors(self) -> list[Tensor]:
        """Logical matrices of :meth:`momentum`, for programs that read them."""
        shards = self.momentum()
        if not callable(shards):
            return shards
        kinds = list[tuple[Shape, torch.dtype]]()
        for i, weight in zip(self.indices, self.weights, strict=True):
            kinds += [(shape, weight.dtype) for shape in self.engine.shapes(i)]
        stacks = dict[tuple[Shape, torch.dtype], Iterator[Tensor]]()  # one launch serves what is in one memory
        for (shape, dtype), count in Counter(kinds).items():
            stack = torch.empty(count, *shape, dtype=dtype, device=self.engine.device)
            stacks[shape, dtype] = iter(stack.unbind())
        updates = [next(stacks[kind]) for kind in kinds]
        shards(updates)
        return updates

    def orthogonalize(self, u: Shards) -> Generator[Shards, list[Tensor], list[Tensor]]:
        """Wait for the orthogonal factors of whole logical matrices."""
        return (yield u)

    def norms(self, shards: Sequence[Tensor]) -> Tensor:
        """Norms in fp64 of whole logical matrices."""
        return norms_of_shards(self.engine, self.indices, shards)

    def inner_products(self, a: Shards, b: Sequence[Tensor]) -> list[Tensor]:
        """``<A, B>`` of whole logical matrices, by one reduction; ``A`` may be what :meth:`momentum` returned."""
        if callable(a):
            norms = self.kernels.products_of_updates(self.batches, b)
            positive, negative = squares_of_shards(self.engine, self.indices, *norms)
            return list((positive - negative).unbind())
        triples = zip(self.engine.flat(self.indices), a, b, strict=True)
        wanted = [StatisticsRequest(matrix=W, x=x, inner=y) for W, x, y in triples]
        return [of_matrix["inner_product"] for of_matrix in self.engine.statistics(wanted)]

    def subtract(self, factors: Tensors, scales: Scales, divide: bool = False) -> None:
        """``p -= lr * scale * factor``, as modifiers have it; may write to ``factors``.

        A scale is a number, or a tensor () of a matrix, (rows x 1) of its rows, or (1 x columns). With ``divide``
        kernels divide factors by ``sqrt(v) + eps`` before.
        """
        if self.kernels is not None:
            self._subtract_by_kernels(factors, scales, divide)
            return
        updates = scaled(list(factors), scales)
        pairs = list(zip(self.batches, self.by_batch(updates), strict=True))
        for batch, of_batch in pairs:
            if batch.decays and batch.modified.cautious:
                rate = foreach.decay_power(batch.lr, batch.modified.decay_method) * batch.weight_decay
                decay_cautiously(batch.weights, self._merged(batch, of_batch), 1 - batch.if_ok(rate))
        measured = [pair for pair in pairs if pair[0].modified.measured]
        coefficients = iter(self._measured_coefficients(measured) if measured else ())
        for batch, of_batch in pairs:
            if not batch.modified.measured:
                foreach.subtract(batch.weights, self._merged(batch, of_batch), batch.lr, batch.ok)
                continue
            shards = self.engine.split(batch.indices, list(batch.weights))
            move(shards, of_batch, next(coefficients))
            write_back(self.engine, batch.indices, batch.weights, shards)

    def _subtract_by_kernels(self, factors: Tensors, scales: Scales, divide: bool) -> None:
        if self.batches[0].modified.measured:  # all hold norms, else kernels do not serve
            factors = scaled(list(factors), scales)
            norms = self.kernels.products_of_weights(self.batches, factors)
            *squares, positive, negative = squares_of_shards(self.engine, self.indices, *norms)
            coefficients = self._coefficients(self.batches, torch.stack(squares), positive - negative)
            self.kernels.rotate(self.batches, factors, torch.cat(coefficients).float())
        else:
            self.kernels.subtract(self.batches, factors, scales, divide)

    def _merged(self, batch: Batch, updates: Tensors) -> list[Tensor]:
        """Updates in the shapes of the weights."""
        merged = list(self.engine.merge(batch.indices, updates))
        for n, weight in enumerate(batch.weights):
            if merged[n].ndim != weight.ndim:
                merged[n] = merged[n].view(weight.shape)
        return merged

    def _measured_coefficients(self, pairs: Sequence[tuple[Batch, list[Tensor]]]) -> list[Tensor]:
        """Coefficients of batches and their updates, by one reduction."""
        matrices = list[Matrix]()
        weights = list[Tensor]()
        updates = list[Tensor]()
        for batch, of_batch in pairs:
            matrices += self.engine.flat(batch.indices)
            weights += self.engine.split(batch.indices, list(batch.weights))
            updates += of_batch
        batches = [batch for batch, _ in pairs]
        return self._coefficients(batches, *squares_and_products(self.engine, matrices, weights, updates))

    def _coefficients(self, batches: Sequence[Batch], squares: Tensor, inner: Tensor) -> list[Tensor]:
        """Rows ``(moves, a, b)`` of each ``W <- (W - a U) b``."""
        coefficients = list[Tensor]()
        numbers = [sum(self.counts(batch)) for batch in batches]
        measured = zip(squares.split(numbers, 1), inner.split(numbers), strict=True)
        for batch, (norms, products) in zip(batches, measured, strict=True):
            rate = batch.if_ok(batch.lr)
            if batch.modified.holds:
                radii = torch.stack(list(chain(*batch.matrix_states(RADIUS))))
                coefficients.append(on_spheres(norms, products, radii, radii * rate))
            else:
                sizes = [prod(matrix.shape) for matrix in self.engine.flat(batch.indices)]
                coefficients.append(resized(norms, products, rate, batch.group, sizes))
        return coefficients


def scaled(factors: list[Tensor], scales: Scales) -> list[Tensor]:
    """``s O`` of each logical matrix, in place."""
    measured = list[Tensor]()
    on_device = list[Tensor]()
    by_number: dict[float, list[Tensor]] = {}  # one for each shape
    for x, scale in zip(factors, scales, strict=True):
        if isinstance(scale, Tensor):
            measured.append(x)
            on_device.append(scale)
        elif scale != 1:
            by_number.setdefault(scale, []).append(x)
    if measured:
        foreach.scale_each(measured, on_device)
    for number, tensors in by_number.items():
        exact = torch.as_tensor(number, dtype=torch.float64) if tensors[0].device.type == "cpu" else number
        torch._foreach_mul_(tensors, exact)
    return factors


def of_parameters(batches: Sequence[Batch], indices: Sequence[int]) -> list[Batch]:
    """The batches of some of their parameters."""
    if len(indices) == sum(len(batch.indices) for batch in batches):
        return list(batches)
    wanted = set(indices)
    subsets = []
    for batch in batches:
        positions = [n for n, i in enumerate(batch.indices) if i in wanted]
        if positions:
            subsets.append(batch.subset(positions))
    return subsets


def cast_to_average(batches: Sequence[Batch]) -> list[Batch]:
    """Batches with gradients in the dtypes in which momenta are averaged."""
    cast = []
    for batch in batches:
        dtypes = []
        for m, w in zip(batch.momenta, batch.weights, strict=True):
            dtypes.append(m.dtype if m.dtype == w.dtype else torch.promote_types(m.dtype, w.dtype))
        if dtypes != [g.dtype for g in batch.gradients]:
            gradients = [g.to(dtype) for g, dtype in zip(batch.gradients, dtypes, strict=True)]
            batch = replace(batch, gradients=gradients)
        cast.append(batch)
    return cast
