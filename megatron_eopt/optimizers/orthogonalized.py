"""The base class of optimizers whose update is an orthogonalized momentum."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.optimizers import bulk
from megatron_eopt.optimizers.batch import Batch, GroupRates, local
from megatron_eopt.optimizers.bulk import Scalar
from megatron_eopt.optimizers.checks import check_rates
from megatron_eopt.optimizers.logical import LogicalMatrices
from megatron_eopt.optimizers.skipping import names_of_last, parameter_names
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.optimizers.stepping import SteppingOptimizer
from megatron_eopt.orthogonalize.precision import MatmulPrecision, fp32_products, validate_matmul_precision
from megatron_eopt.parallel.layout import local_rows, on_one_rank

MOMENTUM_BUFFER = "momentum_buffer"


class OrthogonalizedOptimizer(SteppingOptimizer, LogicalMatrices):
    """Momentum, orthogonalized and scaled, as the update of matrices.

    For a parameter ``p`` with gradient ``g``, in this order:

    1. weight decay: ``p -= lr * weight_decay * p``, or (L2) ``g + weight_decay * p`` takes the place of ``g``;
    2. momentum, an exponential moving average: ``m += (1 - beta) (g - m)``;
    3. Nesterov's look-ahead ``u = (1 - beta) g + beta m``, or ``u = m``;
    4. ``p -= lr * orthogonalize(p, u)``.

    Gradients are never written to, and a parameter without one is left as it is, and so is one whose gradient is not
    finite: see :mod:`~megatron_eopt.optimizers.skipping`. A step leaves every process-wide setting of torch as it found
    it.

    A parameter whose attribute ``logical_matrices`` is a :class:`~megatron_eopt.matrices.Split` is orthogonalized and
    scaled as the matrices that it declares, whatever ``split_qkv`` says; a stack of them may have three dimensions.

    Args:
        params: matrices, or groups of them.
        lr: learning rate, at least 0.
        momentum_beta: ``beta``, in [0, 1).
        use_nesterov: whether to look ahead.
        weight_decay: at least 0.
        use_decoupled_weight_decay: decay the parameter (as AdamW does), or add to the gradient.
        split_qkv: orthogonalize and scale the parts of fused query, key and value projections separately.
        is_qkv_fn: tells which parameters are fused; needed by ``split_qkv``.
        qkv_split_shapes: rows of q, k and v, which follow one another in dimension 0; needed by ``split_qkv``.
        fp32_matmul_prec: ``low``, ``medium``, ``high`` or ``highest``: precision of this optimizer's products.
        orthogonalize_fn: maps a matrix to its orthogonal factor; the identity, with a warning, if missing.
        scale_factor_fn: maps rows and columns of a matrix to the factor of its update; 1, with a warning, if missing.
        **kwargs: further settings that each group may have a value of its own for.

    Raises:
        ValueError: for a parameter that is not a matrix, a setting out of its range, or a split that is not described.
    """

    momentum_key = "momentum_beta"
    """Name of the momentum among the settings of a group."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum_beta: float,
        use_nesterov: bool,
        weight_decay: float,
        use_decoupled_weight_decay: bool,
        split_qkv: bool,
        is_qkv_fn: Callable[[Tensor], bool] | None,
        qkv_split_shapes: Sequence[int] | None,
        fp32_matmul_prec: MatmulPrecision,
        orthogonalize_fn: Callable[[Tensor], Tensor] | None = None,
        scale_factor_fn: Callable[[int, int], float] | None = None,
        **kwargs: Any,
    ) -> None:
        validate_matmul_precision(fp32_matmul_prec)
        self.use_nesterov = use_nesterov
        self.use_decoupled_weight_decay = use_decoupled_weight_decay
        self.split_qkv = split_qkv
        self.is_qkv_fn = is_qkv_fn
        self.qkv_split_shapes = self._check_split(qkv_split_shapes) if split_qkv else None
        self.fp32_matmul_prec = fp32_matmul_prec
        self._set_functions(orthogonalize_fn, scale_factor_fn)
        defaults = {"lr": lr, self.momentum_key: momentum_beta, "weight_decay": weight_decay, **kwargs}
        super().__init__(params, defaults)

    def _set_functions(
        self,
        orthogonalize_fn: Callable[[Tensor], Tensor] | None,
        scale_factor_fn: Callable[[int, int], float] | None,
    ) -> None:
        name = type(self).__name__
        if orthogonalize_fn is None:
            warnings.warn(f"{name} has no orthogonalize_fn: updates are not orthogonalized", stacklevel=4)
        if scale_factor_fn is None:
            warnings.warn(f"{name} has no scale_factor_fn: updates are not scaled", stacklevel=4)
        self.orthogonalize_fn = orthogonalize_fn or _identity
        self.scale_factor_fn = scale_factor_fn or _one

    def _check_group(self, group: dict[str, Any]) -> None:
        name = type(self).__name__
        check_rates(name, group)
        if not 0 <= group[self.momentum_key] < 1:
            raise ValueError(f"{name}: {self.momentum_key} must lie in [0, 1), got {group[self.momentum_key]}")
        for parameter, called in zip(group["params"], names_of_last(self.param_groups, shapes=False), strict=True):
            self._check_parameter(parameter, called)

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum."""
        return [StateTensor(MOMENTUM_BUFFER)]

    def _take(self, accepted: Tensor) -> None:
        self._run(self._batches(), accepted, [(group["lr"], group["weight_decay"]) for group in self.param_groups])

    def _names(self) -> list[str]:
        return parameter_names(self.param_groups)

    def _takes_part(self, place: int, parameter: Tensor) -> bool:
        """Whether a parameter is worked on in this step; if it is not accepted, it stays as it is nevertheless."""
        return parameter.grad is not None

    def _batches(self) -> list[Batch]:
        batches = []
        first = 0
        for group in self.param_groups:
            taken = [(i, p) for i, p in enumerate(group["params"], first) if self._takes_part(i, p)]
            first += len(group["params"])
            momenta = [local(self._state_of(p)[MOMENTUM_BUFFER]) for _, p in taken]
            batches.append(
                Batch(
                    places=[i for i, _ in taken],
                    parameters=[p for _, p in taken],
                    momenta=momenta,
                    # where no gradient is, but other ranks wait for this one: see bulk.replace_rejected
                    gradients=[
                        m if p.grad is None else local(p.grad).to(m.dtype)
                        for (_, p), m in zip(taken, momenta, strict=True)
                    ],
                    further=[self._further_state(p) for _, p in taken],
                    settings={key: value for key, value in group.items() if key not in ("params", "param_names")},
                )
            )
        return batches

    def _further_state(self, parameter: Tensor) -> list[Tensor]:
        """What is kept of a parameter beside its momentum, and changed in a step: this rank's part."""
        return []

    def _run(self, batches: Sequence[Batch], accepted: Tensor, rates: GroupRates) -> None:
        self._update(batches, accepted, rates)

    def _update(self, batches: Sequence[Batch], accepted: Tensor, rates: GroupRates) -> None:
        """Update the parameters of all groups, without waiting for the device."""
        flags = accepted.unbind()
        accepted_of = [torch.stack([flags[i] for i in batch.places]) if batch.places else accepted for batch in batches]
        updates: list[Tensor] = []
        for batch, of_batch, (lr, weight_decay) in zip(batches, accepted_of, rates, strict=True):
            updates += self._average(batch, of_batch, lr, weight_decay)
        with fp32_products(self.fp32_matmul_prec):
            factors = self._orthogonalize(batches, updates, accepted_of)
        self._apply(batches, factors, [lr for lr, _ in rates], accepted_of)

    def _average(self, batch: Batch, accepted: Tensor, lr: Scalar, weight_decay: Scalar) -> list[Tensor]:
        if not batch.places:
            return []
        parameters, gradients = [local(p) for p in batch.parameters], batch.gradients
        decays = isinstance(weight_decay, Tensor) or weight_decay != 0
        if decays and self.use_decoupled_weight_decay:
            bulk.decay(parameters, lr, weight_decay, accepted)
        elif decays:
            gradients = bulk.with_decay(gradients, parameters, weight_decay)
        return self._follow(batch, gradients, accepted)

    def _follow(self, batch: Batch, gradients: Sequence[Tensor], accepted: Tensor) -> list[Tensor]:
        """Let the momenta of a group follow its gradients; returns what is orthogonalized."""
        gradients = bulk.replace_rejected(gradients, batch.momenta, accepted)
        return bulk.average(batch.momenta, gradients, batch.settings[self.momentum_key], self.use_nesterov)

    def _orthogonalize(
        self, batches: Sequence[Batch], updates: list[Tensor], accepted: Sequence[Tensor]
    ) -> list[Tensor]:
        """The updates of all parameters of all batches, before the learning rate.

        Args:
            batches: one for each group, some perhaps without parameters.
            updates: what is orthogonalized, of one parameter after another; the list may be emptied.
            accepted: for each batch, which of its parameters take part in this step.
        """
        each = ((parameter, batch.settings) for batch in batches for parameter in batch.parameters)
        return [
            self.orthogonalize(parameter, update, **settings)
            for (parameter, settings), update in zip(each, updates, strict=True)
        ]

    def _apply(
        self, batches: Sequence[Batch], updates: Sequence[Tensor], lrs: Sequence[Scalar], accepted: Sequence[Tensor]
    ) -> None:
        """Let all parameters of all batches take their steps.

        Args:
            batches: one for each group, some perhaps without parameters.
            updates: of one parameter after another, before the learning rate.
            lrs: the learning rate of each batch.
            accepted: for each batch, which of its parameters take part in this step.
        """
        of_parameters = iter(updates)
        for batch, lr, of_batch in zip(batches, lrs, accepted, strict=True):
            if batch.places:
                of_group = [next(of_parameters) for _ in batch.places]
                bulk.apply([local(p) for p in batch.parameters], of_group, lr, of_batch)

    def orthogonalize(self, p: Tensor, grad: Tensor, **group_settings: Any) -> Tensor:
        """The update of one parameter, before the learning rate; the method for subclasses to override.

        Args:
            p: the parameter, for what it carries as attributes.
            grad: its momentum; not to be written to.
            **group_settings: the settings of its group.

        Returns:
            A tensor of the shape of ``grad``.
        """
        rows = local_rows(on_one_rank((grad.shape[-2], grad.shape[-1])), self.split_of(p))
        return rows.merge([self._orthogonalize_matrix(part) for part in rows.split(grad)])

    def _orthogonalize_matrix(self, matrix: Tensor) -> Tensor:
        return self.orthogonalize_fn(matrix) * self.scale_factor_fn(*matrix.shape)


# functions with a name can be pickled
def _identity(update: Tensor) -> Tensor:
    return update


def _one(rows: int, cols: int) -> float:
    return 1.0
