"""Spectron: weights of low rank, each the product of two factors that take steps bounded by their spectral norms."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from math import isnan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.matrices import WHOLE
from megatron_eopt.optimizers import foreach, group_settings, low_rank
from megatron_eopt.optimizers.base import KERNEL, BaseOptimizer
from megatron_eopt.optimizers.group_settings import Scalar, UpdateSettings, also_called, check_rates
from megatron_eopt.optimizers.parameters import (
    DescribedMatrix,
    TensorParallelGroups,
    check_shard,
    local,
    names_of_last,
    scale_rows,
)
from megatron_eopt.optimizers.state import Dim, StateTensor
from megatron_eopt.orthogonalize.choices import check_choice, check_count
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.kernels import KERNELS
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.precision import MatmulPrecision, fp32_products
from megatron_eopt.orthogonalize.spectral import start_vector
from megatron_eopt.orthogonalize.timing import times
from megatron_eopt.parallel.engine import Engine, Parameter
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.records import TpMode

logger = logging.getLogger(__name__)

FACTOR, MOMENTUM, U = "factor", "momentum_buffer", "u"
"""Of a parameter that is a factor itself the last two; else of both its factors, with ``_A`` and ``_B`` behind."""

PROJECTED = "projected"
"""1 where the factors are those of the weight, 0 before the first step."""


def factor_pairs(pairs: Iterable[Sequence[Any]], **settings: Any) -> dict[str, Any]:
    """A group of parameters that are factors themselves, for a model that computes with them::

        Spectron([factor_pairs([(layer.up, layer.down) for layer in layers], lr=0.01), {"params": dense_weights}])

    Args:
        pairs: the two factors of each weight, in any order and orientation (``A`` and ``B``, or ``A`` and ``B^T`` as
            two linear layers hold them), each a parameter or its name and it.
        **settings: of the group.

    Raises:
        ValueError: for what is not two parameters.
    """
    params = []
    for index, pair in enumerate(pairs):
        if len(pair) != 2:
            raise ValueError(f"a pair has two factors, got {len(pair)} in pair {index}")
        params += list(pair)
    return {"params": params, "pairs": True, **settings}


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter, and the factors of its logical matrices: ``A`` and ``B`` of one after the other.

    A parameter that is a factor itself is its only factor, as a layout whose second dimension is the rank.
    """

    index: int  # of the parameter
    first: int  # index of its first factor among those of all parameters
    factors: tuple[Layout, ...]
    matrices: tuple[Layout, ...]  # one object where they are equal
    nbytes: int  # of the largest shard of any rank and matrix, in the dtype of the factors


class Spectron(BaseOptimizer):
    """Spectron [1]: ``W = A B^T`` of rank ``r``, whose factors take orthogonalized steps of a bounded product.

    For a weight ``W`` (m x n) with gradient ``G`` and its factors ``A`` (m x r) and ``B`` (n x r), in this order:

    1. ``gA = G B`` and ``gB = G^T A``;
    2. weight decay of each factor: ``A -= lr * weight_decay * A``, so that ``W`` shrinks by the square;
    3. momentum, an exponential moving average: ``mA += (1 - beta) (gA - mA)``, and so ``mB``;
    4. ``sA`` and ``sB``, the largest singular values of the factors, by power iteration from the last step's vectors,
       at first from those of the decomposition below;
    5. ``A -= lr' * orth(mA)``, ``B -= lr' * orth(mB)`` with ``lr' = lr / (sA + sB + 1)``: ``W`` changes by at most
       about ``lr`` in spectral norm;
    6. ``W = A B^T``.

    The first step with ``lr > 0`` takes the factors from the singular value decomposition of the weight, and **so
    projects it to rank r**; by how much that changes it is logged, and in :attr:`projection_errors`. Before it steps
    with ``lr = 0`` change nothing; after it, they leave weight and factors bit-equal, and the momenta go on. From the
    first step on the factors are what is trained: a weight that is changed by others is written over, but by
    :meth:`scale_rows`.

    Factors, momenta and singular vectors are kept in fp32 (fp64 for an fp64 parameter), and steps 1, 4 and 6 are
    computed in it. Gradients are never written to; what has none, or one that is not finite, stays as it is:
    see :mod:`~megatron_eopt.optimizers.nonfinite`. Only steps up to the one that projects a parameter wait for a GPU.

    In the paper's own form the model holds the factors: see
    :func:`~megatron_eopt.optimizers.spectron.factor_pairs` for groups of such pairs, which skip steps 1 and 6 and the
    projection, and keep momenta and singular vectors alone. There, no setting ``rank`` is read.

    A weight that is cut by tensor parallelism has the factor of the cut dimension cut as it is and the other on every
    rank, and takes the step of one rank. A step exchanges, for a matrix cut along its rows, ``n r`` entries for ``gB``
    in one all-reduce for all matrices, ``mA`` for its orthogonal factor as ``tp_mode`` says, and ``2 k + 1`` small
    all-reduces for ``k`` power iterations.

    DTensors (FSDP2, HSDP, tensor parallelism) are taken as they lie, where they are cut along rows or along columns;
    what is kept of them are DTensors too, which torch's checkpoints load on any number of ranks.

    A group may have its own ``lr``, ``rank``, ``momentum_beta``, ``weight_decay``, ``num_ns_steps`` and
    ``coefficient_type``; the rank is settled when the state is created.

    Args:
        params: matrices, or groups of them; the attribute ``logical_matrices`` declares those that are several.
        lr: learning rate, at least 0.
        rank: ``r``, from 1 to the short side of every logical matrix. The paper has a quarter of that.
        momentum_beta: ``beta``, in [0, 1). The paper has 0.95.
        weight_decay: at least 0.
        num_power_iterations: of each step, at least 1; also as ``num_power_iter``.
        num_ns_steps: Newton-Schulz steps.
        coefficient_type: name of a coefficient set, or a list of ``(a, b, c)``.
        fp32_matmul_prec: of the products of the Newton-Schulz iteration: ``low``, ``medium``, ``high`` or ``highest``.
        split_qkv: give the parts of fused query, key and value projections factors of their own.
        is_qkv_fn: tells which parameters are fused.
        qkv_split_shapes: rows of (q, k, v), or of (q, gate, k, v), in one query group; the attribute
            ``qkv_split_shapes`` of a parameter wins.
        pg_collection: the process groups ``tp`` and, for experts, ``expt_tp``; None where nothing is sharded.
        tp_mode: how a factor that is cut is orthogonalized: ``duplicated``, ``owner``, ``distributed``, ``gram`` or
            ``auto``, all exact: see :mod:`~megatron_eopt.parallel.plan`.
        symmetric_products: the kernel of symmetric products, as of Muon.

    Raises:
        ValueError: for a setting out of its range, a parameter that is no matrix or is cut along both dimensions, a
            split that does not fit, or shards without a group; in the first step for a weight that is zero or not
            finite, before any is changed.

    [1] Spectron, arXiv 2602.12429.
    """

    carried_settings = frozenset({KERNEL})

    newton_schulz_calls: int = 0

    # What prepare() makes, and the engine of the parameters for which it did.
    _factors: Engine
    _weights: dict[Tensor, Weight]
    _prepared: Engine | None = None
    _done: frozenset[Tensor] = frozenset()
    _errors: Mapping[str, float] = {}

    @also_called(num_power_iter="num_power_iterations")
    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 3e-4,
        rank: int = 64,
        momentum_beta: float = 0.9,
        weight_decay: float = 0.01,
        num_power_iterations: int = 1,
        num_ns_steps: int = 5,
        coefficient_type: str | Sequence[Coefficients] = "quintic",
        fp32_matmul_prec: MatmulPrecision = "medium",
        split_qkv: bool = False,
        is_qkv_fn: Callable[[Tensor], bool] | None = None,
        qkv_split_shapes: Sequence[int] | None = None,
        pg_collection: TensorParallelGroups | None = None,
        tp_mode: TpMode = "duplicated",
        symmetric_products: str | None = None,
    ) -> None:
        check_choice("symmetric_products", symmetric_products or "torch", KERNELS)
        check_count("Spectron: num_power_iterations", num_power_iterations)
        self.newton_schulz = NewtonSchulz(
            steps=num_ns_steps, coefficient_type=coefficient_type, fp32_matmul_prec=fp32_matmul_prec
        )
        group_settings.note_short_schedule(self.newton_schulz)
        self.num_power_iterations = num_power_iterations
        self._set_split(split_qkv, is_qkv_fn, qkv_split_shapes)
        self.pg_collection = pg_collection
        self.tp_mode = tp_mode
        self.symmetric_products = symmetric_products
        defaults = {"lr": lr, "rank": rank, "momentum_beta": momentum_beta, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "pairs": False})

    def settings(self) -> dict[str, Any]:
        """What a checkpoint says of this optimizer to those who read it."""
        coefficients, precision = list(map(list, self.newton_schulz.schedule)), self.newton_schulz.fp32_matmul_prec
        own = {key: getattr(self, key) for key in ("num_power_iterations", "split_qkv", "tp_mode")}
        return super().settings() | {"coefficients": coefficients, "fp32_matmul_prec": precision} | own

    def settings_of_groups(self) -> dict[str, Any]:
        """Also those of the iteration; whether a group is of pairs is no setting, but says what its parameters are."""
        own = {key: value for key, value in super().settings_of_groups().items() if key != "pairs"}
        iteration = self.newton_schulz
        return own | {group_settings.STEPS: iteration.steps, group_settings.COEFFICIENTS: iteration.coefficient_type}

    @property
    def projection_errors(self) -> dict[str, float]:
        """Relative errors of the projections that this optimizer made, by parameter, the largest where it is several
        matrices: ``||W - A B^T||_F / ||W||_F``.
        """
        return dict(self._errors)

    def explain(self) -> str:
        """The plan by which factors are orthogonalized, as a table. All ranks ask together."""
        self.prepare()
        return self._factors.explain()

    def explain_proposed(self) -> str:
        """What :meth:`explain` will say, before ranks agree."""
        return self._proposed_factors()[0].explain()

    @property
    def matrices_updated(self) -> int:
        """All of them are updated."""
        return self.newton_schulz_calls

    def described_matrices(self, settled: bool = True) -> dict[Tensor, list[DescribedMatrix]]:
        """The logical matrices of each parameter; the size of their updates follows from the factors."""
        if settled:
            self.prepare()
        engine, weights = (self._factors, self._weights) if settled else self._proposed_factors()
        schemes = {i: b.scheme.replace("_", " ") for b in engine.plan.buckets for i in b.matrices}
        described = {}
        for parameter, weight in weights.items():
            names = self.split_of(parameter).names(self.layout(parameter).shape[0])
            of_factors = [schemes[weight.first + n] for n in range(len(weight.factors))]
            both = batched(of_factors, max(1, len(of_factors) // len(weight.matrices)))
            # that of the factor which is cut
            found = (next((scheme for scheme in some if scheme != "local"), "local") for some in both)
            each = zip(names, weight.matrices, found, strict=True)
            described[parameter] = [DescribedMatrix(name, x.shape, scheme, 1.0, None) for name, x, scheme in each]
        return described

    def prepare(self) -> Engine:
        """Also settle how factors are orthogonalized; the engine that is returned is that of the parameters."""
        engine = super().prepare()
        if self._prepared is not engine:
            for parameter, state in self.state.items():
                kept = next((x.shape[1] for key, x in state.items() if key.startswith(f"{FACTOR}_A")), None)
                rank = self.group_of(parameter)["rank"]
                if kept not in (None, rank):
                    raise ValueError(
                        f"{type(self).__name__} keeps factors of rank {kept} for the parameter of shape "
                        f"{tuple(parameter.shape)}, whose group now has rank {rank}: set it back, it cannot change"
                    )
            factors, self._weights = self._proposed_factors()
            kernel = factors.prepare(self.symmetric_products, self.param_groups[0].get(KERNEL))
            self._factors, self._prepared = factors, engine
            for group in self.param_groups:
                group[KERNEL] = kernel
        return engine

    def kernel_times(self) -> Tensor:
        """Those of the factors."""
        return times(*self._proposed_factors()[0].stacks())

    def _iteration(self, group: Mapping[str, Any]) -> NewtonSchulz:
        return UpdateSettings(self.newton_schulz, "spectral", 1.0).of_group(group).newton_schulz

    def _planned_settings(self) -> object:
        return group_settings.own_settings(self.param_groups), [group["rank"] for group in self.param_groups]

    def _described(self, name: str, parameter: Tensor) -> Parameter:
        return Parameter(name, low_rank.wide_dtype(parameter), self.layout(parameter), self.split_of(parameter))

    def _proposed_factors(self) -> tuple[Engine, dict[Tensor, Weight]]:
        """The engine of the factors before ranks agree on it, and the factors of each parameter."""
        weights: dict[Tensor, Weight] = {}
        factors: list[Parameter] = []
        known: dict[Layout, Layout] = {}
        for index, (name, parameter) in enumerate(zip(self._names(), self._parameters(), strict=True)):
            group, split = self.group_of(parameter), self.split_of(parameter)
            layout = self.layout(parameter)
            matrices = tuple(known.setdefault(x, x) for x in self.matrix_layouts(parameter))
            layouts = low_rank.factor_layouts(matrices, None if group["pairs"] else group["rank"])
            ends = [f"{each} {side}".strip() for each in split.names(layout.shape[0]) for side in "AB"]
            called = [name] if group["pairs"] else [f"{name}[{end}]" for end in ends]
            dtype = low_rank.wide_dtype(parameter)
            nbytes = dtype.itemsize * max(each.numel for x in matrices for each in x.rectangles)
            weights[parameter] = Weight(index, len(factors), layouts, matrices, nbytes)
            of_factors = zip(called, layouts, strict=True)
            factors += [Parameter(each, dtype, layout, WHOLE, self._iteration(group)) for each, layout in of_factors]
        return Engine(factors, self._parameters()[0].device, self.tp_mode), weights

    def scale_rows(self, parameters: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Also rows of the first factor of each logical matrix; what is a factor itself is scaled as it is."""
        self.prepare()
        super().scale_rows(parameters, factors)
        for parameter, factor in zip(parameters, factors, strict=True):
            if not self.group_of(parameter)["pairs"]:
                of_entries = factor[:, None].expand(local(parameter).shape)
                for i, of_matrix in enumerate(self._split(self._weights[parameter], of_entries)):
                    scale_rows(self._tensors(parameter, 2 * i)[0], of_matrix[:, 0])

    # Groups and state.

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Factors, their momenta and singular vectors, for each logical matrix; of a factor what it has of these."""
        dtype, group = low_rank.wide_dtype(parameter), self.group_of(parameter)
        if group["pairs"]:
            side: Dim = "rows" if low_rank.is_tall(self.layout(parameter)) else "columns"
            return [StateTensor(MOMENTUM, dtype=dtype), StateTensor(U, (side,), 0, dtype)]
        rank = group["rank"]
        described = [StateTensor(PROJECTED, (), 0, dtype)]
        for part, end in enumerate(self.key_ends(parameter)):
            for key, dims in ((FACTOR, (rank,)), (MOMENTUM, (rank,)), (U, ())):
                described.append(StateTensor(f"{key}_A{end}", ("rows", *dims), part, dtype))
                described.append(StateTensor(f"{key}_B{end}", ("columns", *dims), part, dtype))
        return described

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state: of a weight that was projected the factors, which are not computed anew."""
        for number, (own, saved) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=False)):
            for key in ("rank", "pairs"):
                if saved.get(key, own[key]) != own[key]:
                    raise ValueError(
                        f"{type(self).__name__}: group {number} has {key}={own[key]}, but the state was saved with "
                        f"{saved[key]}: build the optimizer as it was"
                    )
        super().load_state_dict(state_dict)
        self._done = frozenset()

    def _state_of(self, parameter: Tensor, key: str | None = None) -> dict[str, Any]:
        if key in self.state[parameter]:
            return self.state[parameter]
        before, layouts = set(self.state[parameter]), self.matrix_layouts(parameter)
        state = super()._state_of(parameter)
        for tensor in (each for each in self.state_tensors(parameter) if each.key not in before):
            (rows, columns), own = layouts[tensor.matrix].shape, layouts[tensor.matrix].rectangle
            if tensor.dims == ("rows",):
                local(state[tensor.key]).copy_(start_vector(rows)[own.top : own.bottom])
            elif tensor.dims == ("columns",):
                local(state[tensor.key]).copy_(start_vector(columns)[own.left : own.right])
        return state

    def _check_ranges(self, group: Mapping[str, Any]) -> None:
        check_rates(type(self).__name__, group, "momentum_beta")

    def _check_group(self, group: dict[str, Any]) -> None:
        name, number = type(self).__name__, len(self.param_groups) - 1
        if self.tp_mode == "blockwise":
            raise ValueError("Spectron has no tp_mode blockwise: take duplicated, owner, distributed, gram or auto")
        check_count(f"{name}: rank", group["rank"])
        for key in (group_settings.SCALE_MODE, group_settings.EXTRA_SCALE):
            if key in group:
                raise ValueError(f"{name}: group {number} has {key}, but the size of an update follows from lr alone")
        names = names_of_last(self.param_groups)
        indices = names_of_last(self.param_groups, shapes=False)
        for parameter, called, index in zip(group["params"], names, indices, strict=True):
            if not parameter.is_floating_point():
                raise ValueError(f"{name} takes real, floating-point matrices, but {called} is {parameter.dtype}")
            self._check_matrix(parameter, f"orthogonalizes matrices, but {index}")
            check_shard(parameter, self.pg_collection, called)
            layout = self.layout(parameter)
            if len(layout.cut_dims) > 1:
                raise ValueError(
                    f"{name} takes matrices that are cut along their rows or along their columns, but {called}, a "
                    f"matrix {layout.shape}, is cut along both: shard one dimension of it alone, or give it to "
                    f"TensorParallelMuon"
                )
            self._check_placements(parameter, called)
            split, rank = self.split_of(parameter), group["rank"]
            if group["pairs"] and not split.is_whole:
                raise ValueError(f"{name}: {called} is a factor of a pair, and cannot be split into logical matrices")
            for part, matrix in zip(split.names(layout.shape[0]), self.matrix_layouts(parameter), strict=True):
                if rank > min(matrix.shape) and not group["pairs"]:
                    of_part = f"{called} ({part})" if part else called
                    raise ValueError(
                        f"{name}: rank must lie in [1, {min(matrix.shape)}] for {of_part}, a matrix {matrix.shape}, "
                        f"got {rank}: set rank (options={{'rank': ...}} of build_optimizer, or in a group of its own), "
                        f"or take another optimizer"
                    )
        if group["pairs"]:
            low_rank.check_pairs(name, [self.layout(p) for p in group["params"]], names)
        try:
            self._iteration(group)
        except ValueError as error:
            raise ValueError(f"{name}: group {number}: {error}") from error

    # The step.

    def _take(self, accepted: Tensor) -> None:
        flags = dict(zip(self._parameters(), accepted.unbind(), strict=True))
        # also without a gradient where others wait for this rank's part
        active = {p for i, p in enumerate(self._parameters()) if p.grad is not None or self.engine.shares(i)}
        with fp32_products("highest"):
            weights = [p for p in self._parameters() if p in active and not self.group_of(p)["pairs"]]
            if waiting := [p for p in weights if p not in self._done]:
                self._project(waiting, flags)
            self._session.changing = True
            chunks = [(chunk, list(self._factors_of(chunk, flags))) for chunk in self._chunks(active)]
            of_weights = [each for each in chunks if not self.group_of(each[0][0])["pairs"]]
            self._set_gradients(of_weights)
            factors = [equal for _, factors in chunks for equal in factors]
            low_rank.spectron(factors, self._factors, self.num_power_iterations)
            for chunk, factors in of_weights:
                self._write(chunk, factors)
        # a factor that is a parameter is a matrix of its own
        self.newton_schulz_calls += sum(len(self._weights[p].matrices) for chunk, _ in chunks for p in chunk)

    def _chunks(self, active: set[Tensor]) -> Iterator[list[Tensor]]:
        """Parameters to work on together, up to a size; all ranks that share one have the same, and so round alike."""
        for group in self.param_groups:
            chunks: dict[object, list[Tensor]] = {}
            nbytes: Counter[object] = Counter()
            for unit in batched(group["params"], 2 if group["pairs"] else 1):
                if not active.isdisjoint(unit) and (group["pairs"] or unit[0] in self._done):
                    alike = tuple((p.dtype, self._weights[p].matrices[0].label) for p in unit)
                    nbytes[alike] += sum(self._weights[p].nbytes * len(self._weights[p].matrices) for p in unit)
                    chunks.setdefault((alike, nbytes[alike] // foreach.MOST_BYTES), []).extend(unit)
            yield from chunks.values()

    def _factors_of(self, chunk: Sequence[Tensor], flags: Mapping[Tensor, Tensor]) -> Iterator[low_rank.Factors]:
        """The first and the second factors of equal pairs of a chunk, of so many pairs that their size is bounded."""
        group = self.group_of(chunk[0])
        factors = [(p, i) for p in chunk for i, _ in enumerate(self._weights[p].factors)]
        kinds: dict[tuple[int, ...], list[int]] = {}
        for position, pair in enumerate(batched(factors, 2)):
            kinds.setdefault(tuple(id(self._weights[p].matrices[i // 2]) for p, i in pair), []).append(position)
        for equal in kinds.values():
            nbytes = max(1, *(self._weights[p].nbytes for p, _ in factors[2 * equal[0] :][:2]))
            for positions in batched(equal, max(1, foreach.MOST_BYTES // nbytes)):
                both = [[factors[2 * position + side] for position in positions] for side in (0, 1)]
                accepted = torch.stack([flags[p] for some in both for p, _ in some]).view(2, -1).all(0)
                for some in both:
                    (first, i), indices = some[0], [self._weights[p].first + i for p, i in some]
                    label = self._weights[first].factors[i].label
                    transposed = group["pairs"] and not low_rank.is_tall(self._weights[first].matrices[0])
                    tensors = map(list, zip(*(self._tensors(*each) for each in some), strict=True))
                    yield low_rank.Factors(positions, indices, label, transposed, accepted, group, *tensors)

    def _split(self, weight: Weight, x: Tensor) -> list[Tensor]:
        return self.engine.split([weight.index], [x])

    def _tensors(self, parameter: Tensor, factor: int) -> list[Tensor]:
        """A factor of a parameter, its momentum and its singular vector; of one that is the parameter its gradient."""
        pairs = self.group_of(parameter)["pairs"]
        end = "" if pairs else ("_B" if factor % 2 else "_A") + self.key_ends(parameter)[factor // 2]
        state = self._state_of(parameter, U + end)
        if pairs:
            gradient = state[MOMENTUM] if parameter.grad is None else parameter.grad
            return [local(x) for x in (parameter, state[MOMENTUM], state[U], gradient)]
        return [local(state[key + end]) for key in (FACTOR, MOMENTUM, U)]

    def _set_gradients(self, chunks: Sequence[tuple[list[Tensor], list[low_rank.Factors]]]) -> None:
        """``G B`` and ``G^T A`` of each logical matrix of weights, in the dtype of the factors."""
        products, labels = [], []
        for chunk, factors in chunks:
            gradients = [local(torch.zeros_like(p) if p.grad is None else p.grad) for p in chunk]
            shards = self.engine.split([self._weights[p].index for p in chunk], gradients)
            for first, second in batched(factors, 2):
                A, B = first.stack(), second.stack()
                G = torch.stack([shards[position] for position in first.positions]).to(A.dtype)
                products += [G @ B, G.mT @ A]
                # a product along a dimension that is cut is of this rank's part of it alone
                labels += [second.label, first.label]
        summed = self._factors.sums(products, labels)
        for some, product in zip((some for _, factors in chunks for some in factors), summed, strict=True):
            some.gradients.extend(product.unbind())

    def _write(self, chunk: Sequence[Tensor], factors: Sequence[low_rank.Factors]) -> None:
        """``W = A B^T`` of weights, where it changed."""
        weights, indices = [local(p) for p in chunk], [self._weights[p].index for p in chunk]
        shards = self.engine.split(indices, list(weights))
        for A, B in batched(factors, 2):
            before = torch.stack([shards[position] for position in A.positions])
            changed = (A.accepted & (A.settings["lr"] != 0)).view(-1, 1, 1)
            new = torch.where(changed, (A.stack() @ B.stack().mT).to(before.dtype), before)
            for position, shard in zip(A.positions, new.unbind(), strict=True):
                shards[position] = shard
        torch._foreach_copy_(weights, self.engine.merge(indices, shards))

    def _project(self, waiting: Sequence[Tensor], flags: Mapping[Tensor, Tensor]) -> None:
        """Take the factors from the weights that step for the first time; waits for the device while there are any."""
        # also with lr=0: torch loads a checkpoint into what such a step makes
        kept = [self._state_of(p, PROJECTED)[PROJECTED] for p in waiting]
        begin = [flags[p] & (self.group_of(p)["lr"] > 0) for p in waiting]
        read = list(zip(waiting, *torch.stack([*kept, *begin]).view(2, -1).tolist(), strict=True))
        self._done |= {p for p, done, _ in read if done}
        new = {p: self._weights[p] for p, done, begins in read if begins and not done}
        if not new:
            return
        parts = [(p, i) for p, w in new.items() for i, _ in enumerate(w.matrices)]
        shards = (x.to(low_rank.wide_dtype(p)) for p, w in new.items() for x in self._split(w, local(p)))
        layouts = [new[p].matrices[i] for p, i in parts]
        ranks = [self.group_of(p)["rank"] for p, _ in parts]
        found = low_rank.project(shards, layouts, ranks, [new[p].first // 2 + i for p, i in parts])
        names = dict(zip(self._parameters(), self._names(), strict=True))
        largest: dict[str, float] = {}
        for (p, _), (_, _, error) in zip(parts, found, strict=True):
            if isnan(error):
                raise ValueError(
                    f"{type(self).__name__} cannot take factors from {names[p]}: a matrix of it is zero, and factors "
                    f"of zero never move, or is not finite. Initialize it otherwise, or give it to another optimizer"
                )
            largest[names[p]] = max(error, largest.get(names[p], 0.0))
        self._errors = {**self._errors, **largest}
        if not dist.is_initialized() or dist.get_rank() == 0:
            worst = max(largest, key=largest.__getitem__)
            logger.warning(
                f"{type(self).__name__} projects {len(largest)} weights to their rank, which changes them by "
                f"{min(largest.values()):.3g} to {largest[worst]:.3g} of their norm, most {worst}"
            )
        self._session.changing = True
        for (p, i), (A, B, _) in zip(parts, found, strict=True):
            for factor, found_factor in enumerate((A, B), 2 * i):
                value, _, u = self._tensors(p, factor)
                value.copy_(found_factor)
                # up to its norm its singular vector, whatever the order of rows, which may follow the ranks
                u.copy_(found_factor[:, 0])
            self.state[p][PROJECTED].fill_(1)
        self._done |= new.keys()
