"""The base class of optimizers whose update is an orthogonalized momentum."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from megatron_eopt.matrices import check_split_shapes, merge_rows, split_rows
from megatron_eopt.orthogonalize.precision import MatmulPrecision, fp32_products, validate_matmul_precision

MOMENTUM_BUFFER = "momentum_buffer"


class OrthogonalizedOptimizer(Optimizer):
    """Momentum, orthogonalized and scaled, as the update of matrices.

    For a parameter ``p`` with gradient ``g``, in this order:

    1. weight decay: ``p -= lr * weight_decay * p``, or (L2) ``g + weight_decay * p`` takes the place of ``g``;
    2. momentum, an exponential moving average: ``m += (1 - beta) (g - m)``;
    3. Nesterov's look-ahead ``u = (1 - beta) g + beta m``, or ``u = m``;
    4. ``p -= lr * orthogonalize(p, u)``.

    Gradients are never written to, and a parameter without one is left as it is. A step leaves every process-wide
    setting of torch as it found it.

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

    split_lengths: tuple[int, ...] = (3,)
    """How many parts a fused projection may have."""

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
        self.orthogonalize_fn = orthogonalize_fn or (lambda update: update)
        self.scale_factor_fn = scale_factor_fn or (lambda rows, cols: 1.0)

    def _check_split(self, qkv_split_shapes: Sequence[int] | None) -> tuple[int, ...] | None:
        if self.is_qkv_fn is None:
            raise ValueError("split_qkv needs is_qkv_fn, which tells the fused parameters, got None")
        return check_split_shapes(qkv_split_shapes, self.split_lengths)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices.

        Raises:
            ValueError: for a parameter that is not a matrix, or a setting out of its range.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        name = type(self).__name__
        for key in ("lr", "weight_decay"):
            if group[key] < 0:
                raise ValueError(f"{name}: {key} must be at least 0, got {group[key]}")
        if not 0 <= group[self.momentum_key] < 1:
            raise ValueError(f"{name}: {self.momentum_key} must lie in [0, 1), got {group[self.momentum_key]}")
        for index, parameter in enumerate(group["params"]):
            if parameter.ndim != 2:
                raise ValueError(
                    f"{name} orthogonalizes matrices, but parameter {index} of group {len(self.param_groups) - 1} has "
                    f"shape {tuple(parameter.shape)}: give it to another optimizer (AdamW, say)"
                )
            if self._is_split(parameter):
                self._check_qkv(parameter)

    def _is_split(self, parameter: Tensor) -> bool:
        return self.split_qkv and self.is_qkv_fn is not None and self.is_qkv_fn(parameter)

    def _check_qkv(self, parameter: Tensor) -> None:
        assert self.qkv_split_shapes is not None  # checked at construction
        if parameter.size(0) != sum(self.qkv_split_shapes):
            raise ValueError(
                f"{type(self).__name__}: a fused projection of {parameter.size(0)} rows cannot be split into "
                f"{list(self.qkv_split_shapes)}, which are {sum(self.qkv_split_shapes)}"
            )

    def init_state(self) -> None:
        """Create the state of every parameter, with a gradient or not, as a checkpoint needs it before it can load."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._momentum(parameter)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if MOMENTUM_BUFFER not in state:
            state[MOMENTUM_BUFFER] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state[MOMENTUM_BUFFER]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss and the gradients anew; called once, with gradients enabled.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, settings)
        return loss

    def _update(self, parameter: Tensor, settings: dict[str, Any]) -> None:
        momentum = self._momentum(parameter)
        gradient = parameter.grad.to(momentum.dtype)  # type: ignore[union-attr]
        lr, beta, weight_decay = settings["lr"], settings[self.momentum_key], settings["weight_decay"]
        if weight_decay and self.use_decoupled_weight_decay:
            parameter.mul_(1 - lr * weight_decay)
        elif weight_decay:
            gradient = gradient.add(parameter, alpha=weight_decay)
        momentum.lerp_(gradient, 1 - beta)
        update = gradient.lerp(momentum, beta) if self.use_nesterov else momentum
        with fp32_products(self.fp32_matmul_prec):
            update = self.orthogonalize(parameter, update, **settings)
        parameter.add_(update, alpha=-lr)

    def orthogonalize(self, p: Tensor, grad: Tensor, **group_settings: Any) -> Tensor:
        """The update of one parameter, before the learning rate; the method for subclasses to override.

        Args:
            p: the parameter, for what it carries as attributes.
            grad: its momentum; not to be written to.
            **group_settings: the settings of its group.

        Returns:
            A tensor of the shape of ``grad``.
        """
        if not self._is_split(p):
            return self._orthogonalize_matrix(grad)
        assert self.qkv_split_shapes is not None  # checked at construction
        parts = split_rows(grad, self.qkv_split_shapes)
        return merge_rows([self._orthogonalize_matrix(part) for part in parts], self.qkv_split_shapes)

    def _orthogonalize_matrix(self, matrix: Tensor) -> Tensor:
        return self.orthogonalize_fn(matrix) * self.scale_factor_fn(*matrix.shape)
