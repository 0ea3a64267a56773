"""Spectron: weights of low rank, each the product of two factors that take steps bounded by their spectral norms."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers.group_settings import Scalar
from megatron_eopt.optimizers.factored import FactoredOptimizer
from megatron_eopt.optimizers.group_settings import note_short_schedule
from megatron_eopt.optimizers.low_rank import check_count, factor_pairs
from megatron_eopt.optimizers.parameters import TensorParallelGroups
from megatron_eopt.optimizers.spellings import also_called
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.precision import MatmulPrecision
from megatron_eopt.parallel.plan import TpMode, validate_tp_mode

__all__ = ["Spectron", "factor_pairs"]


class Spectron(FactoredOptimizer):
    """Spectron [1]: ``W = A B^T`` of rank ``r``, whose factors take orthogonalized steps of a bounded product.

    For a weight ``W`` (m x n) with gradient ``G`` and its factors ``A`` (m x r) and ``B`` (n x r), in this order:

    1. ``gA = G B`` and ``gB = G^T A``;
    2. weight decay of each factor: ``A -= lr * weight_decay * A``, so that ``W`` shrinks by the square;
    3. momentum, an exponential moving average: ``mA += (1 - beta) (gA - mA)``, and likewise ``mB``;
    4. ``sA`` and ``sB``, the largest singular values of the factors, by power iteration from the last step's vectors;
    5. ``A -= lr' * orth(mA)``, ``B -= lr' * orth(mB)`` with ``lr' = lr / (sA + sB + 1)``: ``W`` changes by at most
       about ``lr`` in spectral norm;
    6. ``W = A B^T``.

    The first step with ``lr > 0`` takes the factors from the singular value decomposition of the weight, and **so
    projects it to rank r**; by how much that changes it is logged, and in :attr:`projection_errors`. Before it steps
    with ``lr = 0`` change nothing; after it, they leave weight and factors bit-equal, and the momenta go on. From the
    first step on the factors are what is trained: a weight that is changed by others is written over.

    Factors, momenta and singular vectors are kept in fp32 (fp64 for an fp64 parameter), and steps 1, 4 and 6 are
    computed in it. Gradients are never written to, and a parameter without one is left as it is, and so is one whose
    gradient is not finite: see :mod:`~megatron_eopt.optimizers.skipping`. Only steps up to
    the one that projects a parameter wait for a GPU.

    In the paper's own form the model holds the factors: see
    :func:`~megatron_eopt.optimizers.low_rank.factor_pairs` for groups of such pairs, which skip steps 1 and 6 and the
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

    Raises:
        ValueError: for a setting out of its range, a parameter that is no matrix or is cut along both dimensions, a
            split that does not fit, or shards without a group; in the first step for a weight that is zero or not
            finite, before any is changed.

    [1] Spectron, arXiv 2602.12429.
    """

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
    ) -> None:
        validate_tp_mode(tp_mode)
        if tp_mode == "blockwise":
            raise ValueError("Spectron has no tp_mode blockwise: take duplicated, owner, distributed, gram or auto")
        check_count("Spectron: num_power_iterations", num_power_iterations)
        self.newton_schulz = NewtonSchulz(
            steps=num_ns_steps, coefficient_type=coefficient_type, fp32_matmul_prec=fp32_matmul_prec
        )
        note_short_schedule(self.newton_schulz)
        self.num_power_iterations = num_power_iterations
        self.split_qkv = split_qkv
        self.is_qkv_fn = is_qkv_fn
        self.qkv_split_shapes = self._check_split(qkv_split_shapes) if split_qkv else None
        self.pg_collection = pg_collection
        self.tp_mode = tp_mode
        defaults = {"lr": lr, "rank": rank, "momentum_beta": momentum_beta, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "pairs": False})

    def settings(self) -> dict[str, Any]:
        """What a checkpoint says of this optimizer to those who read it."""
        known = self.newton_schulz
        return super().settings() | {
            "coefficients": [list(each) for each in known.schedule],
            "fp32_matmul_prec": known.fp32_matmul_prec,
            "num_power_iterations": self.num_power_iterations,
            "split_qkv": self.split_qkv,
            "tp_mode": self.tp_mode,
        }
