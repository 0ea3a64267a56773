"""SOAP: Adam in the eigenbasis of Shampoo's factors."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers.parameters import local
from megatron_eopt.optimizers.group_settings import Scalar
from megatron_eopt.optimizers.checks import check_adam_settings
from megatron_eopt.optimizers.logical import DescribedMatrix
from megatron_eopt.optimizers.parameters import TensorParallelGroups
from megatron_eopt.optimizers.skipping import Skipping, names_of_last, parameter_names
from megatron_eopt.optimizers.soap_eigenbasis import BasisMethod
from megatron_eopt.optimizers.soap_parts import DECAY_POWERS, Place, Task, take
from megatron_eopt.optimizers.soap_state import MAX_DIM, SIDES, STEPS, SOAPState
from megatron_eopt.optimizers.soap_step import CLOCK
from megatron_eopt.optimizers.spellings import also_called
from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.orthogonalize.precision import MatmulPrecision, validate_matmul_precision
from megatron_eopt.parallel.layout import local_rows
from megatron_eopt.parallel.sharing import Parameter, SharedParameters

Gradients = Literal["previous", "current"]


class SOAP(SOAPState):
    """Adam in the eigenbasis of Shampoo's factors [1].

    For a matrix ``p`` (m x n) with gradient ``g``, of which ``Q_L`` and ``Q_R`` are the bases so far:

    1. ``M <- beta1 M + (1 - beta1) g``; ``V <- beta2 V + (1 - beta2) (Q_L^T g Q_R)^2``, both corrected for their start;
       ``nesterov`` has ``beta1 M / (1 - beta1^(t+1)) + (1 - beta1) g / (1 - beta1^t)`` for ``M`` of step ``t``;
    2. ``p <- (1 - lr weight_decay) p - lr Q_L [Q_L^T M Q_R / (sqrt(V) + eps)] Q_R^T``;
    3. ``L <- EMA(g g^T)``, ``R <- EMA(g^T g)`` by ``shampoo_beta``, corrected for their start;
    4. every ``precondition_frequency`` steps after the first, so with 4 in steps 5, 9 and 13, as in the authors' code,
       the columns of each basis are sorted by their eigenvalues, ``V`` with them, and ``Q <- QR(L Q)``, or the
       eigenvectors. The first basis always is that of the eigenvectors.

    The first gradient makes the bases alone, and moves nothing: seen in a basis made of itself, it is diagonal, and
    Adam makes full steps of the rounding beside the diagonal. ``basis_of="current"`` puts 3 and 4 in front of 1, as
    emerging-optimizers and so Megatron's ``--optimizer soap`` do, and has no such rest: most of its first update is
    rounding, whose tiny squares make the second far too large (18 times Adam's for 64 x 32 in fp32). A gradient that is
    zero makes no bases; until there is another, nothing is kept of the parameter, and it stays as it is.

    With ``use_kl_shampoo`` the factors are those that minimize the Kullback-Leibler divergence of N(0, L x R) from the
    gradients' distribution [2]: ``L <- EMA(g R^-1 g^T / n)``, ``R <- EMA(g^T L^-1 g / m)``, of the factors so far and
    their bases, the identity before the first.

    A side longer than ``max_dim`` has no factor and no basis. Matrices with neither, and all that are not matrices, get
    Adam. Everything is kept in fp32 (fp64 for fp64 parameters); ``M`` in the basis of the parameter.

    A parameter of several logical matrices gets the steps that these would get by themselves: one whose attribute
    ``logical_matrices`` is a :class:`~megatron_eopt.matrices.Split`, a stack of matrices among them, or that
    ``split_qkv`` tells to be fused.

    A parameter that is cut, by tensor parallelism or as a DTensor (FSDP2, HSDP), takes the step of one rank. Of its
    matrices that have a factor each rank gathers gradient, ``M`` and ``V``, in one all-gather for many of them, and
    computes the whole step; so factors and bases are whole on every rank, and at any number of ranks the same. What has
    no factor takes its step as it lies. A gradient that is not finite on one rank is left out on all that share it.

    Args:
        params: vectors, matrices and declared stacks of matrices, or groups of them; see
            :func:`megatron_eopt.parallel.layout.layout_of` for the attributes that say how they are sharded.
        lr: learning rate, at least 0.
        betas: of ``M`` and ``V``, each in [0, 1).
        shampoo_beta: of the factors, in [0, 1).
        eps: added to the root of ``V``, above 0.
        weight_decay: at least 0.
        precondition_frequency: steps of the optimizer from one refreshing of the bases to the next, at least 1.
        basis_method: ``qr`` or ``eigh``; also as ``use_eigh``, False or True.
        basis_of: ``previous`` gradients, or ``current``, which is the last of them.
        use_kl_shampoo: see above.
        max_dim: the longest side that has a factor, at least 0; also as ``max_precond_dim``.
        weight_decay_method: ``decoupled``; ``independent``, without ``lr`` in it; or ``palm``, with its square.
        nesterov: whether the first moment looks ahead.
        correct_bias: whether moments and factors are corrected for their start.
        maximize: ascend instead of descend.
        fp32_matmul_prec: ``low``, ``medium``, ``high`` (these three are TF32, where the device has it) or ``highest``.
        split_qkv: precondition the parts of fused query, key and value projections separately.
        is_qkv_fn: tells which parameters are fused.
        qkv_split_shapes: rows of (q, k, v), or of (q, gate, k, v), in one query group; the attribute
            ``qkv_split_shapes`` of a parameter wins.
        pg_collection: the process groups ``tp`` and, for experts, ``expt_tp``; None where nothing is sharded.

    Raises:
        ValueError: for a setting out of its range, a parameter of three or more dimensions that is not declared as a
            stack, a split that does not fit, a DTensor of which a rank holds several separate parts, or shards without
            a group.

    [1] Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, arXiv 2409.11321.
    [2] Lin et al., Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization, arXiv 2509.03378.
    """

    carried_settings = frozenset({CLOCK})

    # On the class, because torch leaves attributes out of pickles: where the matrices of parameters lie,
    _places: dict[Tensor, Place] | None = None
    _shared: SharedParameters | None = None
    # and parameters known to have a basis.
    _based: set[Tensor] | None = None
    _updated: int = 0

    @also_called(use_eigh=("basis_method", {False: "qr", True: "eigh"}), max_precond_dim=MAX_DIM)
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
        use_kl_shampoo: bool = False,
        max_dim: int = 10000,
        weight_decay_method: Literal["decoupled", "independent", "palm"] = "decoupled",
        nesterov: bool = False,
        correct_bias: bool = True,
        maximize: bool = False,
        fp32_matmul_prec: MatmulPrecision = "highest",
        split_qkv: bool = False,
        is_qkv_fn: Callable[[Tensor], bool] | None = None,
        qkv_split_shapes: Sequence[int] | None = None,
        pg_collection: TensorParallelGroups | None = None,
    ) -> None:
        self.split_qkv = split_qkv
        self.is_qkv_fn = is_qkv_fn
        self.qkv_split_shapes = self._check_split(qkv_split_shapes) if split_qkv else None
        self.pg_collection = pg_collection
        defaults = {
            "lr": lr,
            "betas": betas,
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "basis_method": basis_method,
            "basis_of": basis_of,
            "use_kl_shampoo": use_kl_shampoo,
            MAX_DIM: max_dim,
            "weight_decay_method": weight_decay_method,
            "nesterov": nesterov,
            "correct_bias": correct_bias,
            "maximize": maximize,
            "fp32_matmul_prec": fp32_matmul_prec,
        }
        super().__init__(params, defaults)

    def settings(self) -> dict[str, Any]:
        """What a checkpoint says of this optimizer to those who read it."""
        return super().settings() | {"split_qkv": self.split_qkv}

    @property
    def matrices_updated(self) -> int:
        """Those that were worked on: matrices without a factor as well, which get Adam."""
        return self._updated

    def described_matrices(self, settled: bool = True) -> dict[Tensor, list[DescribedMatrix]]:
        """The logical matrices of each parameter, of which every rank computes all that it has a part of."""
        described = {}
        for parameter in (p for p in self._parameters() if p.ndim > 1):
            named = zip(
                self.split_of(parameter).names(self.layout(parameter).shape[0]),
                self.matrix_layouts(parameter),
                strict=True,
            )
            described[parameter] = [
                DescribedMatrix(name, each.shape, "duplicated" if each.sharded else "local", 1.0, None)
                for name, each in named
            ]
        return described

    def _check_group(self, group: dict[str, Any]) -> None:
        name = type(self).__name__
        check_adam_settings(name, group)
        if not 0 <= group["shampoo_beta"] < 1:
            raise ValueError(f"{name}: shampoo_beta must lie in [0, 1), got {group['shampoo_beta']}")
        for key, least in (("precondition_frequency", 1), (MAX_DIM, 0)):
            if not isinstance(group[key], int) or group[key] < least:
                raise ValueError(f"{name}: {key} must be a whole number of at least {least}, got {group[key]!r}")
        check_choice(f"weight_decay_method of {name}", group["weight_decay_method"], tuple(DECAY_POWERS))
        check_choice(f"basis_method of {name}", group["basis_method"], get_args(BasisMethod))
        check_choice(f"basis_of of {name}", group["basis_of"], get_args(Gradients))
        validate_matmul_precision(group["fp32_matmul_prec"])
        for parameter, which in zip(group["params"], names_of_last(self.param_groups), strict=True):
            self._check_parameter(parameter, which)
        group.setdefault(CLOCK, 0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state.

        Raises:
            ValueError: if the groups or the shapes are others, or if a tensor is missing; nothing is changed then.
        """
        super().load_state_dict(state_dict)
        self._based = None

    def _prepare(self, parameters: Sequence[Tensor]) -> Skipping:
        skipping = super()._prepare(parameters)
        names = parameter_names(self.param_groups)
        described = [
            Parameter(name, self.layout(p), self.split_of(p), p.dtype)
            for name, p in zip(names, parameters, strict=True)
        ]
        self._shared = SharedParameters(described, local(parameters[0]).device)
        self._places = {
            p: Place(self.matrix_layouts(p), local_rows(each.layout, each.split), self.key_ends(p))
            for p, each in zip(parameters, described, strict=True)
        }
        return skipping

    def _agree(self, flags: Tensor) -> Tensor:
        assert self._shared is not None, "made before the first step"
        return self._shared.agree(flags)

    def _take(self, accepted: Tensor) -> None:
        for group in self.param_groups:
            group[CLOCK] += 1
        take(list(self._tasks(accepted)))

    def _tasks(self, accepted: Tensor) -> Iterator[Task]:
        """What is worked on in this step."""
        assert self._places is not None, "made before the first step"
        flags = iter(accepted.unbind())
        for group in self.param_groups:
            for parameter in group["params"]:
                flag, place = next(flags), self._places[parameter]
                # also without a gradient where others wait for this rank's part
                if parameter.grad is None and not place.gathered(self.state.get(parameter, {})):
                    continue
                state = self._state_of(parameter)
                factored = any(factor + end in state for end in place.ends for factor, _ in SIDES)
                first = factored and not self._has_basis(parameter, state)
                # a device is waited for until a basis is known to be there, and no longer
                self._updated += len(place.layouts) if parameter.ndim > 1 else 0
                if not (first and not flag):
                    yield Task(parameter, state, place, group, flag, first)

    def _has_basis(self, parameter: Tensor, state: dict[str, Any]) -> bool:
        self._based = set() if self._based is None else self._based
        had = parameter in self._based or bool(state[STEPS] > 0)
        self._based.update([parameter] if had else [])
        return had
