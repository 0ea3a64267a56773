"""The tables themselves: name -> what is needed to build an optimizer for Megatron, and the builders of plain torch."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer

from megatron_eopt.optimizers.logical import LogicalMatrices

InitStateFn = Callable[..., None]
ConfigToKwargs = Callable[[Any, Sequence[Any], Any], dict[str, Any]]
Builder = Callable[..., Optimizer]


def default_param_overrides_factory() -> dict[Any, dict[str, Any]]:
    """The default routing, parameters that are no matrices and embeddings to Adam, by Megatron's ``ParamKey``."""
    # ParamKey is Megatron's, so this is asked of the one room that may import it, and only when it is called.
    from megatron_eopt.megatron.routing import nonlinear_and_embedding_to_adam

    return nonlinear_and_embedding_to_adam()


class _DefaultOverrides:
    """Field of an entry that is made by :func:`default_param_overrides_factory` when it is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.key = f"_{name}"

    def __get__(self, entry: Any, owner: type | None = None) -> Any:
        if entry is None:
            return None  # what dataclass takes for the default of the field
        if getattr(entry, self.key) is None:
            setattr(entry, self.key, default_param_overrides_factory())
        return getattr(entry, self.key)

    def __set__(self, entry: Any, value: dict[Any, dict[str, Any]] | None) -> None:
        setattr(entry, self.key, value)


def eopt_init_state_fn(opt: Optimizer, config: Any = None) -> None:
    """Create every state tensor of every parameter, gradient or not: what a checkpoint is loaded into.

    Raises:
        TypeError: for an optimizer that has no ``init_state``.
    """
    init_state = getattr(opt, "init_state", None)
    if init_state is None:
        raise TypeError(
            f"{type(opt).__name__} has no init_state(), which creates the state of every parameter: "
            f"add one, or register the optimizer with an init_state_fn of its own"
        )
    init_state()


@dataclass(eq=False, repr=False)  # a repr would ask for the overrides, and so import Megatron
class EmergingOptimizerEntry:
    """What is needed to build an optimizer for Megatron.

    Attributes:
        optimizer_cls: subclass of ``torch.optim.Optimizer``.
        init_state_fn: ``(opt, config=None)``, creates every state tensor of every parameter.
        config_to_kwargs: ``(config, model_chunks, pg_collection) -> dict`` of arguments for ``optimizer_cls``; None for
            :func:`default_adam_based_eopt_config_to_kwargs`.
        default_param_overrides: Megatron's ``ParamKey`` -> settings, applied to every model; by default it gives
            parameters that are no matrices, and embeddings, to Adam.
    """

    optimizer_cls: type[Optimizer]
    init_state_fn: InitStateFn = eopt_init_state_fn
    config_to_kwargs: ConfigToKwargs | None = None
    default_param_overrides: Any = _DefaultOverrides()


class UnknownOptimizerError(ValueError, KeyError):
    """A name under which no optimizer is registered: a bad value of a config, and a missing key of the registry."""

    __str__ = Exception.__str__  # KeyError's puts the message in quotes


EMERGING_OPTIMIZERS: dict[str, EmergingOptimizerEntry] = {}
_BUILDERS: dict[str, Builder] = {}
_BUILT: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()


@overload
def register_optimizer(name: str, entry: EmergingOptimizerEntry) -> EmergingOptimizerEntry: ...


@overload
def register_optimizer(name: str) -> Callable[[Builder], Builder]: ...


def register_optimizer(name: str, entry: EmergingOptimizerEntry | None = None) -> Any:
    """Register an optimizer under a name.

    With an entry, ``--optimizer NAME`` builds it in Megatron. With the name alone this is a decorator for a builder of
    plain torch, ``(param_groups, config) -> Optimizer``, which :func:`get_optimizer_builder` returns.

    Raises:
        ValueError: if the name is taken.
        TypeError: if ``entry`` is not an entry.
    """
    if entry is not None:
        if not isinstance(entry, EmergingOptimizerEntry):
            raise TypeError(f"expected an EmergingOptimizerEntry for {name!r}, got {type(entry).__name__}")
        _check_free(name, EMERGING_OPTIMIZERS)
        EMERGING_OPTIMIZERS[name] = entry
        return entry
    _check_free(name, _BUILDERS)

    def decorate(builder: Builder) -> Builder:
        _check_free(name, _BUILDERS)
        _BUILDERS[name] = builder
        return builder

    return decorate


def get_optimizer_entry(name: str) -> EmergingOptimizerEntry:
    """The entry of an optimizer.

    Raises:
        UnknownOptimizerError: for an unknown name, with the nearest ones.
    """
    return _look_up(name, EMERGING_OPTIMIZERS)


def get_optimizer_builder(name: str) -> Builder:
    """The plain-torch builder that was registered under a name.

    Raises:
        UnknownOptimizerError: for an unknown name, with the nearest ones.
    """
    return _look_up(name, _BUILDERS)


def list_optimizer_builders() -> list[str]:
    """Names that :func:`get_optimizer_builder` knows, sorted."""
    return sorted(_BUILDERS)


def list_optimizers() -> list[str]:
    """Names that ``--optimizer`` knows beside Megatron's own, sorted."""
    return sorted(EMERGING_OPTIMIZERS)


def _check_free(name: str, registered: Iterable[str]) -> None:
    if name in registered:
        raise ValueError(f"an optimizer named {name!r} is registered already: choose another name")


def _look_up[T](name: str, registered: Mapping[str, T]) -> T:
    if name in registered:
        return registered[name]
    nearest = difflib.get_close_matches(name, registered)
    hint = f" (did you mean {' or '.join(map(repr, nearest))}?)" if nearest else ""
    raise UnknownOptimizerError(
        f"unknown optimizer {name!r}{hint}: registered are {', '.join(sorted(registered)) or 'none'}"
    )


def create_emerging_optimizer(
    config: Any, param_groups: list[dict[str, Any]], eopt_name: str, model_chunks: Sequence[Any], pg_collection: Any
) -> tuple[Optimizer, InitStateFn]:
    """Build an optimizer from Megatron's config.

    Args:
        config: Megatron's ``OptimizerConfig``.
        param_groups: parameter groups, as Megatron makes them. Where they name their ``optimizer``, that is built:
            Megatron-Core 0.18 puts them apart by it, and then calls this with the name of the run's.
        eopt_name: name in the registry, of groups that name none.
        model_chunks: the model, one module per virtual pipeline stage.
        pg_collection: Megatron's ``ProcessGroupCollection``.

    Returns:
        The optimizer and the function that creates its state.

    Raises:
        ValueError: for an unknown name, and for what the optimizer refuses.
    """
    names = {group.get("optimizer", eopt_name) for group in param_groups} or {eopt_name}
    if len(names) > 1:
        raise ValueError(f"groups of one optimizer name several: {', '.join(sorted(names))}; build each by itself")
    eopt_name = names.pop()
    entry = get_optimizer_entry(eopt_name)
    if entry.config_to_kwargs is None:
        kwargs = default_adam_based_eopt_config_to_kwargs(eopt_name, config, model_chunks, pg_collection)
    else:
        kwargs = entry.config_to_kwargs(config, model_chunks, pg_collection)
    optimizer = entry.optimizer_cls(param_groups, **kwargs)
    _BUILT[optimizer] = eopt_name
    return optimizer, entry.init_state_fn


def takes_matrices(name: str) -> bool:
    """Whether an optimizer is for matrices, by what is registered under its name."""
    entry = EMERGING_OPTIMIZERS.get(name)
    return entry is not None and issubclass(entry.optimizer_cls, LogicalMatrices)


def pairs_rows(name: str) -> bool:
    """Whether the state of an optimizer for matrices pairs rows with rows, by what is registered under its name."""
    entry = EMERGING_OPTIMIZERS.get(name)
    return entry is not None and bool(getattr(entry.optimizer_cls, "pairs_rows", False))


def decays_weights(name: str) -> bool:
    """Whether an optimizer has a weight decay, by what is registered under its name; any other is taken to have one."""
    entry = EMERGING_OPTIMIZERS.get(name)
    return entry is None or bool(getattr(entry.optimizer_cls, "decays_weights", True))


def built_as(optimizer: Optimizer) -> str | None:
    """The name under which :func:`create_emerging_optimizer` built an optimizer; None for any other."""
    return _BUILT.get(optimizer)


def kwargs_from_config(optimizer_cls: type, prefix: str, config: Any) -> dict[str, Any]:
    """Arguments of an optimizer that a config has values for.

    For every named parameter of ``__init__`` but self and params: ``config.{prefix}_{name}``, else ``config.{name}``.
    """
    kwargs = {}
    for name, parameter in inspect.signature(optimizer_cls.__init__).parameters.items():  # type: ignore[misc]
        if name in ("self", "params") or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        for attribute in (f"{prefix}_{name}", name):
            if hasattr(config, attribute):
                kwargs[name] = getattr(config, attribute)
                break
    return kwargs


def default_adam_based_eopt_config_to_kwargs(
    eopt_name: str, config: Any, model_chunks: Sequence[Any], pg_collection: Any
) -> dict[str, Any]:
    """Arguments of an optimizer that is built like Adam: what the config has under its name, and Adam's betas."""
    kwargs = kwargs_from_config(get_optimizer_entry(eopt_name).optimizer_cls, eopt_name, config)
    kwargs["betas"] = (config.adam_beta1, config.adam_beta2)
    return kwargs
