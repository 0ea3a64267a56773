"""Muown: Muon of directions beside Adam of the norms of rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from types import MappingProxyType
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.batches import Batch
from megatron_eopt.optimizers.foreach import Tensors
from megatron_eopt.optimizers.muon import Chunk, momentum, scaled, with_gradients
from megatron_eopt.optimizers.orthogonalized import refuse_blockwise
from megatron_eopt.optimizers.parameters import local, names_of_last, scale_rows
from megatron_eopt.optimizers.state import StateTensor, check_placements
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon, Transport
from megatron_eopt.orthogonalize.forms import nonzero
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.records import Matrix
from megatron_eopt.parallel.scheduler import Program
from megatron_eopt.settings.groups import DECOUPLED, METHOD
from megatron_eopt.settings.of_class import with_settings
from megatron_eopt.settings.records import Setting
from megatron_eopt.settings.values import ABOVE_0, BELOW_1

ROWS = ("g", "v_norm", "m_g", "v_g")  # state keys, each with an entry for every row of a logical matrix
STEPS = "steps"  # of a parameter, with a rate above 0
SMALLEST = 1e-12  # norm that a row of zeros starts with


@dataclass(frozen=True, eq=False)
class Rows:
    """What is kept of the rows of a batch, one matrix after another."""

    batch: Batch
    lengths: list[int]  # of each matrix
    g: Tensor
    v_norm: Tensor
    m: Tensor  # Adam's moments of g
    v: Tensor
    steps: Tensor  # so far, of each row's parameter
    moves: Tensor  # whether its row takes the step

    def split(self, x: Tensor) -> list[Tensor]:
        """What belongs to the rows of each matrix."""
        return list(x.split(self.lengths))


def rows_of(batch: Batch) -> Rows:
    """Copies of the state of a batch's rows."""
    kept = [of_matrix for of_p in batch.further for of_matrix in matrices_of(of_p)]
    owners = [n for n, of_p in enumerate(batch.further) for _ in matrices_of(of_p)]
    counts, moved = steps_of(batch)
    each = [torch.cat(tensors) for tensors in zip(*kept, strict=True)]
    lengths = [len(g) for g, *_ in kept]
    of_rows = [
        [x.unbind()[n].expand(length) for n, length in zip(owners, lengths, strict=True)] for x in (counts, moved)
    ]
    return Rows(batch, lengths, *each, *map(torch.cat, of_rows))


def matrices_of(kept: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The state of the rows of each logical matrix of a parameter."""
    return batched((x for key, x in kept.items() if key != STEPS), len(ROWS))


def steps_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """Steps of a batch's parameters so far, and whether each makes one."""
    counts = torch.stack([of_p[STEPS] for of_p in batch.further])
    accepted = torch.ones_like(counts).bool() if batch.accepted is None else batch.accepted
    return counts, accepted & torch.as_tensor(batch.lr != 0)


def muown(chunk: Chunk, engine: Engine) -> Program:
    """Muown's step of the parameters of a chunk: see :class:`Muown`."""
    batches = [rows_of(batch) for batch in chunk.batches]
    matrices = engine.flat(chunk.indices)
    weights = [weight for batch in chunk.batches for weight in batch.weights]
    G = engine.split(chunk.indices, [gradient for batch in chunk.batches for gradient in batch.gradients])
    W = engine.split(chunk.indices, list(weights))
    along = of_batches(batches, over_columns(engine, matrices, on_stacks(row_products, G, W)))
    gradients = [x.to(rows.g.dtype) / nonzero(rows.g) for rows, x in zip(batches, along, strict=True)]  # <G, W> / g
    pairs = zip(batches, gradients, strict=True)
    a = [x for rows in batches for x in rows.split(rows.g / nonzero(rows.v_norm))]
    b = [x for rows, of_g in pairs for x in rows.split(of_g / nonzero(rows.v_norm))]
    of_v = engine.merge(chunk.indices, on_stacks(combined, a, G, b, W))  # (g G - grad_g W) / ||v||
    of_v = [x.to(w.dtype).view(w.shape) for x, w in zip(of_v, weights, strict=True)]
    del G, W
    u = engine.split(chunk.indices, momentum(with_gradients(chunk, of_v)))
    O = yield from engine.orthogonalize(chunk.indices, u)  # noqa: E741
    if chunk.watch is not None:
        chunk.watch(chunk.indices, scaled([x.clone() for x in O], chunk.scales))
    a = [x for rows in batches for x in rows.split(rows.v_norm / nonzero(rows.g))]
    b = [x for rows in batches for x in rows.split(torch.ones_like(rows.g) * rows.batch.lr)]
    b = scaled(b, chunk.scales)
    W = engine.split(chunk.indices, list(weights))
    # v - lr s O, which is made twice, so that there is no copy of all of it
    squares = of_batches(batches, over_columns(engine, matrices, on_stacks(row_squares, a, W, b, O)))
    shrinks = list[Tensor]()
    moves = list[Tensor]()
    for rows, of_g, x in zip(batches, gradients, squares, strict=True):
        v_norm = x.sqrt().to(rows.g.dtype)
        g = step_of_rows(rows, of_g, v_norm)
        shrinks += rows.split(g / nonzero(v_norm))
        moves += rows.split(rows.moves)
    for some in foreach.alike(W):
        old = foreach.stacked(W, some)
        new = combined(*(foreach.stacked(xs, some) for xs in (a, W, b, O))) * foreach.stacked(shrinks, some)[..., None]
        stack = torch.where(foreach.stacked(moves, some)[..., None], new.to(old.dtype), old)  # g v / ||v||
        torch._foreach_copy_([W[i] for i in some], list(stack.unbind()))
    for weight, x in zip(weights, engine.merge(chunk.indices, W), strict=True):
        if weight is not x:
            weight.copy_(x.view(weight.shape))


def step_of_rows(rows: Rows, gradient: Tensor, v_norm: Tensor) -> Tensor:
    """Adam's step of ``g``, which is returned; writes the state of rows that move."""
    settings = rows.batch.settings
    lr = rows.batch.lr
    beta1 = settings["beta1"]
    beta2 = settings["beta2"]
    steps = rows.steps + 1
    m = torch.lerp(rows.m, gradient, 1 - beta1)
    v = torch.lerp(rows.v, gradient.square(), 1 - beta2)
    first, second = ((1 - beta**steps).to(m.dtype) for beta in (beta1, beta2))
    g = rows.g - lr * (m / first) / ((v / second).sqrt() + settings["eps"])
    g = g - lr * rows.batch.weight_decay * g
    pairs = (g, rows.g), (v_norm, rows.v_norm), (m, rows.m), (v, rows.v)
    new = [torch.where(rows.moves, after, before) for after, before in pairs]
    kept = zip(*(of_matrix for of_p in rows.batch.further for of_matrix in matrices_of(of_p)), strict=True)
    for tensors, x in zip(kept, new, strict=True):
        torch._foreach_copy_(list(tensors), rows.split(x))
    counts, moved = steps_of(rows.batch)
    torch._foreach_copy_([of_p[STEPS] for of_p in rows.batch.further], list((counts + moved).unbind()))
    return new[0]


def on_stacks(function: Callable[..., Tensor], *lists: Tensors) -> list[Tensor]:
    """What a function makes of stacks of equal tensors, for each of them."""
    results = list(lists[0])
    for some in foreach.alike(*lists):
        for i, x in zip(some, function(*(foreach.stacked(xs, some) for xs in lists)).unbind(), strict=True):
            results[i] = x
    return results


def combined(a: Tensor, X: Tensor, b: Tensor, Y: Tensor) -> Tensor:
    """``a X - b Y`` with a factor for each row."""
    wide = torch.promote_types(X.dtype, torch.float32)
    return a.to(wide)[..., None] * X - b.to(wide)[..., None] * Y


def row_products(X: Tensor, Y: Tensor) -> Tensor:
    """Inner products of rows, in fp64."""
    return (X.to(torch.promote_types(X.dtype, torch.float32)) * Y).sum(-1, dtype=torch.float64)


def row_squares(a: Tensor, X: Tensor, b: Tensor, Y: Tensor) -> Tensor:
    """Squared norms of the rows of ``a X - b Y``, in fp64."""
    return combined(a, X, b, Y).square().sum(-1, dtype=torch.float64)


def over_columns(engine: Engine, matrices: Sequence[Matrix], sums: list[Tensor]) -> list[Tensor]:
    """Sums of whole rows where shards have a part of them: one all-reduce."""
    cut = [i for i, W in enumerate(matrices) if any(shard.shape[1] != W.shape[1] for shard in W.rectangles)]
    whole = engine.side_sums([sums[i][:, None] for i in cut], [matrices[i] for i in cut], 0)
    for i, x in zip(cut, whole, strict=True):
        shard = engine.shard(matrices[i])
        sums[i] = x[shard.top : shard.bottom, 0]
    return sums


def of_batches(batches: Sequence[Rows], of_matrices: Sequence[Tensor]) -> list[Tensor]:
    """Vectors of matrices, one after another for each batch."""
    remaining = iter(of_matrices)
    return [torch.cat([next(remaining) for _ in rows.lengths]) for rows in batches]


class Muown(TensorParallelMuon):
    """Muown [1]: rows of a matrix as norms, with Adam, and directions, with Muon.

    Each row of a logical matrix is ``W = g v / ||v||``, with a norm ``g`` and a direction ``v`` that only the optimizer
    has: the model holds ``W``. With gradient ``G`` and ``s`` Muon's scale of the matrix, in this order:

    1. gradients by the chain rule, for each row: ``grad_g = <G, W> / g``, and
       ``grad_v = (g G - grad_g W) / ||v||``, which is orthogonal to the row;
    2. ``m += (1 - momentum) (grad_v - m)``, and ``u = (1 - momentum) grad_v + momentum m`` with ``nesterov``, else
       ``m``;
    3. ``v <- v - lr s O`` with ``O`` the orthogonal factor of the whole logical matrix of ``u``;
    4. ``g <- g - lr Adam(grad_g)``, then ``g <- (1 - lr weight_decay) g``;
    5. ``W = g v / ||v||``.

    It is for runs in which the norms of rows, and with them the spectral norm, drift under Muon: a step of the
    direction turns a row and leaves its norm, which moves by about ``lr`` at most, and alone is decayed. As gradients
    of ``v`` are orthogonal to it, ``||v||`` grows, and rows turn ever less.

    Norms are those of the rows of global matrices: where columns are cut, two all-reduces of a step for each group of
    ranks have a number for every row. So the update at TP=k is the update at TP=1. ``g``, ``||v||`` and the moments of
    ``g`` are kept in fp32 (fp64 for fp64 parameters); ``g`` and ``||v||`` begin with the norms that rows have before
    the first step with a rate above 0, at least 1e-12. From then on rows have the norms of ``g``: other changes of a
    weight's rows are lost in part, except those by :meth:`scale_rows`. A rate of 0 changes momenta alone. Steps until
    that first one wait for a GPU.

    Args:
        params: matrices, or groups of them with their own ``lr``, ``momentum``, ``beta1``, ``beta2``, ``eps``,
            ``weight_decay`` and what Muon's groups may have of the iteration and the scale.
        lr: of directions and norms, at least 0.
        momentum: of directions, in [0, 1).
        nesterov: whether to look ahead, as the authors do and emerging-optimizers do not.
        weight_decay: of ``g``, decoupled, at least 0.
        beta1: of Adam's first moment of ``g``, in [0, 1).
        beta2: of its second moment, in [0, 1).
        eps: added to the root of the second moment, above 0.
        **settings: these, and what is not named here, as in
            :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon`.

    Raises:
        ValueError: as by Muon; for ``beta1``, ``beta2`` or ``eps`` out of their range, with ``blockwise``,
            and for a DTensor whose logical matrices are cut as no placement says.

    [1] Lion et al., Muown: Row-Norm Control for Muon Optimization, arXiv 2605.10797.
    """

    own_settings = (
        Setting("beta1", "Decay rate of Adam's first moment of the norms of rows, in [0, 1).", BELOW_1),
        Setting("beta2", "Decay rate of its second moment, in [0, 1).", BELOW_1),
        Setting("eps", "Added to the root of the second moment.", ABOVE_0),
    )
    group_keys = ("lr", "momentum", "nesterov", "weight_decay", DECOUPLED, METHOD, "beta1", "beta2", "eps")
    only = MappingProxyType(
        {
            DECOUPLED: (True,),
            METHOD: (None,),
            "weight_norm": ("none",),
            "relative_update": ("none",),
            "cautious_weight_decay": (False,),
            "moment2_method": ("none",),
        }
    )

    _begun: frozenset[Tensor] = frozenset()  # parameters that are known to have made a step

    @with_settings(Transport, TensorParallelMuon)
    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        *,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        scale_mode: ScaleMode = "spectral",
        extra_scale_factor: float = 1.0,
        **settings: Unpack[Transport],
    ) -> None:
        self._begin(params, locals())

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        refuse_blockwise(self, "norms")
        for parameter, called in zip(group["params"], names_of_last(self.param_groups), strict=True):
            name = f"{type(self).__name__}: {called}"
            check_placements(name, parameter, self.state_tensors(parameter), self.matrix_layouts)

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum, what is kept of rows, and the steps."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        ends = enumerate(self.key_ends(parameter))
        rows = [StateTensor(key + end, ("rows",), i, wide) for i, end in ends for key in ROWS]
        return [*super().state_tensors(parameter), *rows, StateTensor(STEPS, (), dtype=torch.float64)]

    def predicted_rms(self, rows: int, cols: int, group: Mapping[str, Any] | None = None) -> float | None:
        """None: how far rows turn depends on their norms."""
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state with its norms of rows."""
        super().load_state_dict(state_dict)
        self._begun = frozenset()

    def _take(self, accepted: Tensor) -> None:
        parameters = self._parameters()
        if len(self._begun) < len(parameters):
            active = (p for i, p in enumerate(parameters) if p.grad is not None or self._waited_for(i))
            waiting = [p for p in active if p not in self._begun]
            if waiting:
                self._measure(waiting, dict(zip(parameters, accepted.unbind(), strict=True)))
        super()._take(accepted)

    def _measure(self, waiting: Sequence[Tensor], accepted: Mapping[Tensor, Tensor]) -> None:
        """Norms of rows of parameters without a step; the host waits."""
        counts = torch.stack([self._states.of(p, STEPS)[STEPS] for p in waiting]).tolist()
        self._begun |= {p for p, steps in zip(waiting, counts, strict=True) if steps}
        index_of = {p: i for i, p in enumerate(self._parameters())}
        new = sorted((p for p in waiting if p not in self._begun), key=index_of.__getitem__)
        indices = [index_of[p] for p in new]
        W = self.engine.split(indices, [local(p.detach()) for p in new])
        norms = over_columns(self.engine, self.engine.flat(indices), on_stacks(row_products, W, W))
        kept = [(p, *of_matrix) for p in new for of_matrix in matrices_of(self._further_state(p))]
        for (p, g, v_norm, *_), squares in zip(kept, norms, strict=True):
            g.copy_(torch.where(accepted[p], squares.sqrt().clamp(min=SMALLEST).to(g.dtype), g))
            v_norm.copy_(g)

    def scale_rows(self, parameters: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Also scale the norms of rows."""
        self.prepare()
        super().scale_rows(parameters, factors)
        index_of = {p: i for i, p in enumerate(self._parameters())}
        for parameter, factor in zip(parameters, factors, strict=True):
            of_matrices = self.engine.split([index_of[parameter]], [factor[:, None].expand(local(parameter).shape)])
            kept = matrices_of(self._further_state(parameter))
            for (g, *_), of_rows in zip(kept, of_matrices, strict=True):
                scale_rows(g, of_rows[:, 0])

    def program(self, chunk: Chunk, engine: Engine) -> Program:
        """One chunk's step."""
        return muown(chunk, engine)
