"""Keller Jordan's distributed Muon."""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import batched, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.base import KERNEL, BaseOptimizer
from megatron_eopt.optimizers.loaded_state import check_finite, check_writer
from megatron_eopt.optimizers.parameters import names_of_last
from megatron_eopt.optimizers.state import MOMENTUM_BUFFER, StateTensor
from megatron_eopt.orthogonalize.coefficients import get_coefficients
from megatron_eopt.orthogonalize.kernels import made
from megatron_eopt.orthogonalize.newton_schulz import newton_schulz
from megatron_eopt.orthogonalize.precision import MatmulPrecision, gram_dtype, product_dtype
from megatron_eopt.orthogonalize.products import Fp32Precision
from megatron_eopt.orthogonalize.scale import muon_scale_factor
from megatron_eopt.parallel.agreement import KernelProducts, agreed_kernel, check_replicas, check_same, times_kernels
from megatron_eopt.parallel.attributes import is_sharded
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.collectives import all_gather, broadcast
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.records import Bucket, Matrix, Plan
from megatron_eopt.parallel.rectangles import whole
from megatron_eopt.parallel.scheduler import rounds
from megatron_eopt.settings.records import Setting

logger = logging.getLogger(__name__)

_COEFFICIENTS = "simple"
_LABEL = "dp"


class DistributedMuon(BaseOptimizer):
    """Muon under data parallelism, each momentum on one rank [1].

    All ranks hold the same parameters and gradients, as under DDP. Each matrix ``W`` (m x n) with gradient ``g`` has a
    compute rank, which does:

    1. ``M += (1 - momentum) (g - M)``;
    2. ``O``, the orthogonal factor of ``(1 - momentum) g + momentum M`` (of ``M`` without ``nesterov``), by
       Newton-Schulz iteration with the coefficients 3.4445, -4.7750, 2.0315.

    It sends ``O`` to the others, and all ranks step: ``W <- (1 - lr weight_decay) W - lr max(1, m/n)^0.5 O``. Matrices
    of equal shape go in rounds, one for each rank; a round's factors travel while the next is computed. The update of a
    matrix has the same bits on any number of ranks.

    A rank keeps its share of the momenta, so ``state_dict()`` on one rank is not the whole state: all ranks call
    :meth:`consolidate_state_dict` before, as with torch's ``ZeroRedundancyOptimizer``, or all call ``state_dict()``
    with ``collective_state_dict=True``. The result loads on any number of ranks.

    A parameter of more than two dimensions is read as a matrix: the first one times the rest. Gradients are not written
    to. A parameter stays as it is where its gradient is missing or not finite: see
    :mod:`~megatron_eopt.optimizers.nonfinite`.
    :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon` with its ``data_parallel_group`` has more
    coefficients and larger batches, with all momenta on all ranks.

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
            :class:`~megatron_eopt.optimizers.tensor_parallel_muon.TensorParallelMuon`.
        collective_state_dict: whether all ranks call :meth:`state_dict` together, which then collects the momenta.
            False if all ranks call :meth:`consolidate_state_dict`; None is the same, with a warning where there are
            several ranks.

    Attributes:
        compute_ranks: parameter -> the rank of the group that computes its update and keeps its momentum.

    Raises:
        TypeError: if ``nesterov`` is no bool.
        ValueError: for a setting out of its range, and for a parameter of fewer than two dimensions or that is a shard.

    [1] https://kellerjordan.github.io/posts/muon/, as in the speedruns of modded-nanogpt.
    """

    own_settings = (
        Setting("ns_steps"),
        Setting("process_group", whole=True),
        Setting("collective_state_dict", whole=True),
    )
    carried_settings = frozenset({KERNEL})
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
        process_group = process_group or (dist.group.WORLD if dist.is_initialized() else None)
        self.rank, self.ranks = (0, 1) if process_group is None else (process_group.rank(), process_group.size())
        self.compute_ranks: dict[Tensor, int] = {}
        self.rounds: list[list[Bucket]] = []
        self.loads = [0] * self.ranks  # bytes that each rank has been dealt
        super().__init__(params, locals())
        if collective_state_dict is None and self.ranks > 1 and self.rank == 0:
            logger.warning(
                f"{type(self).__name__}: each of {self.ranks} ranks keeps the momenta of its own matrices, so "
                "state_dict() on one rank alone will be an error. Before each save, outside of 'if rank == 0', write "
                "optimizer.consolidate_state_dict(), and pass collective_state_dict=False to drop this warning; or "
                "pass True, and call state_dict() on all ranks"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, dealt to the least loaded ranks."""
        super().add_param_group(param_group)
        parameters = self._parameters()
        added = self.param_groups[-1]["params"]
        dealt = deal([(p.shape, p.dtype) for p in added], self.loads, len(parameters) - len(added))
        self.rounds.append(dealt)
        for bucket in dealt:
            for i, rank in zip(bucket.matrices, bucket.compute_ranks, strict=True):
                self.compute_ranks[parameters[i]] = rank

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum on the compute rank; nothing elsewhere."""
        return [StateTensor(MOMENTUM_BUFFER)] if self.compute_ranks.get(parameter) == self.rank else []

    @torch.no_grad()
    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Collect all momenta in host memory, on all ranks together.

        Args:
            to: rank of the group that collects them; None for every rank.
        """
        self.init_state()
        collected = super().state_dict()
        kept = to in (None, self.rank)
        parameters = self._parameters()
        for bucket in chain(*self.rounds):
            own = self._own(bucket, parameters)
            like = parameters[bucket.matrices[0]]
            mine = torch.empty_like(like) if own is None else self.state[own][MOMENTUM_BUFFER]
            for index, momentum in zip(bucket.matrices, self._exchange(bucket, mine)(), strict=True):
                if kept:
                    of_parameter = dict(collected["state"].get(index, {}))
                    of_parameter[MOMENTUM_BUFFER] = momentum.cpu()
                    collected["state"][index] = of_parameter
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; this rank keeps its own momenta."""
        check_writer(type(self), state_dict)
        state = state_dict["state"]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        kept = {}
        missing = []
        for p, index, name in zip(self._parameters(), indices, self._names(), strict=False):
            of_parameter = dict(state.get(index, {}))
            momentum = of_parameter.get(MOMENTUM_BUFFER)
            if isinstance(momentum, Tensor):  # also of other ranks' matrices, so that all ranks refuse a state together
                check_finite(type(self).__name__, [(f"{MOMENTUM_BUFFER!r} of {name}", momentum, p.dtype)])
            if self.compute_ranks.get(p) != self.rank:
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
        super().load_state_dict({**state_dict, "state": kept})
        self._consolidated = None

    def _check_together(self, group: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        get_coefficients(_COEFFICIENTS, settings["ns_steps"])

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

    @property
    def _groups(self) -> dict[str, ProcessGroup]:
        return {} if self.process_group is None else {_LABEL: self.process_group}

    def _described(self, name: str, parameter: Tensor) -> ParamSpec:
        return ParamSpec(name, parameter.dtype, groups=self._groups)

    def prepare(self) -> Engine:
        """Compare parameters and rounds between ranks, and choose the kernel; all call it together."""
        parameters = self._parameters()
        if self._session.engine is None and parameters:
            matrices = []
            for name, p in zip(self._names(), parameters, strict=True):
                shape = (len(p), p[:1].numel())
                matrices.append(Matrix(name, shape, (whole(shape),) * self.ranks, _LABEL, p.itemsize))
            check_same(Plan(tuple(matrices), tuple(chain(*self.rounds))), self._groups)
            given = self.symmetric_products, self.param_groups[0].get(KERNEL)
            if times_kernels(*given, parameters[0].device) and self.ranks > 1:
                weights = [(name, "", p.detach()) for name, p in zip(self._names(), parameters, strict=True)]
                check_replicas(None, {}, weights, self.process_group)
            kernel = agreed_kernel(self._kernel_products(parameters), *given, self._groups)
            for group in self.param_groups:
                group[KERNEL] = kernel
        self.init_state()
        return super().prepare()

    @property
    def _fp32(self) -> Fp32Precision:
        return "tf32" if self.fp32_matmul_prec == "high" else "ieee"

    def _kernel_products(self, parameters: Sequence[Tensor]) -> KernelProducts:
        device = parameters[0].device
        sizes = set()
        dtypes = set[torch.dtype]()
        for p in parameters:
            if p.numel():
                sides = len(p), p[0].numel()
                sizes.add((min(sides), max(sides)))
            dtype = product_dtype(p.dtype, self.fp32_matmul_prec)
            dtypes.update(x for x in (dtype, gram_dtype(dtype, device)) if x)
        return sorted(sizes), sorted(dtypes, key=str), device, self._fp32

    def _take(self, accepted: Tensor) -> None:
        self._session.changing = True
        self._consolidated = None
        parameters = self._parameters()
        flags = accepted.unbind()
        pairs = zip(self.param_groups, self.rounds, strict=True)
        waiting = (self._round(bucket, group, parameters, flags) for group, dealt in pairs for bucket in dealt)
        for _ in rounds(waiting):
            pass

    def _round(
        self, bucket: Bucket, group: dict[str, Any], parameters: Sequence[Tensor], flags: Sequence[Tensor]
    ) -> Generator[None, None, None]:
        matrices = [parameters[i] for i in bucket.matrices]
        first = matrices[0]
        if self.ranks == 1 and first.grad is None:
            return  # with others, who wait for it, the round is made, and its result is left out
        accepted = torch.stack([flags[i] for i in bucket.matrices])
        own = self._own(bucket, parameters)
        if own is None:
            factor = first.new_empty(first.flatten(1).shape, dtype=product_dtype(first.dtype, self.fp32_matmul_prec))
        else:
            # M <- M + (1 - momentum) (g - M), and its factor O, of the matrix that this rank computes
            index = bucket.compute_ranks.index(self.rank)
            factor = self._factor(own, accepted[index : index + 1], group)
        received = self._exchange(bucket, factor)
        yield
        updates = [factor.to(W.dtype).view_as(W) for W, factor in zip(matrices, received(), strict=True)]
        # W <- (1 - lr weight_decay) W - lr max(1, m/n)^0.5 O
        foreach.scale(matrices, 1 - group["lr"] * group["weight_decay"], accepted)
        scale = muon_scale_factor(len(first), first[:1].numel(), "shape_scaling")
        foreach.subtract(matrices, updates, group["lr"] * scale, accepted)

    def _factor(self, parameter: Tensor, accepted: Tensor, group: dict[str, Any]) -> Tensor:
        momentum = self._states.of(parameter)[MOMENTUM_BUFFER]
        gradient = momentum if parameter.grad is None else parameter.grad.to(momentum.dtype)
        [update] = foreach.average([momentum], [gradient], group["momentum"], group["nesterov"], accepted)
        update = update.flatten(1)
        factor = newton_schulz(
            update,
            group["ns_steps"],
            _COEFFICIENTS,
            fp32_matmul_prec=self.fp32_matmul_prec,
            propagate_nan=True,
            products=made(group[KERNEL], min(update.shape), self._fp32),
        )
        return factor.to(product_dtype(parameter.dtype, self.fp32_matmul_prec))

    def _exchange(self, bucket: Bucket, mine: Tensor) -> Callable[[], list[Tensor]]:
        """Start to exchange a round's tensors; calling the result waits."""
        group = self.process_group
        if group is None or self.ranks == 1:
            return lambda: [mine]
        if len(bucket.compute_ranks) == self.ranks:
            gathered = all_gather(mine, group)
            return lambda: list(gathered.wait())
        sent = []
        for rank in bucket.compute_ranks:
            sent.append(broadcast(mine if rank == self.rank else torch.empty_like(mine), rank, group))
        return lambda: [one.wait() for one in sent]

    def _own(self, bucket: Bucket, parameters: Sequence[Tensor]) -> Tensor | None:
        """The parameter of a round that this rank computes."""
        for i, rank in zip(bucket.matrices, bucket.compute_ranks, strict=True):
            if rank == self.rank:
                return parameters[i]
        return None


def deal(shapes: Sequence[tuple[torch.Size, torch.dtype]], loads: list[int], first: int = 0) -> list[Bucket]:
    """Deal equal matrices to ranks, in rounds of one each.

    The least loaded ranks get a short round, so loads of two ranks never differ by more than the largest matrix. Large
    matrices come first; an empty one is in no round. ``loads``, in bytes per rank, is updated; ``first`` is the index
    of the first parameter.
    """
    alike: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for index, shape_and_dtype in enumerate(shapes, first):
        alike.setdefault(shape_and_dtype, []).append(index)
    dealt = []
    for (shape, dtype), indices in sorted(alike.items(), key=lambda item: item[0][0].numel(), reverse=True):
        if not shape.numel():
            continue
        for some in batched(indices, len(loads)):
            least = sorted(range(len(loads)), key=loads.__getitem__)[: len(some)]
            for rank in least:
                loads[rank] += shape.numel() * dtype.itemsize
            dealt.append(Bucket(some, "share", tuple(sorted(least))))
    return dealt
