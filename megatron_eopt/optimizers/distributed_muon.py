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
from megatron_eopt.optimizers.group_settings import check_rates
from megatron_eopt.optimizers.parameters import names_of_last, parameter_names
from megatron_eopt.optimizers.state import StateTensor, check_finite, check_writer
from megatron_eopt.optimizers.traits import Traits
from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.orthogonalize.coefficients import get_coefficients
from megatron_eopt.orthogonalize.kernels import KERNELS, made
from megatron_eopt.orthogonalize.newton_schulz import newton_schulz
from megatron_eopt.orthogonalize.precision import MatmulPrecision, gram_dtype, product_dtype, validate_matmul_precision
from megatron_eopt.orthogonalize.scale import muon_scale_factor
from megatron_eopt.parallel.agreement import KernelProducts, agreed_kernel, check_replicas, check_same, times_kernels
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.collectives import all_gather, broadcast
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import is_sharded
from megatron_eopt.parallel.records import Bucket, Matrix, Plan, Shape, whole
from megatron_eopt.parallel.scheduler import rounds

logger = logging.getLogger(__name__)

MOMENTUM_BUFFER = "momentum_buffer"

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

    traits = Traits(carried_settings=frozenset({KERNEL}))

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
        validate_matmul_precision(fp32_matmul_prec)
        check_choice("symmetric_products", symmetric_products or "torch", KERNELS)
        self.fp32_matmul_prec = fp32_matmul_prec
        self.symmetric_products = symmetric_products
        group = self.process_group = process_group or (dist.group.WORLD if dist.is_initialized() else None)
        self.rank, self.ranks = (0, 1) if group is None else (group.rank(), group.size())
        self.compute_ranks: dict[Tensor, int] = {}
        self.rounds: list[list[Bucket]] = []
        self.loads = [0] * self.ranks  # bytes that each rank has been dealt
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        self.collective_state_dict = collective_state_dict
        super().__init__(params, defaults | {"weight_decay": weight_decay})
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
        self.rounds.append(deal([(p.shape, p.dtype) for p in added], self.loads, len(parameters) - len(added)))
        for bucket in self.rounds[-1]:
            self.compute_ranks |= zip([parameters[i] for i in bucket.matrices], bucket.compute_ranks, strict=True)

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
            of_round = [parameters[i] for i in bucket.matrices]
            mine = self._own(bucket)
            momentum = torch.empty_like(of_round[0]) if mine is None else self.state[of_round[mine]][MOMENTUM_BUFFER]
            momenta = self._exchange(bucket, momentum)()
            if kept:
                for index, momentum in zip(bucket.matrices, momenta, strict=True):
                    further = collected["state"].get(index, {})
                    collected["state"][index] = {**further, MOMENTUM_BUFFER: momentum.cpu()}
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
        saved_as = [index for group in state_dict["param_groups"] for index in group["params"]]
        named = list(zip(self._parameters(), saved_as, parameter_names(self.param_groups), strict=False))
        mine = [(index, name) for p, index, name in named if self.compute_ranks.get(p) == self.rank]
        missing = [name for index, name in mine if not state.get(index)]
        if any(state.values()) and missing:
            raise ValueError(
                f"the state has no momentum of {', '.join(missing)}, which rank {self.rank} computes: it is a part of "
                "another rank; save what state_dict() returns after consolidate_state_dict() on all ranks"
            )
        # also of other ranks' matrices, so that all ranks refuse a state together
        for p, index, name in named:
            momentum = state.get(index, {}).get(MOMENTUM_BUFFER)
            if isinstance(momentum, Tensor):
                check_finite(type(self).__name__, [(f"{MOMENTUM_BUFFER!r} of {name}", momentum, p.dtype)])
        # of matrices of other ranks what users keep beside the momentum
        others = {i: {key: x for key, x in of_p.items() if key != MOMENTUM_BUFFER} for i, of_p in state.items()}
        kept = {index: state[index] for index, _ in mine if index in state}
        super().load_state_dict({**state_dict, "state": others | kept})
        self._consolidated = None

    def _check_ranges(self, group: Mapping[str, Any]) -> None:
        check_rates(type(self).__name__, group, "momentum")
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

    def _described(self, name: str, parameter: Tensor) -> ParamSpec:
        groups = {} if self.process_group is None else {_LABEL: self.process_group}
        return ParamSpec(name, parameter.dtype, groups=groups)

    def prepare(self) -> Engine:
        """Compare parameters and rounds between ranks, and choose the kernel; all call it together."""
        parameters = self._parameters()
        if self._session.engine is None and parameters:
            matrices = []
            groups = {} if self.process_group is None else {_LABEL: self.process_group}
            for name, p in zip(self._names(), parameters, strict=True):
                shape = (len(p), p[:1].numel())
                matrices.append(Matrix(name, shape, (whole(shape),) * self.ranks, _LABEL, p.itemsize))
            check_same(Plan(tuple(matrices), tuple(chain(*self.rounds))), groups)
            products = self._kernel_products([each.shape for each in matrices])
            given = self.symmetric_products, self.param_groups[0].get(KERNEL)
            if times_kernels(*given, parameters[0].device) and self.ranks > 1:
                weights = [(name, "", p.detach()) for name, p in zip(self._names(), parameters, strict=True)]
                check_replicas(None, {}, weights, self.process_group)
            kernel = agreed_kernel(products, *given, groups)
            for group in self.param_groups:
                group[KERNEL] = kernel
        self.init_state()
        return super().prepare()

    def _kernel_products(self, shapes: Sequence[Shape]) -> KernelProducts:
        parameters = self._parameters()
        precision = self.fp32_matmul_prec
        device = parameters[0].device
        factors = {product_dtype(p.dtype, precision) for p in parameters}
        dtypes = {x for dtype in factors for x in (dtype, gram_dtype(dtype, device)) if x}
        sizes = sorted({(min(shape), max(shape)) for shape in shapes if 0 not in shape})
        return sizes, sorted(dtypes, key=str), device, "tf32" if precision == "high" else "ieee"

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
        accepted = torch.stack([flags[i] for i in bucket.matrices])
        if self.ranks == 1 and matrices[0].grad is None:
            return  # with others, who wait for it, the round is made, and its result is left out
        # M <- M + (1 - momentum) (g - M), and its factor O, of the matrix that this rank computes
        received = self._exchange(bucket, self._factor(bucket, matrices, accepted, group))
        yield
        updates = [factor.to(W.dtype).view_as(W) for W, factor in zip(matrices, received(), strict=True)]
        # W <- (1 - lr weight_decay) W - lr max(1, m/n)^0.5 O
        foreach.scale(matrices, 1 - group["lr"] * group["weight_decay"], accepted)
        scale = muon_scale_factor(len(matrices[0]), matrices[0][:1].numel(), "shape_scaling")
        foreach.subtract(matrices, updates, group["lr"] * scale, accepted)

    def _factor(self, bucket: Bucket, parameters: Sequence[Tensor], accepted: Tensor, group: dict[str, Any]) -> Tensor:
        dtype = product_dtype(parameters[0].dtype, self.fp32_matmul_prec)
        index = self._own(bucket)
        if index is None:
            return parameters[0].new_empty(parameters[0].flatten(1).shape, dtype=dtype)
        parameter = parameters[index]
        momentum = self._states.of(parameter)[MOMENTUM_BUFFER]
        gradient = momentum if parameter.grad is None else parameter.grad.to(momentum.dtype)
        flag = accepted[index : index + 1]
        steps = group["ns_steps"]
        [update] = foreach.average([momentum], [gradient], group["momentum"], group["nesterov"], flag)
        update = update.flatten(1)
        precision = self.fp32_matmul_prec
        products = made(group[KERNEL], min(update.shape), "tf32" if precision == "high" else "ieee")
        settings: dict[str, Any] = {"fp32_matmul_prec": precision, "propagate_nan": True, "products": products}
        return newton_schulz(update, steps, _COEFFICIENTS, **settings).to(dtype)

    def _exchange(self, bucket: Bucket, mine: Tensor) -> Callable[[], list[Tensor]]:
        """Start to exchange a round's tensors; calling the result waits."""
        group = self.process_group
        if group is None or self.ranks == 1:
            return lambda: [mine]
        if len(bucket.compute_ranks) == self.ranks:
            gathered = all_gather(mine, group)
            return lambda: list(gathered.wait())
        buffers = [mine if rank == self.rank else torch.empty_like(mine) for rank in bucket.compute_ranks]
        sent = [broadcast(x, rank, group) for x, rank in zip(buffers, bucket.compute_ranks, strict=True)]
        return lambda: [one.wait() for one in sent]

    def _own(self, bucket: Bucket) -> int | None:
        return bucket.compute_ranks.index(self.rank) if self.rank in bucket.compute_ranks else None


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
        for some in batched(indices, len(loads)) if shape.numel() else ():
            least = sorted(range(len(loads)), key=loads.__getitem__)[: len(some)]
            for rank in least:
                loads[rank] += shape.numel() * dtype.itemsize
            dealt.append(Bucket(some, "share", tuple(sorted(least))))
    return dealt
