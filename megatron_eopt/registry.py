"""Optimizers by name, for Megatron and plain torch.

Functions have the names and signatures of Megatron-Core's ``core.optimizer.emerging_optimizers``, whose underscored
names are aliases here. The package's optimizers come from its table, :mod:`megatron_eopt.family`.
"""

import difflib
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.family import TensorParallelAdaptiveMuon as TensorParallelAdaptiveMuon
from megatron_eopt.family import TensorParallelMuon as TensorParallelMuon
from megatron_eopt.from_config import config_to_kwargs, get_qkv_split_shapes, kwargs_from_config
from megatron_eopt.matrices import declared_split
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer
from megatron_eopt.orthogonalize.coefficients import get_supported_coefficient_types as get_supported_coefficient_types
from megatron_eopt.orthogonalize.coefficients import validate_coefficient_type as validate_coefficient_type
from megatron_eopt.step.base import BaseOptimizer

InitStateFn = Callable[..., None]
Builder = Callable[..., Optimizer]


def is_nonlinear_or_embedding(param: Tensor) -> bool:
    """Whether it is no matrix, an embedding or output layer."""
    split = declared_split(param)
    matrices = param.ndim == 2 or (param.ndim == 3 and split is not None and split.stacked is not None)
    return bool(getattr(param, "is_embedding_or_output_parameter", False)) or not matrices


def is_muon_excluded(param: Tensor) -> bool:
    """True also for ``use_muon = False`` (Megatron-Core 0.20)."""
    return not getattr(param, "use_muon", True) or is_nonlinear_or_embedding(param)


def default_param_overrides_factory() -> dict[Any, dict[str, Any]]:
    """Settings that give non-matrices and embeddings to Adam, by ``ParamKey``."""
    return _to_adam("nonlinear_or_embedding", is_nonlinear_or_embedding)


def muon_param_overrides_factory() -> dict[Any, dict[str, Any]]:
    """As the default, and ``use_muon=False`` to Adam, too."""
    return _to_adam("muon_excluded", is_muon_excluded)


def _to_adam(name: str, takes: Callable[[Any], bool]) -> dict[Any, dict[str, Any]]:
    make_key = EMERGING_OPTIMIZERS.make_param_key
    if make_key is None:
        raise RuntimeError("the default routing is written in Megatron's ParamKey: call megatron_eopt.activate() first")
    return {make_key(name, takes): {"optimizer": "adam"}}


class _DefaultOverrides:
    """A field that may be a function, called when read."""

    def __get__(self, entry: Any, owner: type | None = None) -> Any:
        if entry is None:
            return default_param_overrides_factory  # the field's default for dataclass
        if callable(entry._overrides):
            entry._overrides = entry._overrides()
        return entry._overrides

    def __set__(self, entry: Any, value: Any) -> None:
        entry._overrides = default_param_overrides_factory if value is None else value


def eopt_init_state_fn(opt: Optimizer, config: Any = None) -> None:
    """Create all state tensors, before a checkpoint is loaded.

    By ``opt.init_state()``, else Megatron's ``opt._init_group``; without both it is a ``TypeError``.
    """
    if hasattr(opt, "init_state"):
        opt.init_state()
        return
    try:  # the _init_group of torch's optimizers takes other arguments
        inspect.signature(opt._init_group).bind({}, skip_non_grad_params=False)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise TypeError(
            f"{type(opt).__name__} has no init_state(), and no _init_group(group, skip_non_grad_params=False), which "
            f"create the state of every parameter: add one of them, or register the optimizer with an init_state_fn "
            f"of its own"
        ) from None
    for group in opt.param_groups:
        opt._init_group(group, skip_non_grad_params=False)  # type: ignore[attr-defined]


@dataclass(eq=False, repr=False)  # a repr would ask for the overrides, and so import Megatron
class EmergingOptimizerEntry:
    """What is needed to build an optimizer for Megatron.

    Attributes:
        optimizer_cls: subclass of ``torch.optim.Optimizer``, or a callable that makes one: a ``functools.partial``, or
            a function annotated with the class that it returns.
        init_state_fn: ``(opt, config=None)``, creates every state tensor of every parameter.
        config_to_kwargs: ``(config, model_chunks, pg_collection) -> dict`` of arguments for ``optimizer_cls``; None for
            :func:`default_adam_based_eopt_config_to_kwargs`.
        default_param_overrides: Megatron's ``ParamKey`` -> settings, or a function that returns them; the default gives
            parameters that are no matrices, and embeddings, to Adam.
        config_to_cls: ``(config) -> optimizer_cls`` of a run; None for the one above.
    """

    optimizer_cls: type[Optimizer] | Callable[..., Optimizer]
    init_state_fn: InitStateFn = eopt_init_state_fn
    config_to_kwargs: Callable[[Any, Sequence[Any], Any], dict[str, Any]] | None = None
    default_param_overrides: Any = _DefaultOverrides()
    config_to_cls: Callable[[Any], Callable[..., Optimizer]] | None = None


class UnknownOptimizerError(ValueError, KeyError):
    """No optimizer has this name."""

    __str__ = Exception.__str__  # KeyError's puts the message in quotes


class Registry(UserDict[str, EmergingOptimizerEntry]):
    """Name -> entry.

    Between :meth:`forward` and :meth:`forward_no_more` it is Megatron's dict. An entry put in through this mapping
    leaves it with :meth:`forward_no_more`; one put into Megatron's dict stays there, and is seen here only in between.
    """

    # (name, predicate) -> Megatron's ``ParamKey``, which the room of Megatron puts here when it is imported
    make_param_key: Callable[[str, Callable[[Any], bool]], Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._own = self.data
        self._made_room: dict[str, EmergingOptimizerEntry] = {}
        self.untested: dict[str, EmergingOptimizerEntry] = {}  # Megatron's alone

    def __setitem__(self, name: str, entry: EmergingOptimizerEntry) -> None:
        if name not in self.data or self._put_in_here(name):
            self._own[name] = entry
        self.data[name] = entry

    def __delitem__(self, name: str) -> None:
        put_in_here = self._put_in_here(name)
        del self.data[name]
        if put_in_here:
            self._own.pop(name, None)

    def forward(self, theirs: dict[str, Any], make_room: Iterable[str], untested: Iterable[str] = ()) -> None:
        """Put the entries into Megatron's dict, and use that one.

        A name that it has keeps its entry unless it is in ``make_room``, until :meth:`forward_no_more`.
        """
        self.untested = {name: theirs[name] for name in untested}
        self._made_room = {name: theirs[name] for name in make_room if name in self._own}
        for name, entry in self._own.items():
            if name not in theirs or name in self._made_room:
                theirs[name] = entry
        self.data = theirs

    def forward_no_more(self) -> None:
        """Take the entries out of Megatron's dict, and restore it."""
        if self.data is self._own:
            return
        theirs = self.data
        self.data = self._own
        for name, entry in self._own.items():
            if theirs.get(name) is entry:
                del theirs[name]
        for name, entry in self._made_room.items():
            theirs.setdefault(name, entry)

    def _put_in_here(self, name: str) -> bool:
        return name in self._own and self._own[name] is self.data.get(name)


EMERGING_OPTIMIZERS = Registry()
"""Name -> entry; after ``activate()`` it is Megatron's own registry."""
_BUILDERS: dict[str, Builder] = {}
BUILT_AS: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
"""Optimizer -> the name under which :func:`create_emerging_optimizer` built it."""


@overload
def register_optimizer(name: str, entry: EmergingOptimizerEntry) -> EmergingOptimizerEntry: ...


@overload
def register_optimizer(name: str) -> Callable[[Builder], Builder]: ...


def register_optimizer(name: str, entry: EmergingOptimizerEntry | None = None) -> Any:
    """Register an optimizer under a name.

    With an entry, ``--optimizer NAME`` builds it in Megatron. With the name alone this decorates a builder of plain
    torch, ``(param_groups, config) -> Optimizer``, which :func:`get_optimizer_builder` returns.

    Args:
        name: for ``--optimizer``, or for the config of plain torch.
        entry: an :class:`EmergingOptimizerEntry`, Megatron's own one, or any object with the same four attributes.

    Raises:
        ValueError: if the name is taken.
        TypeError: if the name is no text.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f'the name of an optimizer is text, got {name!r}: write @register_optimizer("mine")')
    registered: MutableMapping[str, Any] = _BUILDERS if entry is None else EMERGING_OPTIMIZERS

    def register(what: Any) -> Any:
        if name in registered:
            raise ValueError(f"an optimizer named {name!r} is registered already: choose another name")
        registered[name] = what
        return what

    return register if entry is None else register(entry)


def get_optimizer_entry(name: str) -> EmergingOptimizerEntry:
    """The entry of an optimizer; :class:`UnknownOptimizerError` suggests near names."""
    return _look_up(name, EMERGING_OPTIMIZERS)


def get_optimizer_builder(name: str) -> Builder:
    """The plain-torch builder; :class:`UnknownOptimizerError` suggests near names."""
    return _look_up(name, _BUILDERS)


def list_optimizer_builders() -> list[str]:
    """Names that :func:`get_optimizer_builder` knows, sorted."""
    return sorted(_BUILDERS)


def list_optimizers() -> list[str]:
    """Names for ``--optimizer`` beside Megatron's own, sorted."""
    untested = EMERGING_OPTIMIZERS.untested
    return sorted(name for name, entry in EMERGING_OPTIMIZERS.items() if untested.get(name) is not entry)


def _look_up[T](name: str, registered: Mapping[str, T]) -> T:
    if isinstance(name, str) and name in registered:
        return registered[name]
    nearest = difflib.get_close_matches(str(name), registered)
    hint = f" (did you mean {' or '.join(map(repr, nearest))}?)" if nearest else ""
    known = ", ".join(sorted(registered)) or "none"
    raise UnknownOptimizerError(f"unknown optimizer {name!r}{hint}: registered are {known}")


def create_emerging_optimizer(
    config: Any, param_groups: list[dict[str, Any]], eopt_name: str, model_chunks: Sequence[Any], pg_collection: Any
) -> tuple[Optimizer, InitStateFn]:
    """Build an optimizer from Megatron's config; also returns its ``init_state_fn``.

    An ``optimizer`` of the groups wins over ``eopt_name``. A ``ValueError`` is for an unknown name, groups that name
    several, and what the optimizer refuses.

    Args:
        model_chunks: the model, one module per virtual pipeline stage.
        pg_collection: Megatron's ``ProcessGroupCollection``.
    """
    names = {group.get("optimizer", eopt_name) for group in param_groups} or {eopt_name}
    if len(names) > 1:
        raise ValueError(f"groups of one optimizer name several: {', '.join(sorted(names))}; build each by itself")
    eopt_name = names.pop()
    entry = get_optimizer_entry(eopt_name)
    to_kwargs = entry.config_to_kwargs or partial(default_adam_based_eopt_config_to_kwargs, eopt_name)
    to_cls = getattr(entry, "config_to_cls", None)
    cls = entry.optimizer_cls if to_cls is None else to_cls(config)
    optimizer = cls(param_groups, **to_kwargs(config, model_chunks, pg_collection))
    BUILT_AS[optimizer] = eopt_name
    return optimizer, entry.init_state_fn


def default_adam_based_eopt_config_to_kwargs(
    eopt_name: str, config: Any, model_chunks: Sequence[Any], pg_collection: Any
) -> dict[str, Any]:
    """Arguments of an optimizer with Adam's betas."""
    kwargs = kwargs_from_config(get_optimizer_entry(eopt_name).optimizer_cls, eopt_name, config)
    return kwargs | {"betas": (config.adam_beta1, config.adam_beta2)}


for _row in OPTIMIZERS.values():
    EMERGING_OPTIMIZERS[_row.name] = EmergingOptimizerEntry(
        _row.cls,
        config_to_kwargs=partial(config_to_kwargs, _row),
        default_param_overrides=muon_param_overrides_factory if _row.owns == "matrices" else {},
    )
muon_config_to_kwargs = partial(config_to_kwargs, OPTIMIZERS["muon"])
adaptive_muon_config_to_kwargs = partial(config_to_kwargs, OPTIMIZERS["adaptive_muon"])

# The names that Megatron-Core gives them.
_EMERGING_OPTIMIZERS = EMERGING_OPTIMIZERS
_adaptive_muon_config_to_kwargs = adaptive_muon_config_to_kwargs
_create_emerging_optimizer = create_emerging_optimizer
_default_adam_based_eopt_config_to_kwargs = default_adam_based_eopt_config_to_kwargs
_default_param_overrides_factory = default_param_overrides_factory
_eopt_init_state_fn = eopt_init_state_fn
_get_qkv_split_shapes = get_qkv_split_shapes
_is_muon_excluded = is_muon_excluded
_is_nonlinear_or_embedding = is_nonlinear_or_embedding
_kwargs_from_config = kwargs_from_config
_muon_config_to_kwargs = muon_config_to_kwargs


def optimizer_class(name: str) -> Any:
    """Class that is registered under a name, else ``object``."""
    made_by: Any = getattr(EMERGING_OPTIMIZERS.get(name), "optimizer_cls", object)
    while isinstance(made_by, partial):
        made_by = made_by.func
    cls = made_by if isinstance(made_by, type) else getattr(made_by, "__annotations__", {}).get("return")
    return cls if isinstance(cls, type) else object


def name_of(optimizer: Optimizer) -> str:
    """Name for ``--optimizer``, also Megatron's ``adam`` and ``sgd``; else ``other``."""
    if optimizer in BUILT_AS:
        return BUILT_AS[optimizer]
    names = {entry.optimizer_cls: name for name, entry in sorted(EMERGING_OPTIMIZERS.items())}
    names |= {row.cls: row.name for row in OPTIMIZERS.values()}  # whatever else a user has registered it under
    for cls in type(optimizer).__mro__:
        if cls in names:
            return names[cls]
        for kind in ("Adam", "SGD"):  # of torch, Transformer Engine or Apex
            if kind in cls.__name__:
                return kind.lower()
    return "other"


def takes_matrices(name: str) -> bool:
    """Whether a registered optimizer is for matrices."""
    cls = optimizer_class(name)
    counts = issubclass(cls, BaseOptimizer) and cls.described_matrices is not BaseOptimizer.described_matrices
    return counts or issubclass(cls, OrthogonalizedOptimizer)


def class_named(name: str) -> type[BaseOptimizer]:
    """Class of a registered optimizer; the base of ours for others."""
    cls = optimizer_class(name)
    return cls if issubclass(cls, BaseOptimizer) else BaseOptimizer
