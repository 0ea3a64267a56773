"""The base class of optimizers whose update is an orthogonalized momentum."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.matrices import declared_split
from megatron_eopt.optimizers import bulk
from megatron_eopt.optimizers.batch import Batch, local
from megatron_eopt.optimizers.bulk import DecayMethod, Scalar
from megatron_eopt.optimizers.checks import check_rates
from megatron_eopt.optimizers.logical import LogicalMatrices
from megatron_eopt.optimizers.momentum_groups import DECOUPLED, METHOD, check_flag, decay_method, in_own_words
from megatron_eopt.optimizers.one_by_one import decay, decays, settings_taken, update_of
from megatron_eopt.optimizers.skipping import names_of_last, parameter_names
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.optimizers.stepping import SteppingOptimizer
from megatron_eopt.orthogonalize.precision import MatmulPrecision, fp32_products, validate_matmul_precision
from megatron_eopt.parallel.layout import local_rows, on_one_rank

MOMENTUM_BUFFER = "momentum_buffer"


class OrthogonalizedOptimizer(SteppingOptimizer, LogicalMatrices):
    """Momentum, orthogonalized and scaled, as the update of matrices.

    For a parameter ``p`` with gradient ``g``, in this order:

    1. weight decay: ``p -= lr * weight_decay * p``, or (L2) ``g + weight_decay * p`` takes the place of ``g``; see
       :data:`~megatron_eopt.optimizers.bulk.DecayMethod` for two more;
    2. momentum, an exponential moving average: ``m += (1 - beta) (g - m)``;
    3. Nesterov's look-ahead ``u = (1 - beta) g + beta m``, or ``u = m``;
    4. ``p -= lr * orthogonalize(p, u)``.

    Gradients are never written to, and a parameter without one is left as it is, and so is one whose gradient is not
    finite: see :mod:`~megatron_eopt.optimizers.skipping`. A step leaves every process-wide setting of torch as it found
    it.

    A parameter whose attribute ``logical_matrices`` is a :class:`~megatron_eopt.matrices.Split` is orthogonalized and
    scaled as the matrices that it declares, whatever ``split_qkv`` says; a stack of them may have three dimensions.

    A group may have its own ``lr``, ``momentum_beta``, ``use_nesterov``, ``weight_decay``,
    ``use_decoupled_weight_decay``, ``weight_decay_method`` and what ``kwargs`` adds. The values travel with
    ``state_dict``; where a loaded one lacks a key, the group keeps its value. A changed value is in force in the next
    step. ``momentum`` and ``nesterov`` are taken for other names of ``momentum_beta`` and ``use_nesterov``.

    All updates are computed before anything is changed: where ``orthogonalize_fn``, ``scale_factor_fn`` or an
    ``orthogonalize`` of a subclass fails, parameters and state are as they were, bit for bit.

    Args:
        params: matrices, or groups of them. With an ``orthogonalize_fn``, or with an ``orthogonalize`` of a subclass,
            they may have more dimensions.
        lr: learning rate, at least 0.
        momentum_beta: ``beta``, in [0, 1).
        use_nesterov: whether to look ahead.
        weight_decay: at least 0.
        use_decoupled_weight_decay: decay the parameter (as AdamW does), or add to the gradient.
        split_qkv: orthogonalize and scale the parts of fused query, key and value projections separately.
        is_qkv_fn: tells which parameters are fused; needed by ``split_qkv``.
        qkv_split_shapes: rows of q, k and v, which follow one another in dimension 0; needed by ``split_qkv``.
        fp32_matmul_prec: ``low``, ``medium``, ``high`` or ``highest``: precision of this optimizer's products.
        orthogonalize_fn: maps a matrix to its orthogonal factor; the identity, with a warning, if missing. It gets a
            parameter of more dimensions whole.
        scale_factor_fn: maps rows and columns of a matrix to the factor of its update; 1, with a warning, if missing.
            Of more dimensions it gets the last two.
        weight_decay_method: ``decoupled``, ``l2``, ``independent`` or ``palm``; None for what
            ``use_decoupled_weight_decay`` says, which is False for ``l2`` and True for every other.
        **kwargs: further settings that each group may have a value of its own for.

    Raises:
        ValueError: for a parameter that is not a matrix, a setting out of its range, a split that is not described, or
            weight decay settings that contradict each other.
        TypeError: for a flag that is no bool.
    """

    momentum_key = "momentum_beta"
    """Name of the momentum among the settings of a group."""

    nesterov_key = "use_nesterov"
    """Name of Nesterov's look-ahead among the settings of a group."""

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
        name = type(self).__name__
        validate_matmul_precision(fp32_matmul_prec)
        check_flag(name, "split_qkv", split_qkv)
        self.split_qkv = split_qkv
        self.is_qkv_fn = is_qkv_fn
        self.qkv_split_shapes = self._check_split(qkv_split_shapes) if split_qkv else None
        self.fp32_matmul_prec = fp32_matmul_prec
        self._set_functions(orthogonalize_fn, scale_factor_fn)
        defaults = {
            "lr": lr,
            self.momentum_key: momentum_beta,
            self.nesterov_key: use_nesterov,
            "weight_decay": weight_decay,
            DECOUPLED: use_decoupled_weight_decay,
            METHOD: weight_decay_method,
            **kwargs,
        }
        self._check_flags(defaults)
        decay_method(name, defaults)
        super().__init__(params, in_own_words(name, defaults, {}, self._keys_of_momentum))

    @property
    def use_nesterov(self) -> bool:
        """Whether groups look ahead that say nothing else."""
        return bool(self.defaults[self.nesterov_key])

    @property
    def use_decoupled_weight_decay(self) -> bool:
        """Whether groups have another weight decay than L2 that say nothing else."""
        return bool(self.defaults[DECOUPLED])

    @property
    def _keys_of_momentum(self) -> tuple[str, str]:
        return self.momentum_key, self.nesterov_key

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices.

        Raises:
            ValueError: for a parameter that the optimizer cannot have, or a setting out of its range.
            TypeError: for a flag that is no bool.
        """
        if isinstance(param_group, dict):  # else torch says what is wrong
            self._take_words(param_group, self.defaults)
        super().add_param_group(param_group)

    def _take_words(self, group: dict[str, Any], known: Mapping[str, Any]) -> None:
        """Rename what a group gives, in place: the dict of the user is the group."""
        own = in_own_words(type(self).__name__, group, known, self._keys_of_momentum)
        if own != group:
            group.clear()
            group.update(own)

    def _completed(self, saved: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        name = type(self).__name__
        group = {**known, **in_own_words(name, saved, known, self._keys_of_momentum)}
        self._check_settings(group)
        return group

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

    def _check_flags(self, group: Mapping[str, Any]) -> None:
        for key in (self.nesterov_key, DECOUPLED):
            check_flag(type(self).__name__, key, group[key])

    def _check_settings(self, group: dict[str, Any]) -> None:
        super()._check_settings(group)
        self._take_words(group, group)
        self._check_flags(group)
        decay_method(type(self).__name__, group)
        # a device would be waited for to look into tensors
        self._check_ranges({key: 0.0 if isinstance(value, Tensor) else value for key, value in group.items()})

    def _check_ranges(self, group: Mapping[str, Any]) -> None:
        name = type(self).__name__
        check_rates(name, group)
        if not 0 <= group[self.momentum_key] < 1:
            raise ValueError(f"{name}: {self.momentum_key} must lie in [0, 1), got {group[self.momentum_key]}")

    def _check_group(self, group: dict[str, Any]) -> None:
        self._check_ranges(group)
        for parameter, called in zip(group["params"], names_of_last(self.param_groups, shapes=False), strict=True):
            self._check_parameter(parameter, called)

    def settings_of_groups(self) -> dict[str, Any]:
        """Among them the kind of weight decay, by its name where the flag says it."""
        return super().settings_of_groups() | {METHOD: decay_method(type(self).__name__, self.defaults)}

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """The momentum."""
        return [StateTensor(MOMENTUM_BUFFER)]

    def _check_parameter(self, parameter: Tensor, place: str) -> None:
        if parameter.ndim > 2 and declared_split(parameter) is None and self._takes_any_dimensions:
            if self._is_split(parameter):
                self._check_qkv(parameter)
        else:
            super()._check_parameter(parameter, place)

    @property
    def _takes_any_dimensions(self) -> bool:
        """Whether what orthogonalizes is the user's, who may know more than matrices."""
        return self.orthogonalize_fn is not _identity or self._overrides(OrthogonalizedOptimizer)

    def _overrides(self, cls: type["OrthogonalizedOptimizer"]) -> bool:
        """Whether a subclass of a class, or the user for this object, has another :meth:`orthogonalize`."""
        return type(self).orthogonalize is not cls.orthogonalize or "orthogonalize" in vars(self)

    @property
    def _steps_one_by_one(self) -> bool:
        """Whether :meth:`orthogonalize`, which may be or call the user's code, is called for each parameter."""
        return True

    def _take(self, accepted: Tensor) -> None:
        new = [parameter for parameter in self._parameters() if parameter not in self.state]
        try:
            self._run(self._batches(), accepted)
        except Exception:
            for parameter in new if self._steps_one_by_one else ():
                self.state.pop(parameter, None)
            raise

    def _decay_of(self, group: Mapping[str, Any]) -> tuple[Scalar, DecayMethod]:
        """The weight decay of a group, and how it is applied."""
        return group["weight_decay"], decay_method(type(self).__name__, group)

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
            weight_decay, method = self._decay_of(group)
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
                    lr=group["lr"],
                    weight_decay=weight_decay,
                    decay_method=method,
                )
            )
        return batches

    def _further_state(self, parameter: Tensor) -> list[Tensor]:
        """What is kept of a parameter beside its momentum, and changed in a step: this rank's part."""
        return []

    def _run(self, batches: Sequence[Batch], accepted: Tensor) -> None:
        self._update(batches, accepted)

    def _update(self, batches: Sequence[Batch], accepted: Tensor) -> None:
        """Update the parameters of all groups, without waiting for the device."""
        flags = accepted.unbind()
        accepted_of = [torch.stack([flags[i] for i in batch.places]) if batch.places else accepted for batch in batches]
        each = [pair for pair in zip(batches, accepted_of, strict=True) if pair[0].places]
        if self._steps_one_by_one:  # which may fail: nothing is changed before all updates are there
            updates = [update for pair in each for update in self._average(*pair, bulk.averaged)]
            factors = self._orthogonalize_all(batches, updates, accepted_of)
            for pair in each:
                self._average(*pair, bulk.average, last=True)
                decay(pair[0], slice(None), pair[1])
        else:
            for pair in each:
                decay(pair[0], slice(None), pair[1])
            updates = [update for pair in each for update in self._average(*pair, bulk.average)]
            factors = self._orthogonalize_all(batches, updates, accepted_of)
        self._apply(batches, factors, accepted_of)

    def _orthogonalize_all(
        self, batches: Sequence[Batch], updates: list[Tensor], accepted: Sequence[Tensor]
    ) -> list[Tensor]:
        with fp32_products(self.fp32_matmul_prec):
            return self._orthogonalize(batches, updates, accepted)

    def _average(
        self, batch: Batch, accepted: Tensor, average: Callable[..., list[Tensor]], last: bool = False
    ) -> list[Tensor]:
        """The updates before they are orthogonalized; where they are there already, the momenta alone."""
        gradients = batch.gradients
        if decays(batch) and batch.decay_method == "l2":
            gradients = bulk.with_decay(gradients, [local(p) for p in batch.parameters], batch.weight_decay)
        return self._follow(batch, gradients, accepted, average, batch.settings[self.nesterov_key] and not last)

    def _follow(
        self,
        batch: Batch,
        gradients: Sequence[Tensor],
        accepted: Tensor,
        average: Callable[..., list[Tensor]],
        nesterov: bool,
    ) -> list[Tensor]:
        """Let the momenta of a group follow its gradients; returns what is orthogonalized."""
        gradients = bulk.replace_rejected(gradients, batch.momenta, accepted)
        return average(batch.momenta, gradients, batch.settings[self.momentum_key], nesterov)

    def _orthogonalize(
        self, batches: Sequence[Batch], updates: list[Tensor], accepted: Sequence[Tensor]
    ) -> list[Tensor]:
        """The updates of all parameters of all batches, before the learning rate.

        Args:
            batches: one for each group, some perhaps without parameters.
            updates: what is orthogonalized, of one parameter after another; the list may be emptied.
            accepted: for each batch, which of its parameters take part in this step.
        """
        each = (
            (batch, index, flags)
            for batch, flags in zip(batches, accepted, strict=True)
            for index in range(len(batch.places))
        )
        taken = settings_taken(self.orthogonalize)
        for number, of_parameter in enumerate(each):
            if updates[number].numel():
                updates[number] = update_of(self.orthogonalize, taken, *of_parameter, updates[number])
        return updates

    def _apply(self, batches: Sequence[Batch], updates: Sequence[Tensor], accepted: Sequence[Tensor]) -> None:
        """Let all parameters of all batches take their steps.

        Args:
            batches: one for each group, some perhaps without parameters.
            updates: of one parameter after another, before the learning rate.
            accepted: for each batch, which of its parameters take part in this step.
        """
        of_parameters = iter(updates)
        for batch, of_batch in zip(batches, accepted, strict=True):
            if batch.places:
                of_group = [next(of_parameters) for _ in batch.places]
                bulk.apply([local(p) for p in batch.parameters], of_group, batch.lr, of_batch)

    def orthogonalize(self, p: Tensor, grad: Tensor, **group_settings: Any) -> Tensor:
        """The update of one parameter, before the learning rate; the method for subclasses to override.

        An override may take all settings of the group, those that it names, or none. A step calls it for each
        parameter that has a gradient with entries, before it changes any; while it runs, ``p`` is as it is after its
        decoupled weight decay.

        Args:
            p: the parameter, for what it carries as attributes; or any tensor with these. Not to be written to.
            grad: its momentum, after the look-ahead; a tensor of its own.
            **group_settings: the settings of its group.

        Returns:
            A tensor of the shape of ``grad``.
        """
        shapes = self.split_shapes(p)
        if declared_split(p) is None and shapes is None:
            return self._orthogonalize_matrix(grad)
        if declared_split(p) is None:
            return torch.cat([self._orthogonalize_matrix(part) for part in grad.split(shapes)])
        rows = local_rows(on_one_rank((grad.shape[-2], grad.shape[-1])), self.split_of(p))
        return rows.merge([self._orthogonalize_matrix(part) for part in rows.split(grad)])

    def _orthogonalize_matrix(self, matrix: Tensor) -> Tensor:
        # the scale of a matrix without entries may divide by zero
        return self.orthogonalize_fn(matrix) * self.scale_factor_fn(*matrix.shape[-2:]) if matrix.numel() else matrix


# functions with a name can be pickled
def _identity(update: Tensor) -> Tensor:
    return update


def _one(rows: int, cols: int) -> float:
    return 1.0
