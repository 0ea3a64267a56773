"""Base of all optimizers: checked groups, described state, prepared steps."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.kernels.choice import check_kernel
from megatron_eopt.kernels.precision import outside_autocast
from megatron_eopt.matrices import ATTRIBUTE, WHOLE, Split, declared_split, is_transposed, split_of
from megatron_eopt.orthogonalize.choices import check_count
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.collectives import CollectiveError, counters, lowest
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout, split_layout
from megatron_eopt.parallel.plan_records import TpMode
from megatron_eopt.parallel.workspace import Workspace
from megatron_eopt.settings import groups as of_groups
from megatron_eopt.settings.execution import Execution
from megatron_eopt.settings.modifiers import GroupModifiers
from megatron_eopt.settings.of_class import check_effect, check_values, is_ours, settings_of
from megatron_eopt.settings.other_names import OTHER_NAMES, by_our_names
from megatron_eopt.settings.records import RECORDS, Setting
from megatron_eopt.settings.values import without_dimensions
from megatron_eopt.step.exchange_table import NOTHING
from megatron_eopt.step.gradients import check_gradients
from megatron_eopt.step.loaded_state import (
    apart,
    check_loaded,
    check_writer,
    hook_loaded,
    hooked,
    lacking,
    mark_of,
    note_loaded,
    notes_of_settings,
    place,
    warn_reinitialized,
    with_steps,
    without_hooks,
    without_host,
)
from megatron_eopt.step.nonfinite import Flag, NonFinite
from megatron_eopt.step.parameters import (
    DescribedMatrix,
    TensorParallelGroups,
    check_parameters,
    check_scalable,
    check_split,
    checked_split,
    has_dtensors,
    in_order,
    local,
    matrix_layout,
    parameter_names,
    parameters_in,
    refuse_flattened,
    restore_attributes,
    saved_attributes,
    scale_rows,
    sharing_groups,
    warn_of_fp16,
)
from megatron_eopt.step.reporting import ReportingOptimizer
from megatron_eopt.step.session import Session, StepCache
from megatron_eopt.step.state import (
    STATE_OF,
    States,
    StateTensor,
    bytes_of_entry,
    expected_shape,
    forget_replaced,
    shape_of,
)
from megatron_eopt.step.users_functions import OF_USERS, warn_of_uncalled

ATTRIBUTES = "attributes_of_parameters"  # in what is copied and pickled
PLANNED = ("tp_mode", "fp32_matmul_prec")  # attributes by which ranks plan
OF_CONSTRUCTORS = {"self", "params", "settings", "kwargs", "__class__"}  # what locals() has beside settings
HOOKS = ("_optimizer_", "_zero_grad_")  # beginnings of attributes of torch's, which belong to one object


def _session_of(cls: type) -> Session[Any]:
    return Session(planned=[key for key, setting in settings_of(cls).items() if setting.planned])


class BaseOptimizer(ReportingOptimizer):
    """Base class: checked groups, described state, finite gradients only.

    Gradients are not written to. A parameter stays as it is where its gradient is missing, and all do where one is not
    finite: see :mod:`~megatron_eopt.step.nonfinite`. A subclass defines its state (:meth:`state_tensors`), what a
    group may have (:meth:`_check_group`) and its step (:meth:`_take`).
    """

    # What a class says of itself.
    own_settings: ClassVar[tuple[Setting, ...]] = ()  # records of settings that no other optimizer has
    persistent_group_keys: ClassVar[frozenset[str]] = frozenset()  # made by itself, and needed to go on alike
    counters: ClassVar[frozenset[str]] = frozenset()  # of these, those that count steps
    split_lengths: ClassVar[tuple[int, ...]] = (3, 4)  # how many logical matrices a fused projection may have
    decays_weights: ClassVar[bool] = True  # without, what fills settings from a run's leaves the weight decay at 0
    elementwise: ClassVar[bool] = False  # whether any part of a parameter steps as within the whole
    weight_keys: ClassVar[tuple[str, ...]] = ()  # state that is a copy of the weight, which ``scale_rows`` scales too
    # State of the training weights, where checkpoints hold ``exported()`` ones.
    train_weight_key: ClassVar[str | None] = None
    fixed_by_state: ClassVar[tuple[str, ...]] = ()  # settings of groups that cannot change once there is state
    row_order_matters: ClassVar[bool] = False  # whether state pairs rows with rows, so that their order is part of it
    # Names of further arguments of a user's, which groups have too, and which may be anything.
    users_settings: frozenset[str] = frozenset()

    # What constructors set, where they have such an argument.
    pg_collection: TensorParallelGroups | None = None
    split_qkv: bool = False
    is_qkv_fn: Callable[[Tensor], bool] | None = None
    qkv_split_shapes: Sequence[int] | None = None
    tp_mode: TpMode = "duplicated"

    _session: Session[Any]

    def __init__(self, params: ParamsT, arguments: Mapping[str, Any], further: Mapping[str, Any] | None = None) -> None:
        """Check and keep the arguments of a constructor.

        ``arguments`` are its ``locals()``: of these its settings are taken. Those of the optimizer as a whole become
        attributes, all others are in every group. ``further`` ones are a user's, of groups.
        """
        cls = type(self)
        known = settings_of(cls)
        given = {**arguments, **arguments.get("settings", {})}
        unknown = given.keys() - known.keys() - OF_CONSTRUCTORS
        if unknown:
            raise TypeError(
                f"{cls.__name__} passes on {', '.join(sorted(unknown))}, no setting of the class of megatron_eopt that "
                "it is made of: put a setting of your own into the groups"
            )
        values = {key: given.get(key, setting.default) for key, setting in known.items()}
        check_values(cls.__name__, known, values)
        if "execution" in known and not isinstance(values["execution"], Execution):
            raise TypeError(f"{cls.__name__}: execution is an Execution(...), got {values['execution']!r}")
        if "split_qkv" in known:
            values["qkv_split_shapes"] = checked_split(cls.__name__, values, self.split_lengths)
        warn_of_uncalled(cls)
        self._session = _session_of(cls)
        self._settle(values)
        in_groups = {}
        for key, value in values.items():
            if known[key].whole:
                vars(self)[key] = value
            else:
                in_groups[key] = value
        if "execution" not in known:
            vars(self)["execution"] = Execution(symmetric_products=values.get("symmetric_products"))
        super().__init__(params, {**in_groups, **(further or {})})
        class_defaults = {key: setting.default for key, setting in known.items()}
        check_effect(known, in_groups, class_defaults, [in_groups, *self.param_groups])

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        subclass: Any = cls
        if is_ours(subclass) and "__init__" in vars(subclass):
            subclass.__init__ = by_our_names(subclass.__init__)

    def __getstate__(self) -> dict[str, Any]:
        """Attributes, torch's state and what parameters say of themselves, for a copy."""
        self.refuse_half_step()
        ours: set[str] = set()
        for cls in filter(is_ours, type(self).__mro__):
            ours |= vars(cls).keys() | cls.__annotations__.keys()
        kept = {}
        for key, value in vars(self).items():
            known = key in ours and key.startswith("_")  # of this process; a user's own attributes are copied
            # a scheduler of torch sets step, which would step this object
            if not known and key != "step" and not key.startswith(HOOKS):
                kept[key] = value
        return kept | super().__getstate__() | {ATTRIBUTES: [vars(p) for p in self._parameters()]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).setdefault("_session", _session_of(type(self)))  # of a copy
        attributes = state.pop(ATTRIBUTES, [])
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # which torch adds in a load, and nothing here reads
        for parameter, said in zip(self._parameters(), attributes, strict=False):
            vars(parameter).update(said)  # torch copies tensors without it

    @property
    def execution(self) -> Execution:
        """Where and how steps are computed; state follows from it, so that nobody can set it."""
        execution: Execution = vars(self)["execution"]
        return execution

    # What a subclass says.

    @abstractmethod
    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Describe a parameter's state, alike on all sharing ranks."""

    def _settle(self, values: dict[str, Any]) -> None:
        """Refuse a constructor's settings that do not go together; set what follows from them."""

    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse, by a ``ValueError``, what a new group cannot have."""

    def _check_together(self, group: Mapping[str, Any]) -> None:
        """Refuse a group whose settings do not go together, each of which is valid."""

    @abstractmethod
    def _take(self, ok: Flag) -> None:
        """Step parameters with gradients, or none if not ``ok``; set ``_session.changing`` before any change."""

    @property
    def keeps_momenta(self) -> bool:
        """Whether the program needs momenta after they were orthogonalized."""
        return False

    def modifiers_of(self, group: Mapping[str, Any]) -> GroupModifiers:
        """What a group has done to its updates and weights."""
        return GroupModifiers.of(group, settings_of(type(self)))

    def settings(self) -> dict[str, Any]:
        """Plain settings that no group has, which a checkpoint describes."""
        whole = {key: vars(self).get(key) for key, setting in settings_of(type(self)).items() if setting.whole}
        return {key: value for key, value in whole.items() if isinstance(value, str | int | float | bool)}

    def scale_rows(self, parameters: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Multiply rows of parameters between steps, as QK-clip does.

        Copies of the weight in state follow; momenta stay as they are. All ranks that share parameters call it
        together.

        Args:
            parameters: some of this optimizer's.
            factors: for each of them a vector with a factor for each local row.
        """
        for parameter, factor in zip(parameters, factors, strict=True):
            state = self.state.get(parameter, {})
            for weight in (parameter, *(state[key] for key in self.weight_keys if key in state)):
                scale_rows(local(weight), factor)

    def exported(self, parameter: Tensor) -> Tensor:
        """What is evaluated and exported instead of a parameter."""
        return parameter.detach()

    @property
    def matrices_updated(self) -> int:
        """How many :meth:`described_matrices` all steps so far have updated."""
        return 0

    def described_matrices(self, settled: bool = True) -> dict[Tensor, list[DescribedMatrix]]:
        """Each parameter's logical matrices; ``settled`` agrees on plans."""
        return {}

    def plan(self) -> str:
        """What a step does over ranks, before they agree on it."""
        return NOTHING

    def plans_of_ranks(self) -> list[str]:
        """The plan, where several ranks share parameters."""
        return [self.plan()] if self.proposed().groups else []

    def explain(self) -> str:
        """Also what ranks exchange, where several share parameters."""
        return "\n\n".join([super().explain(), *self.plans_of_ranks()])

    def _check_settings(self, group: dict[str, Any]) -> None:
        """Refuse settings of a new, loaded or changed group that no step could use; numbers lose their dimensions."""
        name = type(self).__name__
        lacking = self.defaults.keys() - group.keys()
        if lacking:
            raise ValueError(f"{name}: a group has no {min(lacking)}: add it by add_param_group(), which completes it")
        known = {key: setting for key, setting in settings_of(type(self)).items() if not setting.whole}
        own = {key: group[key] for key in known if key in group and key not in self.users_settings}
        check_values(name, known, own)
        group |= {key: without_dimensions(value) for key, value in own.items()}
        for key in self.counters & group.keys():
            check_count(f"{name}: {key}", group[key], 0)
        self._check_together(group)

    def _check_all_settings(self, groups: Sequence[dict[str, Any]]) -> None:
        for number, group in enumerate(groups):
            with of_groups.named(number, groups):
                self._check_settings(group)

    def _check_gradients(self, parameters: Sequence[Tensor]) -> None:
        check_gradients(type(self).__name__, parameters, self.param_groups)

    def _described(self, name: str, parameter: Tensor) -> ParamSpec:
        return ParamSpec(name, local(parameter).dtype, groups=sharing_groups(parameter, self.pg_collection))

    def _planned_settings(self) -> tuple[list[object], list[dict[str, Any]]]:
        """What the engine depends on, beside the parameters: what is set on the object, and in groups."""
        planned = self._session.planned
        in_groups = [{key: group[key] for key in planned if key in group} for group in self.param_groups]
        return [vars(self).get(name) for name in (*OF_USERS, *PLANNED)], in_groups

    # Parameters and their logical matrices.

    def layout(self, parameter: Tensor) -> Layout:
        """The layout of a parameter, transpose, or stacked matrices."""
        layout = matrix_layout(parameter, self.pg_collection)
        return layout.transposed if is_transposed(parameter) else layout

    def split_of(self, parameter: Tensor) -> Split:
        """The logical matrices of a parameter, declared or by ``split_qkv``."""
        is_qkv_fn = self.is_qkv_fn if self.split_qkv else None
        split = split_of(parameter, is_qkv_fn, self.qkv_split_shapes, self.split_lengths) or WHOLE
        return in_order(split, parameter, self.layout(parameter)) if isinstance(parameter, DTensor) else split

    def matrix_layouts(self, parameter: Tensor) -> list[Layout]:
        """The layouts of a parameter's logical matrices."""
        return split_layout(self.layout(parameter), self.split_of(parameter))

    def key_ends(self, parameter: Tensor) -> list[str]:
        """State key endings of logical matrices; empty for one."""
        known = self._session.key_ends
        if parameter not in known:  # asked in every step, and a parameter may be many heads
            whole = self.split_of(parameter).is_whole
            known[parameter] = [""] if whole else [f"_{i}" for i, _ in enumerate(self.matrix_layouts(parameter))]
        return known[parameter]

    def group_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the group of a parameter."""
        known = self._session.group_of.get(parameter)
        # a load makes other groups, and Megatron replaces parameters by its fp32 copies
        if known is None or not any(known is group for group in self.param_groups):
            self._session.group_of = {p: group for group in self.param_groups for p in group["params"]}
            known = self._session.group_of[parameter]
        return known

    @property
    def matrices_per_step(self) -> int:
        """How many logical matrices this rank has a part of."""
        return sum(len(self.key_ends(parameter)) for parameter in self._parameters())

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _indices_of(self, parameters: Iterable[Tensor]) -> list[int]:
        """The indices of parameters among all."""
        index_of = {parameter: i for i, parameter in enumerate(self._parameters())}
        return [index_of[parameter] for parameter in parameters]

    def _by_matrix(
        self, parameters: Sequence[Tensor], of_rows: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Parameters, and a number for each of their rows by logical matrices; after :meth:`prepare`."""
        for index, parameter, numbers in zip(self._indices_of(parameters), parameters, of_rows, strict=True):
            of_entries = numbers[:, None].expand(local(parameter).shape)
            yield parameter, [x[:, 0] for x in self.engine.split([index], [of_entries])]

    def _names(self) -> list[str]:
        return parameter_names(self.param_groups)

    def _check_split(self, parameter: Tensor) -> None:
        split = self.split_of(parameter)
        if declared_split(parameter) is not None or not split.is_whole:
            check_split(parameter, split, self.layout(parameter), self.tp_mode == "blockwise")

    # Groups and state.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Raises:
            ValueError: for a parameter that the optimizer cannot have, or a setting out of its range.
        """
        name = type(self).__name__
        session = self._session
        if isinstance(param_group, dict):  # else torch says what is wrong
            of_groups.rename(name, param_group, self.defaults)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        session.engine = session.nonfinite = None
        session.scalable = False
        try:
            check_parameters(name, self.param_groups)
            for key in ("use_muon", "algorithm"):  # of Keller Jordan's MuonWithAuxAdam, and of dion
                if not self.elementwise and group.get(key) in (False, "adamw", "lion"):
                    raise ValueError(
                        f"{name} orthogonalizes all groups, and one has {key}={group[key]!r}: give it to AdamW, as "
                        f"Muon(matrices, rest) and build_optimizer do"
                    )
            with of_groups.named(len(self.param_groups) - 1, self.param_groups):
                self._check_settings(group)
                check_effect(settings_of(type(self)), group, self.defaults, [group])
            self._check_group(group)
        except Exception:
            self.param_groups.pop()
            raise
        self._warn_of_idle_keys()
        group[STATE_OF] = mark_of(self)
        session.said = saved_attributes(self._parameters())

    def _warn_of_idle_keys(self) -> None:
        """Warn of keys of groups that nobody reads, of each once."""
        seen = self._session.seen_keys
        for group in self.param_groups:
            if group.keys() <= seen:
                continue
            of_all = {*RECORDS, *settings_of(type(self))}
            users = self.users_settings & (of_all | OTHER_NAMES.keys())  # which are what the user says
            known = {"params", *self.defaults, *self.persistent_group_keys} - self.users_settings
            new = [key for key in group if key not in seen and key not in users]
            of_groups.warn_of_idle(type(self).__name__, new, known, of_all)
            seen.update(group)

    def init_state(self) -> None:
        """Create all state, as a checkpoint load needs it."""
        self._rebind_parameters()
        for group in self.param_groups:
            self._init_group(group)

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = False) -> None:
        """Create the state of a group: emerging-optimizers' contract."""
        for parameter in group["params"]:
            if parameter.grad is not None or not skip_non_grad_params:
                self._states.of(parameter)

    def _rebind_parameters(self) -> None:
        """Treat parameters that were put into groups in place of others as these."""
        parameters = self._parameters()
        restore_attributes(parameters, self._session.said)
        self._session.key_ends.clear()
        self._session.group_of.clear()
        forget_replaced(type(self).__name__, self.state, parameters)
        begun = self._session.begun
        self._session.begun = {key: begun[key] for key in begun if key[0] in self.state}
        if not self.elementwise:
            shapes = {shape for shape, _ in self._session.said}
            refuse_flattened(type(self).__name__, self.param_groups, shapes)

    def _count_anew(self, parameters: Sequence[Tensor]) -> None:
        """Let counters begin with the state, which its owner may have emptied."""
        counting = [group for group in self.param_groups if not self.counters.isdisjoint(group)]
        # a pipeline stage without parameters counts on
        if counting and parameters and not any(self.state.get(p) for p in parameters):
            for group in counting:
                group |= dict.fromkeys(self.counters & group.keys(), 0)

    def _has_begun(self, parameter: Tensor, key: str) -> bool:
        """Whether a step has made ``key`` of the state what it begins with: see :meth:`_note_begun`."""
        kept = self.state.get(parameter, {}).get(key)
        return kept is not None and self._session.begun.get((parameter, key)) is kept

    def _note_begun(self, parameter: Tensor, key: str) -> None:
        """Note that the present state has begun, so that no step looks for that again.

        Another tensor under ``key``, of a load or of a state that was emptied, has not.
        """
        self._session.begun[parameter, key] = self.state[parameter][key]

    @property
    def _states(self) -> States:
        return States(self.state, self.state_tensors, self.matrix_layouts, self.on_host)

    def on_host(self, parameter: Tensor) -> bool:
        """Whether state in the parameter's shape is in host memory."""
        if not self.execution.offload_fraction:
            return False
        known = self._session.offloaded
        if parameter not in known:  # one that was added, or with which Megatron replaced another
            parameters = self._parameters()
            on_host = self._states.share_on_host(parameters, self.execution.offload_fraction)
            known |= zip(parameters, on_host, strict=True)
        return known.get(parameter, False)

    def state_dict(self) -> dict[str, Any]:
        """All state, also of parameters that had no gradient yet.

        It is made where it is missing, so that the dict of a new optimizer is a template for
        ``torch.distributed.checkpoint``. Raises a ``RuntimeError`` after an interrupted step.
        """
        self.refuse_half_step()
        self.init_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; groups keep settings that it lacks.

        Raises:
            TypeError: if it has anything else in place of a tensor.
            ValueError: if the state is of another optimizer, if groups or shapes differ, if a tensor is missing, or if
                one has values that are not finite, or below 0 where squares, norms and counts cannot be.

        Nothing is changed then. Hooks are called as by torch: first those before a load, with the dict as it was given;
        last those after it, when state is as steps will use it.
        """
        name = type(self).__name__
        state_dict = hooked(self, name, state_dict)
        check_writer(type(self), state_dict, unmarked=True)
        state_dict = self._to_load(state_dict)
        saved = state_dict["param_groups"]
        groups = self._groups_to_load(saved)
        self._check_all_settings(groups)
        self._check_fixed(groups)
        notes = notes_of_settings(self, saved, groups)
        indices = [index for group in groups for index in group["params"]]
        parameters = list(zip(self._parameters(), indices, strict=False))
        states = apart(state_dict["state"])
        saved_states = [(p, states.get(index, {})) for p, index in parameters]
        called = dict(zip(self._parameters(), self._names(), strict=True))
        loaded = with_steps(self._states, saved_states)
        converted = check_loaded(name, loaded, self.state_tensors, self.matrix_layouts, called)
        begun_anew = [called[p] for p in lacking(self._states, saved_states)]
        of_devices = without_host(self._states, parameters, states)
        with without_hooks(self):
            super().load_state_dict({**state_dict, "param_groups": groups, "state": of_devices})
        for note in notes:
            of_groups.warn(note)
        note_loaded(name, converted, place(self._states, loaded))
        warn_reinitialized(name, begun_anew)
        self._session.engine = None
        self._session.changing = False
        self._loaded()
        hook_loaded(self)

    def _to_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state dict as this class has it; refuses what it cannot go on from, before anything is changed."""
        return state_dict

    def _loaded(self) -> None:
        """What a class does after a load, before hooks of torch."""

    def _groups_to_load(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Saved groups, with the present settings where they lack one."""
        name = type(self).__name__
        if len(saved) != len(self.param_groups):
            raise ValueError(
                f"{name}: the state has a different number of parameter groups, {len(saved)} in place of "
                f"{len(self.param_groups)}"
            )
        needed = self.defaults.keys() | self.persistent_group_keys
        groups = []
        for of_state, own in zip(saved, self.param_groups, strict=True):
            group = dict(of_state)
            of_groups.rename(name, group, self.defaults)
            for key in needed & own.keys():
                group.setdefault(key, own[key])
            group[STATE_OF] = mark_of(self)
            groups.append(group)
        return groups

    # The step.

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False: torch's GradScaler unscales and skips steps itself."""
        if not self._session.scalable:
            check_scalable(self.param_groups, self.pg_collection)
            self._session.scalable = True
        return False

    def proposed(self) -> Engine:
        """Make the engine of :meth:`prepare`, before ranks agree on it."""
        parameters = self._parameters()
        run = self.execution
        # chunks take turns by what is in host memory, also where the plan is the same
        beside = {**self._session.adamw_settings, **self.settings(), "offload_fraction": run.offload_fraction}
        beside["momentum_dtype"] = str(run.momentum_dtype)
        settings = of_groups.by_parameter(self.param_groups, self.defaults, beside, self.users_settings)
        named = zip(self._names(), parameters, strict=True)
        described = [replace(self._described(name, p), settings=settings[p]) for name, p in named]
        device = local(parameters[0]).device if parameters else torch.device("cpu")
        of_entries = [bytes_of_entry(p, self.state_tensors(p)) for p in parameters if run.offload_fraction]
        state = max(of_entries, default=0)
        kept = state + (4 if self.keeps_momenta else 0)
        workspace = Workspace(bytes=run.workspace, kept=kept, state=state)
        return Engine(described, device, self.tp_mode, workspace)

    def prepare(self) -> Engine:
        """Settle the step with the other ranks; all call together.

        The first step calls it, and one after a group was added or loaded or a planned setting changed. Settings are
        checked then. Others, such as rates, may change at any time, and the next step uses them as they are.

        Raises:
            ValueError: for a plan or a setting that differs between ranks, and for parameters on several devices.
        """
        session = self._session
        if session.engine is None:
            self._rebind_parameters()
            session.tags = self._tags(self._parameters())
        functions, planned = self._planned_settings()
        if session.engine is None or session.engine_of != (functions, planned):
            self._check_all_settings(self.param_groups)
            engine = self.proposed()
            check_kernel(self.execution.symmetric_products, engine.device)
            try:
                engine.prepare()
            except CollectiveError as error:
                error.add("to agree on a plan, which is made anew where a setting or a group changed")
                raise
            session.settled = self._settled(engine)
            session.engine = engine
            session.engine_of = functions, deepcopy(planned)  # lists may be written to
            session.stepping = None
            session.parameters = self._parameters()
            session.sizes = [len(group["params"]) for group in self.param_groups]
        parameters = self._parameters()
        if session.nonfinite is None and parameters:
            devices = sorted({str(parameter.device) for parameter in parameters})
            if len(devices) > 1:
                raise ValueError(f"{type(self).__name__} steps on one device, but its parameters are on {devices}")
            if devices == ["meta"]:
                raise ValueError(
                    f"{type(self).__name__} has the parameters that the model had on the meta device: build it after "
                    "to_empty() and the like, which replace them"
                )
            session.nonfinite = NonFinite(self._names_of_step, torch.device(devices[0]))
        return session.engine

    def _settled(self, engine: Engine) -> StepCache:
        """Find what follows from an agreed engine; raises before anything is kept."""
        self._check_kept()
        return StepCache(list(map(self.modifiers_of, self.param_groups)))

    def _check_fixed(self, groups_of_state: Sequence[Mapping[str, Any]]) -> None:
        """Refuse other settings than state was made with, where they cannot change."""
        for number, (of_state, group) in enumerate(zip(groups_of_state, self.param_groups, strict=False)):
            for key in self.fixed_by_state:
                if of_state.get(key, group[key]) != group[key]:
                    raise ValueError(
                        f"{type(self).__name__}: group {number} has {key}={group[key]}, but its state was made with "
                        f"{of_state[key]}, which cannot change: set it to that, or begin the state anew"
                    )

    def _check_kept(self) -> None:
        """Refuse state of other shapes than the settings of groups ask for, as those of another second moment."""
        _, planned = self._session.engine_of or ([], [])
        pairs = zip(planned, self.param_groups, strict=False)
        self._check_fixed([before if any(map(self.state.get, group["params"])) else {} for before, group in pairs])
        for parameter, called in zip(self._parameters(), self._names(), strict=True):
            kept = self.state.get(parameter, {})
            for tensor in self.state_tensors(parameter) if kept else ():
                if tensor.key not in kept or tensor.rank is not None:
                    continue
                found = shape_of(kept[tensor.key])
                expected = expected_shape(parameter, tensor, self.matrix_layouts)
                if found != expected:
                    raise ValueError(
                        f"{type(self).__name__}: the state {tensor.key!r} of {called} has shape {found}, and the "
                        f"settings of its group now need {expected}: set them back, or remove it from "
                        f"optimizer.state[parameter] to begin it anew"
                    )

    @property
    def engine(self) -> Engine:
        """What :meth:`prepare` made."""
        engine = self._session.engine
        assert engine is not None, "all ranks call prepare() before"
        return engine

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch._disable_dynamo  # what ranks agree on cannot be traced
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, or none if one of these is not finite.

        Inside ``torch.autocast`` it computes as it does outside; ``closure`` computes inside.

        Args:
            closure: computes the loss and the gradients anew; called once, with gradients enabled.

        Returns:
            What the closure returned.

        Raises:
            ValueError: for a setting or a gradient that the optimizer cannot take, before anything is changed.
            RuntimeError: if a gradient was not finite, or above 2^50 in norm, in several steps in a row; if a
                collective fails, with its name and the number of the step; and after a step that an exception ended
                while it changed parameters or state, until a state is loaded.
        """
        if self._session.changing:
            self.refuse_half_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = self._parameters()
        session = self._session
        session.steps += 1
        counters.step = f"step {session.steps} of {type(self).__name__}"
        if parameters:
            with outside_autocast(parameters[0].device):
                self._step(parameters)
        else:
            self._agree(torch.ones((), dtype=torch.int32), [])
        return loss

    def _step(self, parameters: Sequence[Tensor]) -> None:
        """Check gradients, plan anew where it is needed, and change what is to be changed."""
        session = self._session
        sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != session.sizes or not all(map(is_, parameters, session.parameters)):
            session.engine = session.nonfinite = None  # of other parameters, or of these in other groups
        if session.engine is None:
            self._rebind_parameters()
        self._count_anew(parameters)
        self._check_tags(parameters)
        self._check_gradients(parameters)
        self._warn_of_idle_keys()
        session.without_gradients.look(type(self).__name__, [*self.param_groups, *session.after_step_groups])
        engine = session.engine
        if engine is None or session.engine_of != self._planned_settings():
            engine = self.prepare()
        if session.steps == 1:
            warn_of_fp16(self._names(), parameters)
        ok: Flag = self._judged(parameters)
        if ok is not None and ok.device.type == "cpu":
            if not ok:
                return
            ok = None
        try:
            self._take(ok)
            if session.after_step is not None:
                session.after_step(ok)
        except BaseException as error:
            session.ended_by = type(error).__name__
            raise
        session.changing = False

    def _judged(self, parameters: Sequence[Tensor]) -> Tensor:
        """Whether all ranks can step: a flag on the device. Notes which parameters have gradients."""
        session = self._session
        assert session.nonfinite is not None  # prepared
        gradients = [p.grad for p in parameters]
        for group in session.after_step_groups:
            gradients += [p.grad for p in group["params"]]
        if has_dtensors(gradients):
            gradients = [None if x is None else local(x) for x in gradients]
        present = [x is not None for x in gradients[: len(parameters)]]
        begins = session.stepping is None
        flag = session.nonfinite.accept(gradients, partial(self._agree, present=present), begins)
        # a GPU is waited for then alone; where ranks differ, all keep to what they had, and nothing changes
        if present != session.stepping and (begins or not self.engine.groups or flag >= 0):
            session.stepping = present
        return flag == 1

    @property
    def _stepping(self) -> list[bool]:
        """Which parameters step, as ranks have agreed."""
        assert self._session.stepping is not None, "gradients are judged before"
        return self._session.stepping

    def _begin_state(self) -> list[int]:
        """The parameters that step, by their indices; makes state that they lack."""
        settled = self._session.settled
        parameters = self._parameters()
        if settled.state_keys is None:
            settled.state_keys = [{tensor.key for tensor in self.state_tensors(p)} for p in parameters]
        stepping = [i for i, has_gradient in enumerate(self._stepping) if has_gradient]
        for i in stepping:
            if not self.state[parameters[i]].keys() >= settled.state_keys[i]:
                self._states.of(parameters[i])
        return stepping

    def _agree(self, flag: Tensor, present: Sequence[bool]) -> Tensor:
        """Minimum of a flag over all ranks that skip steps together."""
        settled = self._session.settled
        engine = self._session.engine
        groups = list(engine.groups.values()) if engine is not None else []
        if settled.further is None:
            # in Megatron all of a pipeline stage: their experts, and what is dealt to them, differ
            found = [getattr(self.pg_collection, "tp_dp_cp", None)]
            for parameter in parameters_in(self._session.after_step_groups):
                found += sharing_groups(parameter, self.pg_collection).values()
            several = [group for group in dict.fromkeys(found) if group is not None and group.size() > 1]
            settled.further = [group for group in several if group not in groups]
        if engine is not None and present:
            flag = engine.agree(flag, present)
        for group in settled.further:
            flag = lowest(flag, group)
        return flag

    def _names_of_step(self) -> list[str]:
        return parameter_names([*self.param_groups, *self._session.after_step_groups])

    def _tags(self, parameters: Sequence[Tensor]) -> list[object]:
        """What each parameter says of its logical matrices."""
        if self.elementwise:
            return []
        is_qkv_fn = self.is_qkv_fn if self.split_qkv else None
        tags: list[object] = []
        for parameter in parameters:
            said = vars(parameter)
            is_qkv = is_qkv_fn is not None and bool(is_qkv_fn(parameter))
            shapes = said.get("qkv_split_shapes")
            tags.append((is_qkv, shapes if shapes is None else tuple(shapes), said.get(ATTRIBUTE)))
        return tags

    def _check_tags(self, parameters: Sequence[Tensor]) -> None:
        """Refuse other logical matrices than those of the plan, which state may follow."""
        if self._session.engine is None:
            return
        tags = self._tags(parameters)
        if tags == self._session.tags:
            return
        for called, then, now in zip(self._names(), self._session.tags, tags, strict=True):
            if then != now:
                raise ValueError(
                    f"{type(self).__name__}: {called} is declared otherwise than in the steps before, by is_qkv_fn, "
                    f"its qkv_split_shapes or its {ATTRIBUTE}: declare logical matrices before the first step, or "
                    "build the optimizer anew"
                )

    def refuse_half_step(self) -> None:
        """Raise a ``RuntimeError`` if an exception interrupted the last step."""
        if self._session.changing:
            raise RuntimeError(
                f"{type(self).__name__}: {self._session.ended_by} ended the last step while it changed "
                f"weights and state: some may have advanced, others not, and another step would apply gradients twice. "
                f"Load both from a checkpoint (the optimizer's load_state_dict() leaves weights as they are), or build "
                f"the optimizer anew, to go on from these weights with fresh state"
            )

    def skipped_steps(self) -> int:
        """How many steps were skipped; waits for the device."""
        return 0 if self._session.nonfinite is None else self._session.nonfinite.total
