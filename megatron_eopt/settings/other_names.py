"""Names that other libraries have for settings, and what they are called here."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from megatron_eopt.orthogonalize.choices import LIKE, did_you_mean, listing
from megatron_eopt.settings.of_class import arguments_of
from megatron_eopt.settings.records import EXECUTION, names_of


@dataclass(frozen=True)
class OtherName:
    """What a name of another library means here.

    Attributes:
        ours: names here; that which an optimizer has counts.
        values: values there -> values here, by which the name may be written in place of ours; None where it may not.
        but: what else there is to say.
    """

    ours: tuple[str, ...] = ()
    values: Mapping[Any, Any] | None = None
    but: str = ""

    def among(self, known: Collection[str]) -> str | None:
        """The name that an optimizer has."""
        return next((name for name in self.ours if name in known), None)


def _same(*ours: str) -> OtherName:
    return OtherName(ours, {})


_MOMENTUM = ("momentum", "momentum_beta", "muon_momentum")
_STEPS = ("num_ns_steps", "ns_steps", "muon_ns_steps")

OTHER_NAMES = {
    # emerging-optimizers and SOAP's authors: as good as ours
    "momentum": _same("momentum_beta", "muon_momentum"),
    "momentum_beta": _same("momentum", "muon_momentum"),
    "nesterov": _same("use_nesterov"),
    "use_nesterov": _same("nesterov"),
    "spectral_radius": _same("radius"),
    "num_power_iter": _same("num_power_iterations"),
    "use_eigh": OtherName(("basis_method",), {False: "qr", True: "eigh"}),
    "max_precond_dim": _same("max_dim"),
    # torch, Keller Jordan, timm, dion, heavyball, distributed_shampoo
    "learning_rate": OtherName(("lr",)),
    "wd": OtherName(("weight_decay",)),
    "cautious_wd": OtherName(("cautious_weight_decay",)),
    "epsilon": OtherName(("eps", "adam_eps")),
    "mu": OtherName(_MOMENTUM),
    "beta": OtherName(_MOMENTUM),
    "betas": OtherName(("adam_betas", *_MOMENTUM), but="betas are AdamW's"),
    "adam_betas": OtherName(("betas",)),
    "adamw_betas": OtherName(("adam_betas", "betas")),
    "adam_eps": OtherName(("eps",)),
    "adamw_eps": OtherName(("adam_eps", "eps")),
    "adam_lr": OtherName(("muon_adam_lr",)),
    "adamw_lr": OtherName(("adam_lr", "muon_adam_lr")),
    "num_ns_steps": OtherName(_STEPS),
    "ns_steps": OtherName(_STEPS),
    "backend_steps": OtherName(_STEPS),
    "ns_coefficients": OtherName(("coefficient_type",)),
    "adjust_lr_fn": OtherName(
        ("scale_mode",),
        but="'original' is 'shape_scaling', 'match_rms_adamw' is 'spectral' with extra_scale_factor=0.2",
    ),
    "adjust_lr": OtherName(
        ("scale_mode",),
        but="'spectral_norm' is 'unit_rms_norm', 'rms_norm' is 'spectral' with extra_scale_factor=0.2",
    ),
    "max_preconditioner_dim": OtherName(("max_dim",)),
    "max_size_triangular": OtherName(("max_dim",)),
    "distributed_mesh": OtherName(but="DTensors know their mesh, leave it out"),
}
"""Another name -> what it means here."""


def meant(name: str, known: Collection[str], likeness: float = LIKE) -> str:
    """What an unknown name may mean, for the end of a message; empty if nobody knows."""
    if "execution" in known and name in names_of(EXECUTION):
        return f": it is a field of Execution, pass execution=Execution({name}=...)"
    other = OTHER_NAMES.get(name, OtherName())
    ours = other.among(known)
    if ours is not None:
        return f", did you mean {ours!r}?{other.but and ' '}{other.but}"
    if other.but and not other.ours:
        return f": {other.but}"
    return did_you_mean(name, known, likeness)


def check_arguments(called: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise ``TypeError`` for an unknown argument, saying what it may mean."""
    for name in given:
        if name not in known:
            hint = meant(name, known) or f": expected {listing(known)}"
            raise TypeError(f"{called}() got an unexpected keyword argument {name!r}{hint}")


def renamed(owner: str, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Settings by our names; a ``ValueError`` where two names of one have two values."""
    settings = dict(given)
    for name, value in given.items():
        other = OTHER_NAMES.get(name)
        if name in known or other is None or other.values is None:
            continue
        ours = other.among(known)
        if ours is None:
            continue
        del settings[name]
        value = other.values.get(value, value)
        if settings.setdefault(ours, value) != value:
            raise ValueError(
                f"{owner}: {ours}={settings[ours]!r} and {name}={value!r} are two names of one setting: leave {name!r} "
                f"out"
            )
    return settings


def by_our_names[**P](init: Callable[P, None]) -> Callable[P, None]:
    """A constructor that takes other names too, and says what an unknown one may mean."""
    arguments = arguments_of(init)[1:]
    known = [argument.name for argument in arguments]
    takes_any = any(argument.kind is Parameter.VAR_KEYWORD for argument in arguments)

    @functools.wraps(init)
    def accepting(*args: P.args, **kwargs: P.kwargs) -> None:
        name = type(args[0]).__name__
        settings: Any = renamed(name, kwargs, known)
        if not takes_any:
            check_arguments(name, settings, known)
        init(*args, **settings)

    return accepting
