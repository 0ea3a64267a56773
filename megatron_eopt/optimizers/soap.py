"""SOAP: Adam in the eigenbasis of Shampoo's factors."""

from collections.abc import Mapping
from typing import Any, Literal, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.factors.eigenbases import BasisMethod
from megatron_eopt.factors.factored import Decay, FactoredOptimizer, HeldNorm, steps_taken
from megatron_eopt.factors.soap_math import Preconditioned, SortBases, update_of
from megatron_eopt.kernels.precision import MatmulPrecision, fp32_products
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.settings.records import ADAM, GROUP_PRECISION, Setting
from megatron_eopt.settings.values import Scalar, count
from megatron_eopt.step.parameters import Matrices
from megatron_eopt.step.stacked_optimizer import first_moment
from megatron_eopt.step.stacks import Rule, Stack
from megatron_eopt.step.state import EXP_AVG, EXP_AVG_SQ

Gradients = Literal["previous", "current"]


class SOAP(FactoredOptimizer):
    """Adam in the eigenbasis of Shampoo's factors [1].

    For a matrix ``p`` (m x n) with gradient ``g``, of which ``Q_L`` and ``Q_R`` are the bases so far:

    1. ``M <- beta1 M + (1 - beta1) g``; ``V <- beta2 V + (1 - beta2) (Q_L^T g Q_R)^2``, both corrected for their start;
       ``nesterov`` has ``beta1 M / (1 - beta1^(t+1)) + (1 - beta1) g / (1 - beta1^t)`` for ``M`` of step ``t``;
    2. ``p <- (1 - lr weight_decay) p - lr Q_L [Q_L^T M Q_R / (sqrt(V) + eps)] Q_R^T``;
    3. ``L <- EMA(g g^T)``, ``R <- EMA(g^T g)`` by ``shampoo_beta``, corrected for their start;
    4. every ``precondition_frequency`` steps after the first (with 4 in steps 5, 9 and 13, as in the authors' code),
       the columns of each basis are sorted by their eigenvalues, ``V`` with them, and ``Q <- QR(L Q)``, or the
       eigenvectors. The first basis always is that of the eigenvectors. ``sort_bases="after"`` sorts the columns of
       the new basis instead, and leaves ``V`` as it lies.
       A GPU makes the QR decompositions by products: see :func:`~megatron_eopt.orthogonalize.bases.by_products`.

    The first nonzero gradient makes the bases alone, and moves nothing: seen in a basis made of itself, it is diagonal,
    and Adam makes full steps of the rounding beside the diagonal. ``basis_of="current"`` puts 3 and 4 in front of 1, as
    all releases of emerging-optimizers and so Megatron's ``--optimizer soap`` do: most of its first update is rounding,
    whose tiny squares make the second far too large (18 times Adam's for 64 x 32 in fp32) unless the bases stay.
    With ``sort_bases="before"``, which is the authors', it is the order of emerging-optimizers up to 0.3, which
    Megatron pins; with ``"after"`` that of 0.4 and later. Where gradients span the sides, steps are theirs up to
    rounding. Where they do not, rounding makes a part of the steps, there and here.

    With ``use_kl_shampoo`` the factors minimize the Kullback-Leibler divergence of N(0, L x R) from the gradients'
    distribution [2]: ``L <- EMA(g R^-1 g^T / n)``, ``R <- EMA(g^T L^-1 g / m)``, of the factors so far and their bases,
    the identity before the first. With ``basis_of="current"`` it is ``eps`` times that, and eigenvalues are at least
    ``eps``, as in emerging-optimizers: the first gradient outweighs others for some 300 steps, and bases stay nearly as
    it made them.

    ``weight_norm="hold"`` keeps each logical matrix at the norm ``R`` that it has before the first step: with ``U`` the
    update of 2, ``p <- R normalize((1 - lr weight_decay) p - lr R normalize(U))``, as
    :class:`~megatron_eopt.optimizers.hyperball.MuonHyperball` does. A step is an angle of about ``lr``. With KL factors
    it is KL-SOAP-H [3], but for how eigenvalues are found: there as averages of their own.

    ``orthogonalize`` makes it SOAP-Muon [4]: ``V`` is of the first moment that it divides, in place of the gradient,
    and ``U`` becomes its orthogonal factor, by 8 Newton-Schulz steps of polar_express on the whole matrix, times the
    scale of ``scale_mode``. Take ``nesterov`` with it, as there. Vectors still get Adam, and a matrix without a factor
    is refused.

    A side longer than ``max_dim`` has no factor and no basis. Matrices with neither, and all that are not matrices, get
    Adam. Everything is kept in fp32 (fp64 for fp64 parameters); ``M`` in the basis of the parameter.

    Fused or stacked parameters are split into logical matrices where ``logical_matrices`` is a
    :class:`~megatron_eopt.matrices.Split`, or by ``split_qkv``.

    A cut parameter takes the step of one rank. A matrix of Megatron's that has a factor gets a compute rank of its
    group, by costs from shapes alone. Shards of gradient, ``M`` and ``V`` go there, in one all-to-all for many
    matrices, and those of the update and ``V`` come back; only that rank has the factors and bases. With
    ``share_over_dp`` data-parallel ranks are among the compute ranks. Of DTensors each rank gathers matrices, and has
    factors and bases: torch's checkpoints know no tensor that only one rank has. A step with a
    gradient that is not finite is skipped.

    The first step makes the eigenvectors of every factor, some 10 n^3 operations a side of n, many of them bound by
    memory. At 8192 that may take very long, and other ranks wait for a compute rank within the timeout of their group.
    The host waits for the device there, and in no later step with ``qr``.

    Args:
        params: vectors, matrices and declared stacks of matrices, or groups of them; see
            :func:`megatron_eopt.parallel.attributes.layout_of` for the attributes that say how they are sharded.
        lr: learning rate, at least 0.
        betas: of ``M`` and ``V``, each in [0, 1).
        shampoo_beta: of the factors, in [0, 1).
        eps: added to the root of ``V``, above 0.
        weight_decay: at least 0.
        precondition_frequency: steps between refreshes of the bases, at least 1.
        basis_method: ``qr`` or ``eigh``; also as ``use_eigh``, False or True.
        basis_of: ``previous`` gradients, or ``current``, which is the last of them.
        sort_bases: ``before`` a refresh, the second moment with them, or ``after`` it.
        weight_norm: ``hold``, see above, or ``none``.
        orthogonalize: see above.
        scale_mode: of orthogonalized updates, as Muon's: ``shape_scaling``, ``spectral`` or ``unit_rms_norm``.
        use_kl_shampoo: see above.
        max_dim: the longest side that has a factor, at least 0; also as ``max_precond_dim``.
        weight_decay_method: ``decoupled``; ``independent``, without ``lr`` in it; or ``palm``, with its square.
        nesterov: whether the first moment looks ahead.
        correct_bias: whether moments and factors are corrected for their start.
        maximize: ascend instead of descend.
        fp32_matmul_prec: ``low``, ``medium``, ``high`` (these three are TF32, where the device has it) or ``highest``.
        share_over_dp: whether data-parallel ranks share work, factors and bases: those of ``pg_collection.dp_cp``, or
            ``expt_dp`` for experts, and of cut matrices those of ``tp_dp_cp``, or ``tp_expt_dp``, where it has these
            groups. Then the state of every rank has to be saved.
        symmetric_products: the kernel of ``g g^T`` and ``g^T g``, as in
            :class:`~megatron_eopt.settings.execution.Execution`; by default torch's.
        **settings: see :class:`~megatron_eopt.step.parameters.Matrices`.

    Raises:
        ValueError: for a setting out of its range, a parameter of three or more dimensions that is not declared as a
            stack, a split that does not fit, a DTensor of which a rank holds several separate parts, or shards without
            a group.

    [1] Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, arXiv 2409.11321.
    [2] Lin et al., Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization, arXiv 2509.03378.
    [3] https://github.com/KellerJordan/modded-nanogpt/pull/290
    [4] https://github.com/KellerJordan/modded-nanogpt/pull/278 and, for all matrices and every step, 321
    """

    takes = "matrices and vectors"
    moments = (EXP_AVG, EXP_AVG_SQ)
    gathered = 3  # gradients and both moments
    scattered = 2  # updates and second moments
    own_settings = (
        *ADAM,
        GROUP_PRECISION,
        Setting("use_kl_shampoo", "Factors of KL-Shampoo, which Megatron's own has by default."),
        Setting("basis_of", "Whether a gradient is seen in a basis made before it, as published, or with it."),
        Setting("basis_method", "How bases are refreshed."),
        Setting("sort_bases", "Whether eigenvalues are sorted before a refresh, as published, or after it."),
        Setting("weight_norm", "Whether every matrix keeps the norm that it starts with (KL-SOAP-H).", planned=True),
        Setting("nesterov", "Whether the first moment looks ahead."),
        Setting("orthogonalize", "Updates are orthogonalized (SOAP-Muon)."),
        Setting(
            "scale_mode",
            "How the size of an orthogonalized update follows from the shape.",
            only_with=("orthogonalize", (True,)),
        ),
        Setting("max_dim", "The longest side that has a factor and a basis.", count(0), planned=True),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        *,
        basis_method: BasisMethod = "qr",
        basis_of: Gradients = "previous",
        sort_bases: SortBases = "before",
        weight_norm: HeldNorm = "none",
        orthogonalize: bool = False,
        scale_mode: ScaleMode = "shape_scaling",
        use_kl_shampoo: bool = False,
        max_dim: int = 10000,
        weight_decay_method: Decay = "decoupled",
        nesterov: bool = False,
        correct_bias: bool = True,
        maximize: bool = False,
        fp32_matmul_prec: MatmulPrecision = "highest",
        share_over_dp: bool = False,
        symmetric_products: str | None = None,
        **settings: Unpack[Matrices],
    ) -> None:
        super().__init__(params, locals())

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["orthogonalize"]:
            self._check_factors(group, " with orthogonalize")

    def skips_first_update(self, group: Mapping[str, Any]) -> bool:
        """Not where a gradient is seen in a basis of itself."""
        return bool(group["basis_of"] == "previous")

    def update(self, stack: Stack) -> Rule:
        """``U = Q_L [Q_L^T M Q_R / (sqrt(V) + eps)] Q_R^T``; also ``M``, ``V``, ``L``, ``R``, ``Q_L`` and ``Q_R``."""
        gradient, momentum = first_moment(stack, stack.group["betas"][0])
        gradient, momentum, squares = yield stack.gather(gradient, momentum, stack.state(EXP_AVG_SQ))
        update: Tensor | None = momentum
        if stack.own:
            left, right = self._sides(stack)
            matrices = Preconditioned(gradient, momentum, squares, steps_taken(stack), stack.ok, left, right)
            with fp32_products(stack.group["fp32_matmul_prec"]):
                update = update_of(matrices, self._settings(stack), stack.first)
            self._keep_sides(stack, [left, right])
        if update is None or not stack.moves:
            return None
        update, squares = yield stack.scatter(update, squares)
        stack.keep(EXP_AVG_SQ, squares)
        return update
