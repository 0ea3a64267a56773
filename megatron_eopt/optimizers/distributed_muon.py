"""Keller Jordan's distributed Muon."""

import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.kernels.precision import MatmulPrecision, product_dtype
from megatron_eopt.matrices import WHOLE, Split
from megatron_eopt.orthogonalize.coefficients import get_coefficients
from megatron_eopt.orthogonalize.newton_schulz import newton_schulz
from megatron_eopt.orthogonalize.scale import muon_scale_factor, predicted_update_rms
from megatron_eopt.parallel.attributes import is_sharded
from megatron_eopt.parallel.collectives import all_gather, broadcast
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout, on_one_rank, shared_out
from megatron_eopt.settings.records import Setting
from megatron_eopt.step import foreach
from megatron_eopt.step.loaded_state import check_finite
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.parameters import DescribedMatrix, names_of_last
from megatron_eopt.step.stacked_optimizer import Program, StackedOptimizer
from megatron_eopt.step.stacks import WEIGHT, Chunk, MatrixPlan, Member, Stack
from megatron_eopt.step.state import MOMENTUM_BUFFER, StateTensor

logger = logging.getLogger(__name__)

_COEFFICIENTS = "simple"
_SCALE = "shape_scaling"


class DistributedMuon(StackedOptimizer):
    """Muon under data parallelism, each momentum on one rank [1].

    All ranks hold the same parameters and gradients, as under DDP. Each matrix ``W`` (m x n) with gradient ``g`` has a
    compute rank, which does:

    1. ``M += (1 - momentum) (g - M)``;
    2. ``O``, the orthogonal factor of ``(1 - momentum) g + momentum M`` (of ``M`` without ``nesterov``), by
       Newton-Schulz iteration with the coefficients 3.4445, -4.7750, 2.0315.

    It sends ``O`` to the others, and all ranks step: ``W <- (1 - lr weight_decay) W - lr max(1, m/n)^0.5 O``. A rank
    computes one matrix after another; its factor travels while the next is computed. The update of a matrix has the
    same bits on any number of ranks.

    A rank keeps its share of the momenta, so ``state_dict()`` on one rank is not the whole state: all ranks call
    :meth:`consolidate_state_dict` before, as with torch's ``ZeroRedundancyOptimizer``, or all call ``state_dict()``
    with ``collective_state_dict=True``. The result loads on any number of ranks.

    A parameter of more than two dimensions is read as a matrix: the first one times the rest. Gradients are not written
    to. A step with a gradient that is not finite is skipped: see
    :mod:`~megatron_eopt.step.nonfinite`.
    :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon` with a ``data_parallel_group``
    has more coefficients and larger batches, with all momenta on all ranks.

    Args:
        params: matrices, or groups of them; the same in the same order on every rank. A group may have its own ``lr``,
            ``momentum``, ``nesterov``, ``ns_steps`` and ``weight_decay``.
        lr: learning rate, at least 0.
        momentum: in [0, 1).
        nesterov: whether to look ahead.
        ns_steps: Newton-Schulz steps, 1 to 100.
        weight_decay: decoupled, at least 0.
        fp32_matmul_prec: ``medium`` (or ``low``) iterates and sends in bf16; ``high`` iterates in TF32 and ``highest``
            in fp32, and both send in the dtype of the parameter.
        process_group: the data-parallel ranks; None for all ranks, or one process.
        symmetric_products: the kernel of symmetric products, as in
            :class:`~megatron_eopt.settings.execution.Execution`.
        collective_state_dict: whether all ranks call :meth:`state_dict` together, which then collects the momenta.
            False if all ranks call :meth:`consolidate_state_dict`; None is the same, with a warning where there are
            several ranks.

    Attributes:
        compute_ranks: parameter -> the rank of the group that computes its update and keeps its momentum.

    Raises:
        TypeError: for a setting of another type.
        ValueError: for a setting out of its range, and for a parameter of fewer than two dimensions or that is a shard.

    [1] https://kellerjordan.github.io/posts/muon/, as in the speedruns of modded-nanogpt.
    """

    own_settings = (
        Setting("ns_steps"),
        Setting("process_group", whole=True),
        Setting("collective_state_dict", whole=True),
    )
    fp32_matmul_prec: MatmulPrecision
    process_group: ProcessGroup | None
    collective_state_dict: bool | None

    # On the class, because torch leaves the attributes of an optimizer out of its pickles and copies.
    _consolidated: dict[str, Any] | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        *,
        weight_decay: float = 0.0,
        fp32_matmul_prec: MatmulPrecision = "medium",
        process_group: ProcessGroup | None = None,
        collective_state_dict: bool | None = None,
        symmetric_products: str | None = None,
    ) -> None:
        if process_group is None and dist.is_initialized():
            process_group = dist.group.WORLD
        super().__init__(params, locals())
        self.rank = 0
        self.ranks = 1
        if process_group is not None:
            self.rank = process_group.rank()
            self.ranks = process_group.size()
        if collective_state_dict is None and self.ranks > 1 and self.rank == 0:
            logger.warning(
                f"{type(self).__name__}: each of {self.ranks} ranks keeps the momenta of its own matrices, so "
                "state_dict() on one rank alone will be an error. Before each save, outside of 'if rank == 0', write "
                "optimizer.consolidate_state_dict(), and pass collective_state_dict=False to drop this warning; or "
                "pass True, and call state_dict() on all ranks"
            )

    # Matrices, and the ranks that compute them.

    def layout(self, parameter: Tensor) -> Layout:
        """The layout of a parameter, read as a matrix."""
        layout = on_one_rank((parameter.shape[0], prod(parameter.shape[1:])))
        return layout if self.process_group is None else shared_out(layout, self.process_group)

    def split_of(self, parameter: Tensor) -> Split:
        """A parameter is one matrix, whatever is declared of it."""
        return WHOLE

    @property
    def compute_ranks(self) -> dict[Tensor, int]:
        """Parameter -> the rank of the group that computes its update and keeps its momentum."""
        return {p: self._rank_of(p) for p in self._parameters() if p.numel()}

    def _rank_of(self, parameter: Tensor) -> int:
        [plan] = self._planned(parameter)
        return plan.compute_rank or 0  # None of one rank

    def _computes(self, parameter: Tensor) -> bool:
        """Whether this rank computes a parameter's update."""
        return parameter.numel() > 0 and self._rank_of(parameter) == self.rank

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum on the compute rank; nothing elsewhere."""
        return [StateTensor(MOMENTUM_BUFFER)] if self._computes(parameter) else []

    def _plan(self, end: str, layout: Layout, longest: int) -> MatrixPlan:
        return MatrixPlan(end, layout, (False, False), cost=prod(layout.shape))

    def _describe(self, name: str, plan: MatrixPlan, parameter: Tensor) -> DescribedMatrix:
        shape = plan.layout.shape
        scale = muon_scale_factor(*shape, _SCALE)
        rms = predicted_update_rms(*shape, _SCALE)
        return replace(super()._describe(name, plan, parameter), scale=scale, rms=rms)

    def plan(self) -> str:
        """How ranks share the work."""
        return "Each rank computes factors of its matrices, and sends them to all others, one matrix at a time."

    def _check_together(self, group: Mapping[str, Any]) -> None:
        get_coefficients(_COEFFICIENTS, group["ns_steps"])

    def _check_group(self, group: dict[str, Any]) -> None:
        called = type(self).__name__
        for parameter, name in zip(group["params"], names_of_last(self.param_groups), strict=True):
            if parameter.ndim < 2:
                raise ValueError(f"{called} is for matrices: give {name} to another optimizer (AdamW, say)")
            if isinstance(parameter, DTensor) or is_sharded(parameter):
                raise ValueError(
                    f"{called} is for parameters that every rank has whole, and {name} is a shard: take "
                    "TensorParallelMuon"
                )

    # The state, of which each rank has a part.

    @torch.no_grad()
    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Collect all momenta in host memory, on all ranks together.

        Args:
            to: rank of the group that collects them; None for every rank.
        """
        self.init_state()
        if self.process_group is None or self.ranks == 1:
            return  # it has the whole state
        collected = super().state_dict()
        kept = to in (None, self.rank)
        compute_ranks = self.compute_ranks
        for index, parameter in enumerate(self._parameters()):
            if parameter not in compute_ranks:
                continue
            own = self.state[parameter].get(MOMENTUM_BUFFER)
            sent = torch.empty_like(parameter) if own is None else own
            momentum = broadcast(sent, compute_ranks[parameter], self.process_group).wait()
            if kept:
                of_parameter = collected["state"].get(index, {})
                collected["state"][index] = {**of_parameter, MOMENTUM_BUFFER: momentum.cpu()}
        self._consolidated = collected if kept else None

    def state_dict(self) -> dict[str, Any]:
        """The whole state, which any number of ranks can load.

        Raises:
            RuntimeError: with several ranks and without ``collective_state_dict``, if :meth:`consolidate_state_dict`
                was not called after the last step, or collected the state on another rank.
        """
        if self.ranks == 1:
            return super().state_dict()
        if self.collective_state_dict:
            self.consolidate_state_dict(to=None)
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self.rank} keeps the momenta of its own matrices alone: before state_dict(), call "
                "consolidate_state_dict() on all ranks; it collects the whole state on rank 0, or with to=None on "
                "each. With collective_state_dict=True, state_dict() collects it where all ranks call it"
            )
        # torch's checkpoints change what they get
        groups = [dict(group) for group in self._consolidated["param_groups"]]
        return {**self._consolidated, "state": dict(self._consolidated["state"]), "param_groups": groups}

    def _to_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Momenta that this rank computes with, of a whole state."""
        state = state_dict["state"]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        kept = {}
        missing = []
        for p, index, name in zip(self._parameters(), indices, self._names(), strict=False):
            of_parameter = dict(state.get(index, {}))
            momentum = of_parameter.get(MOMENTUM_BUFFER)
            if isinstance(momentum, Tensor):  # also of other ranks' matrices, so that all ranks refuse a state together
                check_finite(type(self).__name__, [(f"{MOMENTUM_BUFFER!r} of {name}", momentum, p.dtype)])
            if not self._computes(p):
                of_parameter.pop(MOMENTUM_BUFFER, None)  # what users keep beside it stays
            elif not of_parameter:
                missing.append(name)
            if index in state:
                kept[index] = of_parameter
        if missing and any(state.values()):
            raise ValueError(
                f"the state has no momentum of {', '.join(missing)}, which rank {self.rank} computes: it is a part of "
                "another rank; save what state_dict() returns after consolidate_state_dict() on all ranks"
            )
        return {**state_dict, "state": kept}

    def _loaded(self) -> None:
        self._consolidated = None

    # The step.

    def prepare(self) -> Engine:
        """Create the state, and agree with the other ranks; all call it together."""
        self.init_state()
        return super().prepare()

    def _in_chunks(self, members: Sequence[Member]) -> list[list[list[Member]]]:
        """One matrix of each rank at a time, the largest first."""
        of_ranks: dict[int, list[Member]] = {}
        for member in sorted(members, key=lambda member: -member.parameter.numel()):
            if member.parameter.numel():
                of_ranks.setdefault(self._rank_of(member.parameter), []).append(member)
        return [[[member for member in some if member] for some in zip_longest(*of_ranks.values())]]

    def _take(self, ok: Flag) -> None:
        self._consolidated = None
        super()._take(ok)

    def _worked(self, chunk: Chunk[Stack]) -> Program:
        """One chunk's step: see :class:`DistributedMuon`."""
        stacks = chunk.stacks
        parameters = [member.parameter for stack in stacks for member in stack.members]
        factors = yield from self._exchanged(parameters, stacks[0].ok)
        for stack in stacks:
            # W <- (1 - lr weight_decay) W - lr max(1, m/n)^0.5 O
            weights = stack.shards(WEIGHT)
            updates = []
            for W, member in zip(weights, stack.members, strict=True):
                factor = factors[self._rank_of(member.parameter)]
                updates.append(factor.to(W.dtype).view(W.shape))
            foreach.scale(weights, 1 - stack.decay, stack.ok)
            scale = muon_scale_factor(*stack.matrix.shape, _SCALE)
            foreach.subtract(weights, updates, stack.group["lr"] * scale, stack.ok)
        chunk.end()

    def _exchanged(self, parameters: Sequence[Tensor], ok: Flag) -> Generator[Any, None, Mapping[int, Tensor]]:
        """Compute this rank's factor, and wait for those of all ranks; yields while they travel."""
        own = [self._factor(p, ok).flatten() for p in parameters if self._computes(p)]
        group = self.process_group
        if group is None or self.ranks == 1:
            return dict(enumerate(own))
        kinds = {(p.numel(), p.dtype) for p in parameters}
        if len(parameters) == self.ranks and len(kinds) == 1:
            gathered = all_gather(own[0], group)
            yield
            return dict(enumerate(gathered.wait()))
        sent = {}
        for p in parameters:
            rank = self._rank_of(p)
            if rank == self.rank:
                factor = own[0]
            else:
                factor = p.new_empty(p.numel(), dtype=self._dtype_of(p))
            sent[rank] = broadcast(factor, rank, group)
        yield
        return {rank: one.wait() for rank, one in sent.items()}

    def _factor(self, parameter: Tensor, ok: Flag) -> Tensor:
        """``M <- M + (1 - momentum) (g - M)``, and its factor ``O``."""
        group = self.group_of(parameter)
        momentum = self.state[parameter][MOMENTUM_BUFFER]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        rates = group["momentum"], group["nesterov"]
        [update] = foreach.average([momentum], [gradient.to(momentum.dtype)], *rates, ok)
        update = update.flatten(1)
        factor = newton_schulz(
            update,
            group["ns_steps"],
            _COEFFICIENTS,
            fp32_matmul_prec=self.fp32_matmul_prec,
            propagate_nan=True,
            products=self.execution.symmetric_products,
        )
        return factor.to(self._dtype_of(parameter))

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        """In which a parameter's factors are computed and sent."""
        return product_dtype(parameter.dtype, self.fp32_matmul_prec)
