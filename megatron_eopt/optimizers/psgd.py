"""PSGD-Kron: momentum whitened by fitted Kronecker factors."""

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.factors.psgd_math import Whitened, init_factors, preconditioned, refreshed
from megatron_eopt.kernels.precision import MatmulPrecision, fp32_products
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.settings.records import GROUP_PRECISION, Setting
from megatron_eopt.settings.values import ABOVE_0, ABOVE_0_UP_TO_1, AT_LEAST_0, BELOW_1, Scalar, count
from megatron_eopt.step.foreach import where
from megatron_eopt.step.parameters import Matrices
from megatron_eopt.step.stacked_optimizer import CLOCK, StackedOptimizer, first_moment, refreshes
from megatron_eopt.step.stacks import MatrixPlan, Rule, Stack, wide
from megatron_eopt.step.state import EXP_AVG, StateTensor

FACTORS = ("Q_L", "Q_R")
BOUNDS = "bounds"


class PSGDKron(StackedOptimizer):
    """Momentum whitened by two factors that are fitted to it [1].

    For a matrix ``p`` (m x n) with gradient ``g``, and ``P X = (Q_L^T Q_L) X (Q_R^T Q_R)``:

    1. ``M <- momentum M + (1 - momentum) g``;
    2. every ``precondition_frequency`` steps the factors make a step towards those with which the rows and columns of
       ``G = P (M + noise)`` are white: ``Q_L <- Q_L - (rate / bound) (G G^T - n I) Q_L``, ``Q_R`` likewise, each then
       turned towards a symmetric one. ``bound`` is the largest of ``|G G^T| + n`` and its average by ``beta_lip``;
    3. ``p <- (1 - lr weight_decay) p - lr P M``, where the RMS of ``P M`` is at most ``max_update_rms``.

    This is the form that the author of PSGD recommends ("Q0.5EQ1.5", with a Procrustes step [2]), and that of
    emerging-optimizers' PSGDPro: no triangular solves, and all products are of matrices. An update has an RMS of about
    1, whatever the size of the gradients. ``rate`` is ``precond_lr / sqrt(1 + t / precond_decay_steps)`` in step ``t``
    of the group (from 0), at least ``min_precond_lr``. A side longer than ``max_dim`` has the diagonal of a factor
    alone.

    Its random numbers (the noise, and probes for norms) are a hash of the step and of their place in the whole matrix:
    the same on any number of ranks, and after a resume. All matrices of a shape have the same.

    ``M`` and the factors are kept in fp32 (fp64 for fp64 parameters). Fused or stacked parameters are split into
    logical matrices where ``logical_matrices`` is a :class:`~megatron_eopt.matrices.Split`, or by ``split_qkv``. A cut
    matrix gets a compute rank of its tensor-parallel group, by costs from shapes alone; its shards of ``M`` go there in
    one all-to-all for many matrices, and those of the update come back. Of DTensors each rank gathers matrices, and has
    their factors. A step works on stacks of 256 MiB, or of one matrix that is larger.

    Args:
        params: matrices and declared stacks of matrices, or groups of them; see
            :func:`megatron_eopt.parallel.attributes.layout_of` for the attributes that say how they are sharded.
        lr: learning rate, at least 0.
        momentum: in [0, 1).
        weight_decay: at least 0, decoupled.
        precond_lr: rate of the factors, above 0 and at most 1.
        min_precond_lr: its least, at least 0.
        precond_decay_steps: see above, at least 1.
        precondition_frequency: steps between those of the factors, at least 1.
        precond_init_scale: the factors start as so many identities, above 0.
        damping_noise_scale: size of the noise, at least 0; where gradients are smaller they are not whitened.
        beta_lip: of the bounds, in [0, 1).
        max_update_rms: at least 0; 0 for no bound.
        max_dim: the longest side that has a factor, at least 0.
        maximize: ascend instead of descend.
        fp32_matmul_prec: ``low``, ``medium``, ``high`` (these three are TF32, where the device has it) or ``highest``;
            the Procrustes step is always ``highest``.
        **settings: see :class:`~megatron_eopt.step.parameters.Matrices`.

    Raises:
        ValueError: for a setting out of its range, a parameter that is no matrix, a split that does not fit, or shards
            without a group.

    [1] Li, Preconditioned Stochastic Gradient Descent, arXiv 1512.04202; Pooladzandi and Li, Curvature-Informed SGD via
        General Purpose Lie-Group Preconditioners, arXiv 2402.04553.
    [2] Li, Stochastic Hessian Fittings with Lie Groups, arXiv 2402.11858.
    """

    own_settings = (
        GROUP_PRECISION,
        # a rate above 1 could turn a factor negative
        Setting("precond_lr", "Rate of the factors, above 0 and at most 1.", ABOVE_0_UP_TO_1),
        Setting("min_precond_lr", "Least rate of the factors.", AT_LEAST_0),
        Setting("precond_decay_steps", "Steps by which the rate of the factors decays.", count(1), metavar="STEPS"),
        Setting("precondition_frequency", "Steps from one fit of the factors to the next.", count(1)),
        Setting("precond_init_scale", "The factors start as so many identities.", ABOVE_0),
        Setting(
            "damping_noise_scale",
            "Noise that is added where factors are fitted; emerging-optimizers has 0.1.",
            AT_LEAST_0,
        ),
        Setting("beta_lip", check=BELOW_1),
        Setting(
            "max_dim", "The longest side that has a factor; a longer one has its diagonal.", count(0), planned=True
        ),
    )
    persistent_group_keys = frozenset({CLOCK})
    fixed_by_state = ("max_dim",)
    counters = frozenset({CLOCK})
    row_order_matters = True
    gathered = 1  # momenta
    scattered = 1  # updates

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 3e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        *,
        precond_lr: float = 0.1,
        min_precond_lr: float = 0.01,
        precond_decay_steps: int = 10000,
        precondition_frequency: int = 1,
        precond_init_scale: float = 1.0,
        damping_noise_scale: float = 1e-9,
        beta_lip: float = 0.9,
        max_update_rms: float = 1.0,
        max_dim: int = 8192,
        maximize: bool = False,
        fp32_matmul_prec: MatmulPrecision = "highest",
        **settings: Unpack[Matrices],
    ) -> None:
        super().__init__(params, locals())

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum, and each matrix's factors and bounds."""
        dtype = wide(parameter)
        tensors = [StateTensor(EXP_AVG, dtype=dtype)]
        longest = self.group_of(parameter)["max_dim"]
        for part, plan in enumerate(self._planned(parameter)):
            for key, length in zip(FACTORS, plan.layout.shape, strict=True):
                dims = (length, length) if length <= longest else (length,)
                tensors.append(StateTensor(key + plan.end, dims, part, dtype, plan.compute_rank))
            tensors.append(StateTensor(BOUNDS + plan.end, (2,), part, dtype, plan.compute_rank, non_negative=True))
        return tensors

    def _check_together(self, group: Mapping[str, Any]) -> None:
        least = group["min_precond_lr"]
        rate = group["precond_lr"]
        if least > rate:
            raise ValueError(
                f"{type(self).__name__}: min_precond_lr must be at most precond_lr, got {least} and {rate}"
            )

    def _plan(self, end: str, layout: Layout, longest: int) -> MatrixPlan:
        plan = super()._plan(end, layout, longest)
        rows, cols = layout.shape
        plan.cost += rows * cols  # diagonals, too, are of whole matrices
        return plan

    def _advances_clock(self, group: Mapping[str, Any]) -> bool:
        # torch makes a step at rate 0 to begin a state, which is none of the run
        return isinstance(group["lr"], Tensor) or group["lr"] != 0

    def update(self, stack: Stack) -> Rule:
        """``U = P M``; also ``M``, ``Q_L``, ``Q_R`` and their bounds."""
        [momentum] = yield stack.gather(first_moment(stack, stack.group["momentum"])[1])
        if momentum.numel():
            momentum = self._whitened(stack, momentum)
        [update] = yield stack.scatter(momentum)
        return update

    def _whitened(self, stack: Stack, momentum: Tensor) -> Tensor:
        group = stack.group
        # a momentum of zeros has nothing to fit to, as in the step without gradients by which torch begins a state
        steps = where(stack.ok, momentum.flatten(1).any(1), False)
        whitened = Whitened(momentum, [stack.owned(key) for key in FACTORS], stack.owned(BOUNDS))
        init_factors(whitened, steps, group["precond_init_scale"])
        with fp32_products(group["fp32_matmul_prec"]):
            if refreshes(group):
                whitened = refreshed(whitened, steps, group[CLOCK], group)
            update = preconditioned(whitened.factors, momentum)
        for key, factor in zip(FACTORS, whitened.factors, strict=True):
            stack.keep_owned(key, factor)
        stack.keep_owned(BOUNDS, whitened.bounds)
        if group["max_update_rms"]:
            rms = torch.linalg.vector_norm(update, dim=(1, 2), keepdim=True) / momentum[0].numel() ** 0.5
            update.mul_((group["max_update_rms"] / rms).clamp(max=1))
        return update
