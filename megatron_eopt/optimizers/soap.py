"""SOAP: Adam in the eigenbasis of Shampoo's factors."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers.batch import local
from megatron_eopt.optimizers.bulk import Scalar
from megatron_eopt.optimizers.checks import check_adam_settings, check_real_and_dense
from megatron_eopt.optimizers.skipping import parameter_names
from megatron_eopt.optimizers.soap_eigenbasis import (
    BasisMethod,
    eigenbasis,
    from_basis,
    refreshed,
    to_basis,
    update_factor,
    whitened,
)
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.optimizers.stepping import SteppingOptimizer
from megatron_eopt.orthogonalize.choices import check_choice
from megatron_eopt.orthogonalize.precision import MatmulPrecision, fp32_products, validate_matmul_precision
from megatron_eopt.parallel.layout import Layout, is_sharded, layout_of, on_one_rank

Gradients = Literal["previous", "current"]

EXP_AVG, EXP_AVG_SQ, STEPS = "exp_avg", "exp_avg_sq", "steps"

SIDES = (("L", "Q_L"), ("R", "Q_R"))
"""Names of the factor and of the basis of the rows, and of the columns."""

CLOCK = "clock"
"""Setting of a group: steps of the optimizer so far, by which bases are refreshed."""


class SOAP(SteppingOptimizer):
    """Adam in the eigenbasis of Shampoo's factors [1].

    For a matrix ``p`` (m x n) with gradient ``g``, of which ``Q_L`` and ``Q_R`` are the bases so far:

    1. ``M <- beta1 M + (1 - beta1) g``; ``V <- beta2 V + (1 - beta2) (Q_L^T g Q_R)^2``, both corrected for their start;
    2. ``p <- (1 - lr weight_decay) p - lr Q_L [Q_L^T M Q_R / (sqrt(V) + eps)] Q_R^T``;
    3. ``L <- EMA(g g^T)``, ``R <- EMA(g^T g)`` by ``shampoo_beta``, corrected for their start;
    4. every ``precondition_frequency`` steps the columns of each basis are sorted by their eigenvalues, ``V`` with
       them, and ``Q <- QR(L Q)``, or the eigenvectors. The first basis always is that of the eigenvectors.

    The first gradient makes the bases alone, and moves nothing: seen in a basis made of itself, it is diagonal, and
    Adam makes full steps of the rounding beside the diagonal. ``basis_of="current"`` puts 3 and 4 in front of 1, as
    emerging-optimizers and so Megatron's ``--optimizer soap`` do, and has no such rest: most of its first update is
    rounding, whose tiny squares make the second far too large (18 times Adam's for 64 x 32 in fp32).

    With ``use_kl_shampoo`` the factors are those that minimize the Kullback-Leibler divergence of N(0, L x R) from the
    gradients' distribution [2]: ``L <- EMA(g R^-1 g^T / n)``, ``R <- EMA(g^T L^-1 g / m)``, of the factors so far and
    their bases, the identity before the first.

    A side longer than ``max_dim`` has no factor and no basis. Parameters with neither, and all that are not matrices,
    get Adam. Everything is kept in fp32 (fp64 for fp64 parameters); ``M`` in the basis of the parameter.

    Args:
        params: parameters of at most two dimensions, or groups of them.
        lr: learning rate, at least 0.
        betas: of ``M`` and ``V``, each in [0, 1).
        shampoo_beta: of the factors, in [0, 1).
        eps: added to the root of ``V``, above 0.
        weight_decay: decoupled, at least 0.
        precondition_frequency: steps of the optimizer from one refreshing of the bases to the next, at least 1.
        basis_method: ``qr`` or ``eigh``.
        basis_of: ``previous`` gradients, or ``current``, which is the last of them.
        use_kl_shampoo: see above.
        max_dim: the longest side that has a factor, at least 0.
        maximize: ascend instead of descend.
        fp32_matmul_prec: ``low``, ``medium``, ``high`` (these three are TF32, where the device has it) or ``highest``.
        pg_collection: the process groups ``tp`` and ``expt_tp``, to tell which parameters are sharded; None where
            nothing is.

    Raises:
        ValueError: for a setting out of its range, a parameter of more than two dimensions, or a matrix of which this
            rank has a part only.

    [1] Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, arXiv 2409.11321.
    [2] Lin et al., Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization, arXiv 2509.03378.
    """

    carried_settings = frozenset({CLOCK})

    # On the class, because torch leaves attributes out of pickles: parameters known to have a basis, and
    _based: set[Tensor] | None = None
    # process groups, which are asked when a parameter is added.
    _pg_collection: Any = None

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
        maximize: bool = False,
        fp32_matmul_prec: MatmulPrecision = "highest",
        pg_collection: Any = None,
    ) -> None:
        self._pg_collection = pg_collection
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
            "max_dim": max_dim,
            "maximize": maximize,
            "fp32_matmul_prec": fp32_matmul_prec,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        name = type(self).__name__
        check_adam_settings(name, group)
        if not 0 <= group["shampoo_beta"] < 1:
            raise ValueError(f"{name}: shampoo_beta must lie in [0, 1), got {group['shampoo_beta']}")
        for key, least in (("precondition_frequency", 1), ("max_dim", 0)):
            if not isinstance(group[key], int) or group[key] < least:
                raise ValueError(f"{name}: {key} must be a whole number of at least {least}, got {group[key]!r}")
        check_choice(f"basis_method of {name}", group["basis_method"], get_args(BasisMethod))
        check_choice(f"basis_of of {name}", group["basis_of"], get_args(Gradients))
        validate_matmul_precision(group["fp32_matmul_prec"])
        names = parameter_names(self.param_groups)[-len(group["params"]) :]
        for parameter, which in zip(group["params"], names, strict=False):  # of an empty group the names are all
            self._check_parameter(parameter, which)
        group.setdefault(CLOCK, 0)

    def _check_parameter(self, parameter: Tensor, which: str) -> None:
        name = type(self).__name__
        if parameter.ndim > 2:
            raise ValueError(
                f"{name} takes parameters of at most two dimensions, but {which} has {parameter.ndim}: give it to "
                f"another optimizer, or make it a matrix"
            )
        if parameter.ndim == 2 and self._is_part(parameter):
            raise ValueError(
                f"{name} needs whole matrices, but of {which} this rank has a part only: give it to another optimizer, "
                f"or train without sharding it"
            )

    def _is_part(self, parameter: Tensor) -> bool:
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            return any(mesh.size(i) > 1 for i, kind in enumerate(parameter.placements) if kind != Replicate())
        groups = self._pg_collection
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        without_group = groups is None and is_sharded(parameter) and not alone
        layout = layout_of(parameter, getattr(groups, "tp", None), getattr(groups, "expt_tp", None))
        return without_group or layout.sharded

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Adam's moments, the second in the eigenbasis, the steps, and of each side its factor and its basis."""
        group = next(each for each in self.param_groups if any(parameter is p for p in each["params"]))
        wide = torch.promote_types(parameter.dtype, torch.float32)
        # whatever is dealt with elementwise is Adam's alone
        lengths = parameter.shape if parameter.ndim == 2 and parameter.numel() else ()
        return [
            StateTensor(EXP_AVG, dtype=wide),
            StateTensor(EXP_AVG_SQ, dtype=wide),
            StateTensor(STEPS, dims=(), dtype=torch.float64),
            *(
                StateTensor(key, dims=(length, length), dtype=wide)
                for keys, length in zip(SIDES, lengths, strict=False)
                if length <= group["max_dim"]
                for key in keys
            ),
        ]

    def matrix_layouts(self, parameter: Tensor) -> list[Layout]:
        """One: each rank has its matrices whole, and of what is no matrix nothing is cut otherwise than itself."""
        return [
            on_one_rank((parameter.shape[0], parameter.shape[1]) if parameter.ndim == 2 else (parameter.numel(), 1))
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state.

        Raises:
            ValueError: if the groups or the shapes are others, or if a tensor is missing; nothing is changed then.
        """
        super().load_state_dict(state_dict)
        self._based = None

    def _check_gradients(self, parameters: Sequence[Tensor]) -> None:
        check_real_and_dense(type(self).__name__, parameters, parameter_names(self.param_groups))

    def _take(self, accepted: Tensor) -> None:
        flags = iter(accepted.unbind())
        for group in self.param_groups:
            group[CLOCK] += 1
            with fp32_products(group["fp32_matmul_prec"]):
                for parameter in group["params"]:
                    flag = next(flags)
                    if parameter.grad is not None:
                        self._update(parameter, flag, group)

    def _update(self, parameter: Tensor, accepted: Tensor, group: dict[str, Any]) -> None:
        state = self._state_of(parameter)
        factored = any(factor in state for factor, _ in SIDES)
        first = factored and not self._has_basis(parameter, state)
        if first and not accepted:  # a device is waited for until a basis is known to be there, and no longer
            return
        gradient = local(parameter.grad).to(local(state[EXP_AVG]).dtype)  # type: ignore[arg-type]  # it has one
        gradient = torch.where(accepted, -gradient if group["maximize"] else gradient, 0.0)
        state[STEPS] += accepted
        of_previous = factored and group["basis_of"] == "previous"
        if factored and (first or not of_previous):
            _absorb(state, gradient, accepted, group, first)
        if not (first and of_previous):
            moments = (state[STEPS] - int(of_previous)).clamp(min=1)
            _adam(local(parameter), state, gradient, accepted, moments, group)
        if of_previous and not first:
            _absorb(state, gradient, accepted, group, first)

    def _has_basis(self, parameter: Tensor, state: dict[str, Any]) -> bool:
        self._based = set() if self._based is None else self._based
        had = parameter in self._based or bool(state[STEPS] > 0)
        self._based.update([parameter] if had else [])
        return had


def _absorb(state: dict[str, Any], gradient: Tensor, accepted: Tensor, group: dict[str, Any], first: bool) -> None:
    """Let a gradient into the factors of a parameter, and refresh the bases where it is time, or make them."""
    beta = group["shampoo_beta"]
    weight = (1 - beta) / (1 - beta ** state[STEPS].clamp(min=1))
    # both before a factor changes
    roots = [gradient, gradient.mT]
    if group["use_kl_shampoo"] and not first:
        others = (("R", "Q_R"), ("L", "Q_L"))
        roots = [
            whitened(x, state[factor], state[basis]) if factor in state else x
            for x, (factor, basis) in zip(roots, others, strict=True)
        ]
    refreshes = group[CLOCK] % group["precondition_frequency"] == 0
    for dim, ((factor, basis), root) in enumerate(zip(SIDES, roots, strict=True)):
        if factor not in state:
            continue
        divisor = gradient.shape[1 - dim] if group["use_kl_shampoo"] else 1
        update_factor(state[factor], root, divisor, weight, accepted)
        if first:
            state[basis].copy_(eigenbasis(state[factor]))
        elif refreshes:
            new, order = refreshed(state[factor], state[basis], group["basis_method"])
            squares = local(state[EXP_AVG_SQ])
            squares.copy_(torch.where(accepted, squares.index_select(dim, order), squares))
            state[basis].copy_(torch.where(accepted, new, state[basis]))


def _adam(
    p: Tensor, state: dict[str, Any], gradient: Tensor, accepted: Tensor, steps: Tensor, group: dict[str, Any]
) -> None:
    """Adam's step in the bases of a parameter, and weight decay: nothing where not accepted."""
    beta1, beta2 = group["betas"]
    momentum, squares = local(state[EXP_AVG]), local(state[EXP_AVG_SQ])
    bases = [state.get(basis) for _, basis in SIDES]
    momentum.lerp_(torch.where(accepted, gradient, momentum), 1 - beta1)
    # an infinity would stay for ever
    new = to_basis(gradient, *bases).square().clamp(max=torch.finfo(squares.dtype).max)
    squares.lerp_(torch.where(accepted, new, squares), 1 - beta2)
    direction = to_basis(momentum, *bases) / (1 - beta1**steps)
    direction /= (squares / (1 - beta2**steps)).sqrt() + group["eps"]
    lr = group["lr"] * accepted.double()
    kept = p.to(momentum.dtype) * (1 - lr * group["weight_decay"])
    p.copy_(kept - from_basis(direction, *bases) * lr)
