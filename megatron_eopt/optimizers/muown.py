"""Muown: Muon of directions beside Adam of the norms of rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from types import MappingProxyType
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.foreach import Tensors
from megatron_eopt.optimizers.orthogonalized import refuse_blockwise
from megatron_eopt.optimizers.parameters import local, names_of_last, scale_rows
from megatron_eopt.optimizers.state import StateTensor, check_placements
from megatron_eopt.optimizers.step import Batch, Step, scaled
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon, Transport
from megatron_eopt.optimizers.weight_step import write_back
from megatron_eopt.orthogonalize.forms import nonzero
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.scheduler import Program
from megatron_eopt.settings.groups import DECOUPLED, METHOD
from megatron_eopt.settings.of_class import with_settings
from megatron_eopt.settings.records import Setting
from megatron_eopt.settings.values import ABOVE_0, BELOW_1

# State keys, each with an entry for every row of a logical matrix: norms of rows and of directions, and Adam's moments.
NORM = "g"
V_NORM = "v_norm"
EXP_AVG = "m_g"
EXP_AVG_SQ = "v_g"
ROWS = (NORM, V_NORM, EXP_AVG, EXP_AVG_SQ)
STEPS = "steps"  # of a parameter, with a rate above 0
SMALLEST = 1e-12  # norm that a row of zeros starts with


@dataclass(frozen=True, eq=False)
class Rows:
    """State of the rows of a batch, of equal matrices one after another."""

    batch: Batch
    kinds: list[list[int]]  # equal matrices, among those of the chunk
    heights: list[int]  # rows of a matrix of each kind
    state: list[Tensor]  # key by key, of each matrix in the order of the kinds
    before: Tensor  # copies, (keys x rows)
    norms: Tensor  # of rows and of directions among these, 1 in place of zeros
    parameters: list[int]  # of each matrix, among those of the batch
    steps: Tensor  # of each parameter, with this one
    moved: Tensor  # whether it makes one

    @property
    def lengths(self) -> list[int]:
        """The rows of each matrix."""
        return [rows for kind, rows in zip(self.kinds, self.heights, strict=True) for _ in kind]

    def joined(self, of_matrices: Tensors) -> Tensor:
        """Vectors of the chunk's matrices, one after another for those of the batch."""
        return torch.cat([of_matrices[i] for i in chain(*self.kinds)])

    def stacks(self, x: Tensor) -> list[Tensor]:
        """What belongs to the matrices of each kind, (matrices x rows)."""
        shapes = [(len(kind), rows) for kind, rows in zip(self.kinds, self.heights, strict=True)]
        parts = x.split([count * rows for count, rows in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def repeated(self, x: Tensor) -> Tensor:
        """What is of each parameter, for each of its rows."""
        entries = x.unbind()
        return torch.cat([entries[n].expand(rows) for n, rows in zip(self.parameters, self.lengths, strict=True)])


def rows_of(step: Step, G: Tensors, W: Tensors) -> list[Rows]:
    """Read the state of the rows of each batch; the others are shards of the chunk's matrices."""
    found = []
    first = 0
    for batch, *of_batch in zip(step.batches, step.by_batch(G), step.by_batch(W), strict=True):
        order = list(foreach.alike(*of_batch))
        state = []
        for key in ROWS:
            of_matrices = list(chain(*batch.matrix_states(key)))
            state += [of_matrices[n] for n in chain(*order)]
        before = torch.cat(state).view(len(ROWS), -1)
        parameters = [n for n, count in enumerate(step.counts(batch)) for _ in range(count)]
        steps = torch.stack(batch.states(STEPS))
        accepted = torch.ones_like(steps).bool() if batch.accepted is None else batch.accepted
        moved = accepted & torch.as_tensor(batch.lr != 0)
        kinds = [[first + n for n in equal] for equal in order]
        heights = [len(W[kind[0]]) for kind in kinds]
        parameters = [parameters[n] for n in chain(*order)]
        norms = nonzero(before[:2])
        found.append(Rows(batch, kinds, heights, state, before, norms, parameters, steps + moved, moved))
        first += len(parameters)
    return found


def muown(step: Step) -> Program:
    """Muown's step of the parameters of a chunk: see :class:`Muown`."""
    batches, of_norms, of_directions = gradients_of(step)
    u = step.with_gradients(of_directions).momentum()
    O = yield from step.orthogonalize(u)
    if step.watch is not None:
        step.watch(step.indices, O, step.scales)
    move_rows(step, batches, of_norms, O)


def gradients_of(step: Step) -> tuple[list[Rows], list[Tensor], list[Tensor]]:
    """Rows and gradients of the norms ``g`` of each batch, and gradients of the directions ``v`` of each parameter."""
    found = step.split(step.gradients)
    W = step.split(list(step.weights))
    batches = rows_of(step, found, W)
    stacks = []
    for kind in chain(*(rows.kinds for rows in batches)):
        stacks.append((foreach.stacked(found, kind), foreach.stacked(W, kind)))
        put(found, kind, row_products(*stacks[-1]))
    W.clear()
    products = over_columns(step.engine, step.indices, found)
    of_norms = list[Tensor]()
    for rows in batches:
        g, v_norm = rows.norms
        gradient = rows.joined(products).to(g.dtype) / g  # <G, W> / g
        of_norms.append(gradient)
        a = rows.stacks(rows.before[0] / v_norm)
        b = rows.stacks(gradient / v_norm)
        for kind, of_g, of_w in zip(rows.kinds, a, b, strict=True):
            G, of_weights = stacks.pop(0)
            put(found, kind, combined(of_g, G, of_w, of_weights))  # (g G - grad_g W) / ||v||
    of_directions = step.merge(found)
    of_directions = [x.to(w.dtype).view(w.shape) for x, w in zip(of_directions, step.weights, strict=True)]
    return batches, of_norms, of_directions


def move_rows(step: Step, batches: Sequence[Rows], of_norms: Sequence[Tensor], O: Tensors) -> None:
    """``v <- v - lr s O``, Adam's step of ``g``, and ``W = g v / ||v||``."""
    weights = step.weights
    W = step.split(list(weights))
    squares = list(W)
    stacks = []
    for rows in batches:
        g, _ = rows.norms
        a = rows.stacks(rows.before[1] / g)
        b = torch.ones_like(g) * rows.batch.lr
        # shards of one shape may be of matrices of several, which have scales of their own
        scaled(list(b.split(rows.lengths)), [step.scales[i] for i in chain(*rows.kinds)])
        for kind, of_w, of_o in zip(rows.kinds, a, rows.stacks(b), strict=True):
            old = foreach.stacked(W, kind)
            v = combined(of_w, old, of_o, foreach.stacked(O, kind))
            put(squares, kind, v.square().sum(-1, dtype=torch.float64))
            stacks.append((old, v))
    squares = over_columns(step.engine, step.indices, squares)
    for rows, gradient in zip(batches, of_norms, strict=True):
        v_norm = rows.joined(squares).sqrt().to(gradient.dtype)
        moves = rows.repeated(rows.moved)
        g = step_of_rows(rows, gradient, v_norm, moves)
        shrinks = rows.stacks(g / nonzero(v_norm))
        for kind, shrink, moved in zip(rows.kinds, shrinks, rows.stacks(moves), strict=True):
            old, v = stacks.pop(0)
            new = v.mul_(shrink[..., None]).to(old.dtype)  # g v / ||v||
            stack = torch.where(moved[..., None], new, old)
            torch._foreach_copy_([W[i] for i in kind], list(stack.unbind()))
    write_back(step.engine, step.indices, weights, W)


def step_of_rows(rows: Rows, gradient: Tensor, v_norm: Tensor, moves: Tensor) -> Tensor:
    """Adam's step of ``g``, which is returned; writes the state of rows that move."""
    g, _, m, v = rows.before
    settings = rows.batch.settings
    lr = rows.batch.lr
    beta1 = settings["beta1"]
    beta2 = settings["beta2"]
    steps = rows.repeated(rows.steps)  # 0 of rows that do not move, and so far have not
    m = torch.lerp(m, gradient, 1 - beta1)
    v = torch.lerp(v, gradient.square(), 1 - beta2)
    first = (1 - beta1**steps).to(m.dtype)
    second = (1 - beta2**steps).to(m.dtype)
    g = g - lr * (m / first) / ((v / second).sqrt() + settings["eps"])
    if rows.batch.decays:
        g = g - lr * rows.batch.weight_decay * g
    after = torch.where(moves, torch.stack([g, v_norm, m, v]), rows.before)
    torch._foreach_copy_(rows.state, after.view(-1).split(rows.lengths * len(ROWS)))
    torch._foreach_copy_(rows.batch.states(STEPS), list(rows.steps.unbind()))
    return after[0]


def put(found: list[Tensor], kind: Sequence[int], stack: Tensor) -> None:
    """Put what is of equal matrices in the place of each."""
    for i, x in zip(kind, stack.unbind(), strict=True):
        found[i] = x


def combined(a: Tensor, X: Tensor, b: Tensor, Y: Tensor) -> Tensor:
    """``a X - b Y`` with a factor for each row."""
    wide = torch.promote_types(X.dtype, torch.float32)
    return (a.to(wide)[..., None] * X).addcmul_(b.to(wide)[..., None], Y, value=-1)


def row_products(X: Tensor, Y: Tensor) -> Tensor:
    """Inner products of rows, in fp64."""
    return (X.to(torch.promote_types(X.dtype, torch.float32)) * Y).sum(-1, dtype=torch.float64)


def over_columns(engine: Engine, indices: Sequence[int], sums: list[Tensor]) -> list[Tensor]:
    """Sums of whole rows where shards have a part of them: one all-reduce."""
    cut = {}
    for i, W in enumerate(engine.flat(indices)):
        if any(shard.shape[1] != W.shape[1] for shard in W.rectangles):
            cut[i] = W
    whole = engine.side_sums([sums[i][:, None] for i in cut], list(cut.values()), 0)
    for (i, W), x in zip(cut.items(), whole, strict=True):
        shard = engine.shard(W)
        sums[i] = x[shard.top : shard.bottom, 0]
    return sums


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

    copied = 12  # stacks of gradients or directions, and of weights; weights of fused matrices apart

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
        tensors = super().state_tensors(parameter)
        for i, end in enumerate(self.key_ends(parameter)):
            for key in ROWS:
                tensors.append(StateTensor(key + end, ("rows",), i, wide, non_negative=key == EXP_AVG_SQ))
        return [*tensors, StateTensor(STEPS, (), dtype=torch.float64, non_negative=True)]

    def predicted_rms(self, rows: int, cols: int, group: Mapping[str, Any] | None = None) -> float | None:
        """None: how far rows turn depends on their norms."""
        return None

    def _take(self, accepted: Tensor) -> None:
        parameters = self._parameters()
        waiting = []
        for i, p in enumerate(parameters):
            if (p.grad is not None or self._waited_for(i)) and not self._has_begun(p, STEPS):
                waiting.append(p)
        if waiting:
            self._measure(waiting, dict(zip(parameters, accepted.unbind(), strict=True)))
        super()._take(accepted)

    def _measure(self, waiting: Sequence[Tensor], accepted: Mapping[Tensor, Tensor]) -> None:
        """Norms of rows of parameters without a step; the host waits."""
        counts = torch.stack([self._states.of(p, STEPS)[STEPS] for p in waiting]).tolist()
        for p in compress(waiting, counts):
            self._note_begun(p, STEPS)
        new = [p for p in waiting if not self._has_begun(p, STEPS)]
        indices = self._indices_of(new)
        W = self.engine.split(indices, [local(p.detach()) for p in new])
        squares = list(W)
        for kind in foreach.alike(W):
            x = foreach.stacked(W, kind)
            put(squares, kind, row_products(x, x))
        remaining = iter(over_columns(self.engine, indices, squares))
        for p in new:
            state = self._states.of(p)
            for end in self.key_ends(p):
                g = local(state[NORM + end])
                g.copy_(torch.where(accepted[p], next(remaining).sqrt().clamp(min=SMALLEST).to(g.dtype), g))
                local(state[V_NORM + end]).copy_(g)

    def scale_rows(self, parameters: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Also scale the norms of rows."""
        self.prepare()
        super().scale_rows(parameters, factors)
        for parameter, of_matrices in self._by_matrix(parameters, factors):
            state = self._states.of(parameter)
            for end, of_rows in zip(self.key_ends(parameter), of_matrices, strict=True):
                scale_rows(local(state[NORM + end]), of_rows)

    def program(self, step: Step) -> Program:
        """One chunk's step."""
        return muown(step)
