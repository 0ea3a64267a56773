"""Base class of optimizers that orthogonalize momentum."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.kernels.precision import MatmulPrecision
from megatron_eopt.matrices import declared_split, experts
from megatron_eopt.parallel.layout import local_rows, on_one_rank
from megatron_eopt.settings.groups import DECOUPLED, METHOD, check_decay_method
from megatron_eopt.settings.records import EXECUTION, DecayMethod, Setting, names_of
from megatron_eopt.settings.values import BELOW_1
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.momenta.momentum_optimizer import OF_PARAMETERS, MomentumOptimizer
from megatron_eopt.step.momenta.momentum_stack import MomentumStack, Update
from megatron_eopt.step.parameters import check_matrix, names_of_last
from megatron_eopt.step.stacks import Rule
from megatron_eopt.step.users_functions import OF_USERS, checked


def check_given(optimizer: BaseOptimizer, given: Mapping[str, Any]) -> None:
    """Refuse settings of an update that no group could have."""
    unknown = given.keys() - optimizer.defaults.keys()
    for group in optimizer.param_groups:
        unknown -= group.keys()
    if unknown:
        raise TypeError(f"{type(optimizer).__name__}.orthogonalize() has no setting {', '.join(sorted(unknown))}")


def refuse_blockwise(optimizer: BaseOptimizer, measured: str, otherwise: str = "") -> None:
    """Refuse ``blockwise`` where global matrices are measured, at every number of ranks."""
    if optimizer.tp_mode == "blockwise":
        raise ValueError(
            f"{type(optimizer).__name__}: with tp_mode blockwise the {measured} would be those of shards, which belong "
            f"to no matrix of the model and to no other number of ranks: take an exact tp_mode (auto, duplicated, ...)"
            f"{otherwise}"
        )


class OrthogonalizedOptimizer(MomentumOptimizer):
    """Momentum, orthogonalized and scaled, as the update of matrices.

    For a parameter ``p`` with gradient ``g``, in this order:

    1. weight decay: ``p -= lr * weight_decay * p``, or (L2) ``g + weight_decay * p`` replaces ``g``; see
       :data:`~megatron_eopt.settings.records.DecayMethod` for two more;
    2. momentum, an exponential moving average: ``m += (1 - beta) (g - m)``;
    3. Nesterov's look-ahead ``u = (1 - beta) g + beta m``, or ``u = m``;
    4. ``p -= lr * orthogonalize(p, u)``.

    Gradients are not written to. A step with one that is not finite is skipped: see
    :mod:`~megatron_eopt.step.nonfinite`. A step leaves every process-wide setting of torch as it found it.

    A parameter whose attribute ``logical_matrices`` is a :class:`~megatron_eopt.matrices.Split` is orthogonalized and
    scaled as the matrices that it declares, whatever ``split_qkv`` says; a stack of them may have three dimensions.

    A group may have its own ``lr``, ``momentum_beta``, ``use_nesterov``, ``weight_decay``,
    ``use_decoupled_weight_decay``, ``weight_decay_method`` and what ``kwargs`` adds; ``momentum`` and ``nesterov`` are
    other names of the second and third. The values travel with ``state_dict``; what a loaded one lacks stays as it is.
    A changed value is in force in the next step.

    Args:
        params: matrices, or groups of them. With an ``orthogonalize_fn``, or with an ``orthogonalize`` of a subclass,
            they may have more dimensions.
        lr: learning rate, at least 0.
        momentum_beta: ``beta``, in [0, 1).
        use_nesterov: whether to look ahead.
        weight_decay: at least 0.
        use_decoupled_weight_decay: decay the parameter (as AdamW does), or add to the gradient.
        split_qkv: orthogonalize and scale the matrices of fused query, key and value projections separately.
        is_qkv_fn: tells which parameters are fused; needed by ``split_qkv``.
        qkv_split_shapes: rows of q, k and v, which follow one another in dimension 0; needed by ``split_qkv``.
        fp32_matmul_prec: ``low``, ``medium``, ``high`` or ``highest``: precision of this optimizer's products.
        orthogonalize_fn: maps a matrix, or a whole parameter of more dimensions, to its orthogonal factor; without, the
            identity with a warning.
        scale_factor_fn: maps rows and columns, or the first two dimensions, to the factor of an update; without, 1 with
            a warning.
        weight_decay_method: ``decoupled``, ``l2``, ``independent`` or ``palm``; None for what
            ``use_decoupled_weight_decay`` says, which is False for ``l2`` and True for every other.
        **kwargs: settings of your own, which each group may have a value for.

    Raises:
        ValueError: for a parameter that is not a matrix, a setting out of its range, a split that is not described, or
            weight decay settings that contradict each other.
        TypeError: for a flag that is no bool.
    """

    own_settings: ClassVar[tuple[Setting, ...]] = (
        Setting("momentum_beta", check=BELOW_1),
        Setting("orthogonalize_fn", whole=True),
        Setting("scale_factor_fn", whole=True),
    )
    split_lengths: ClassVar[tuple[int, ...]] = (3,)
    by_users_alone = True
    momentum_key = "momentum_beta"
    nesterov_key = "use_nesterov"

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
        weight_decay_method: DecayMethod | None = None,
        **kwargs: Any,
    ) -> None:
        # methods, and settings of Muon and its relatives alone, which are no keys of groups
        for name in kwargs.keys() & {"execution", "tp_mode", *names_of(EXECUTION), *OF_USERS}:
            raise TypeError(f"{type(self).__name__}() has no {name}: see its signature for what it is called here")
        self.users_settings = frozenset(kwargs)
        super().__init__(params, locals(), kwargs)

    def _settle(self, values: dict[str, Any]) -> None:
        """Set functions of the user's; warn of missing ones."""
        for key, done in (("orthogonalize_fn", "orthogonalized"), ("scale_factor_fn", "scaled")):
            function = values.pop(key, None)
            if function is not None:
                vars(self)[key] = function
            users = self._overridden(key, "scaled_orthogonalize_fn")
            if not users and getattr(type(self), key) is getattr(OrthogonalizedOptimizer, key):
                warnings.warn(f"{type(self).__name__} has no {key}: updates are not {done}", stacklevel=5)

    @property
    def use_nesterov(self) -> bool:
        """Whether groups look ahead by default."""
        return bool(self.defaults.get(self.nesterov_key, False))

    @property
    def use_decoupled_weight_decay(self) -> bool:
        """Whether weight decay is decoupled by default."""
        return bool(self.defaults.get(DECOUPLED, True))

    # Groups.

    def _check_together(self, group: Mapping[str, Any]) -> None:
        if METHOD in self.defaults:
            check_decay_method(type(self).__name__, group)

    def _check_group(self, group: dict[str, Any]) -> None:
        for parameter, called in zip(group["params"], names_of_last(self.param_groups, shapes=False), strict=True):
            self._check_parameter(parameter, called)

    def _check_parameter(self, parameter: Tensor, called: str) -> None:
        users = self._overridden(*OF_PARAMETERS)
        if parameter.ndim <= 2 or declared_split(parameter) is not None or not users:  # who may know more than matrices
            check_matrix(type(self).__name__, parameter, f"orthogonalizes matrices, but {called}")
        self._check_split(parameter)

    def _check_split(self, parameter: Tensor) -> None:
        split = self.split_of(parameter)
        if len(self.split_lengths) > 1 or declared_split(parameter) is not None or split.is_whole:
            super()._check_split(parameter)
            return
        shapes = [part.rows or 0 for part in split.parts]
        if parameter.size(0) != sum(shapes):  # also of more dimensions, of which there is no layout
            raise ValueError(
                f"{type(self).__name__}: a fused projection of {parameter.size(0)} rows cannot be split into {shapes}, "
                f"which are {sum(shapes)}"
            )

    # The step.

    def orthogonalize(self, p: Tensor, grad: Tensor, **group_settings: Any) -> Tensor:
        """One parameter's update, before the learning rate; to override.

        An override may take all settings of the group, some by name, or none. A step calls it for each parameter that
        has a nonempty gradient; while it runs, ``p`` is as after its decoupled weight decay.

        Args:
            p: the parameter, or any tensor with its attributes. Not to be written to.
            grad: its momentum, after the look-ahead; a tensor of its own.
            **group_settings: the settings of its group.

        Returns:
            A tensor of the shape of ``grad``.
        """
        check_given(self, group_settings)
        split = self.split_of(p)
        if split.flattened and grad.ndim > 2:
            return OrthogonalizedOptimizer.orthogonalize(self, p, grad.flatten(1), **group_settings).view(grad.shape)
        if split.is_whole:
            return self._orthogonalize_matrix(grad)
        if grad.ndim > 2 and split.stacked is None:  # which no split of rows knows
            rows = [block.rows for block in split.pattern(grad.shape[0]).blocks]
            return torch.cat([self._orthogonalize_matrix(matrix) for matrix in grad.split(rows)])
        if split.stacked is not None:
            split = experts(len(grad), split)  # those that this rank has
        layout = on_one_rank((grad.shape[-2], grad.shape[-1]))
        matrices = local_rows(layout.transposed if split.transposed else layout, split)
        return matrices.merge([self._orthogonalize_matrix(matrix) for matrix in matrices.split(grad)])

    def _orthogonalize_matrix(self, matrix: Tensor) -> Tensor:
        # the scale of a matrix without entries may divide by zero
        result = self.scaled_orthogonalize_fn(matrix) if matrix.numel() else matrix
        return checked("scaled_orthogonalize_fn of a matrix", result, matrix)

    def scaled_orthogonalize_fn(self, grad: Tensor) -> Tensor:
        """One matrix's scaled update, to override or set."""
        factor = checked("orthogonalize_fn of a matrix", self.orthogonalize_fn(grad), grad)
        return factor * self.scale_factor_fn(*grad.shape[:2])

    def orthogonalize_fn(self, matrix: Tensor) -> Tensor:
        """The orthogonal factor; the matrix itself without a function."""
        return matrix

    def scale_factor_fn(self, rows: int, cols: int) -> float:
        """Factor of the orthogonal factor; 1 without a function."""
        return 1.0

    def update(self, stack: MomentumStack) -> Rule:
        """Muon's update of equal matrices.

        ``O`` is the orthogonal factor of each whole logical matrix of ``u``, on whichever ranks it lies.
        """
        u = yield stack.momentum()  # m += (1 - beta) (g - m);  u = (1 - beta) g + beta m
        O = yield stack.orthogonalize(u)  # ranks may wait here
        return Update(O, stack.scale)  # p -= lr * s O
