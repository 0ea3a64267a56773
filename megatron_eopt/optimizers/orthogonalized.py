"""Base class of optimizers that orthogonalize momentum."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.kernels.precision import MatmulPrecision, fp32_products
from megatron_eopt.matrices import declared_split, experts
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import local_rows, on_one_rank
from megatron_eopt.parallel.scheduler import Program
from megatron_eopt.settings.groups import DECOUPLED, METHOD, OTHER_NAMES, decay_method
from megatron_eopt.settings.modifiers import Modified, modified
from megatron_eopt.settings.of_class import is_ours
from megatron_eopt.settings.records import EXECUTION, DecayMethod, Setting, names_of
from megatron_eopt.settings.values import BELOW_1, Scalar
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.elementwise import MomentumStack, Update, decay, subtract
from megatron_eopt.step.nonfinite import Flag
from megatron_eopt.step.parameters import (
    check_matrix,
    local,
    names_of_last,
)
from megatron_eopt.step.session import StepCache
from megatron_eopt.step.stacks import Chunk, Inputs, Member, Rule, gradients_of, lockstep
from megatron_eopt.step.state import MOMENTUM_BUFFER, StateTensor
from megatron_eopt.step.users_functions import OF_USERS, checked
from megatron_eopt.step.users_step import users_step
from megatron_eopt.transforms.second_moment import divided

MUONS = ("execution", "tp_mode", *names_of(EXECUTION))  # settings that only Muon and its relatives have
# methods by which users make updates of whole parameters or matrices
OF_PARAMETERS = ("orthogonalize", "scaled_orthogonalize_fn", "orthogonalize_fn")


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


class OrthogonalizedOptimizer(BaseOptimizer):
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
    scales_factors_of_users: ClassVar[bool] = False  # whether a user's function leaves its factors unscaled
    momentum_key = "momentum_beta"
    nesterov_key = "use_nesterov"

    fp32_matmul_prec: MatmulPrecision

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
        for name in kwargs.keys() & {*OF_USERS, *OTHER_NAMES, *MUONS}:
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
                warnings.warn(f"{type(self).__name__} has no {key}: updates are not {done}", stacklevel=4)

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
        self.decay_method(group)

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

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Describe the momentum."""
        return [StateTensor(MOMENTUM_BUFFER, dtype=self.execution.momentum_dtype)]

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

    def _overridden(self, *names: str) -> list[str]:
        """Which of these methods a user has overridden or set."""
        owners = {name: next(cls for cls in type(self).__mro__ if name in vars(cls)) for name in names}
        return [name for name, cls in owners.items() if name in vars(self) or not is_ours(cls)]

    def update(self, stack: MomentumStack) -> Rule:
        """Muon's update of equal matrices.

        ``O`` is the orthogonal factor of each whole logical matrix of ``u``, on whichever ranks it lies.
        """
        u = yield stack.momentum()  # m += (1 - beta) (g - m);  u = (1 - beta) g + beta m
        O = yield stack.orthogonalize(u)  # ranks may wait here
        return Update(O, stack.scale)  # p -= lr * s O

    def _worked(self, chunk: Chunk[MomentumStack]) -> Program:
        """One chunk's step."""
        decay(chunk)
        updates = yield from lockstep([(stack, self.update(stack)) for stack in chunk.stacks])
        if not all(isinstance(update, Update) for update in updates.values()):
            raise TypeError(f"{type(self).__name__}.update() has to return an Update(factors, scale)")
        if any(stack.modified.moment2_method != "none" for stack in chunk.stacks):
            updates = divided(updates, chunk.engine)
        subtract(updates, chunk)
        chunk.end()

    def _inputs(self, ok: Flag) -> Inputs:
        """What the step reads; makes state that is missing."""
        return Inputs(self.param_groups, gradients_of(self._parameters(), self._begin_state()), ok)

    def _chunk_of(self, indices: Iterable[int], inputs: Inputs) -> Chunk[MomentumStack]:
        """The chunk of these parameters, which is kept from step to step, with what a step reads."""
        some = tuple(indices)
        chunk: Chunk[MomentumStack] = self._session.settled.chunks_for(some, partial(self._make_chunk, some))
        chunk.begin(inputs)
        for stack in chunk.stacks:
            stack.beta, stack.weight_decay = self._rates_of(stack.group)
            stack.decays = isinstance(stack.weight_decay, Tensor) or stack.weight_decay != 0
            stack.nesterov = self.nesterov_key in self.defaults and stack.group[self.nesterov_key]
        return chunk

    def _make_chunk(self, indices: Sequence[int]) -> Chunk[MomentumStack]:
        settled = self._session.settled
        group_of = [number for number, group in enumerate(self.param_groups) for _ in group["params"]]
        parameters = self._parameters()
        members = []
        for index in indices:
            p = parameters[index]
            matrices = self.engine.matrices[index]
            pairs = zip(self.key_ends(p), matrices, strict=True) if matrices else [("", None)]
            for number, (end, matrix) in enumerate(pairs):
                like = local(p).shape if matrix is None else (matrix.group, matrix.shape, matrix.rectangles)
                kind = group_of[index], p.dtype, like
                members.append(Member(p, group_of[index], index, number, end, kind))
        chunk = Chunk(self, self.engine, members, MomentumStack)
        for stack in chunk.stacks:
            first = stack.members[0]
            stack.kernels = None if settled.by_user else settled.kernels
            stack.modified = settled.modified[first.group]
            stack.has_views = stack.kernels is not None and not stack.modified.measured
            stack.rounded = self.execution.momentum_dtype is not None
            if settled.scales is not None and (self.scales_factors_of_users or not settled.by_user):
                stack.scale = settled.scales[first.index][first.number]
        return chunk

    def _take(self, ok: Flag) -> None:
        self._take_users(self._inputs(ok))

    def _take_users(self, inputs: Inputs) -> None:
        session = self._session
        assert session.nonfinite is not None  # a step is made
        of_updates = session.nonfinite.of_updates
        agree = partial(self._agree, present=session.stepping or [])

        def accept(updates: Mapping[int, Tensor]) -> Tensor:
            of_all = [updates.get(i) for i, _ in enumerate(self._parameters())]
            return of_updates.accept(of_all, agree) == 1

        chunk = self._chunk_of(inputs.gradients, inputs)
        session.changing = True
        with fp32_products(self.fp32_matmul_prec, as_torch=True):
            users_step(chunk, self._worked(chunk), self.orthogonalize, accept)

    def _settled(self, engine: Engine) -> StepCache:
        """Also find how groups are modified, and whether the user's methods make updates."""
        settled = super()._settled(engine)
        settled.modified = list(map(self._modified, self.param_groups))
        settled.needs_norms = any(each.needs_norm for each in settled.modified)
        settled.by_user = bool(self._overridden(*OF_PARAMETERS))
        return settled

    def _modified(self, group: Mapping[str, Any]) -> Modified:
        """How a group is modified: by Muon's settings, which users' groups may have under other meanings."""
        return modified({}, self.decay_method(group))

    def decay_method(self, group: Mapping[str, Any]) -> DecayMethod:
        """The kind of a group's weight decay; a ``ValueError`` for a contradiction."""
        return decay_method(type(self).__name__, group) if METHOD in self.defaults else "decoupled"

    def _rates_of(self, group: Mapping[str, Any]) -> tuple[float, Scalar]:
        """Momentum and weight decay of a group's next step."""
        return group[self.momentum_key], group["weight_decay"]
