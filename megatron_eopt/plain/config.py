"""The settings of all optimizers of plain torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from megatron_eopt.orthogonalize.choices import check_choice, did_you_mean, listing
from megatron_eopt.registry import get_optimizer_builder
from megatron_eopt.settings.values import ABOVE_0, AT_LEAST_0, BELOW_1, Check, count, flag, two_below_1

Package = Literal["transformer_engine", "apex"]

_CHECKS: dict[str, Check] = {  # by field
    "lr": AT_LEAST_0,
    "weight_decay": AT_LEAST_0,
    "betas": two_below_1,
    "eps": ABOVE_0,
    "muon_momentum": BELOW_1,
    "muon_ns_steps": count(1),
    "muon_adam_lr": AT_LEAST_0,
    "muon_embeddings": flag,
    "schedule_free_warmup_steps": count(0),
}
_MAY_BE_NONE = ("lr", "betas", "muon_adam_lr")


@dataclass(kw_only=True)
class OptimizerConfig:
    """What :func:`~megatron_eopt.plain.build.build_optimizer` builds; checked when made.

    Attributes:
        name: under which a builder is registered.
        lr: learning rate; of optimizers of matrices, that of the matrices. None for the default of the class.
        weight_decay: of parameters with more than one dimension.
        betas: of ``lion``, ``schedule_free_adamw``, ``ademamix``, ``soap`` and AdamW, also beside an optimizer of
            matrices. None for the optimizer's own, (0.9, 0.95) of AdamW.
        eps: of the same but for ``lion``, above 0.
        fused: whether AdamW uses torch's fused kernel, if there is one; ``transformer_engine`` or ``apex``, for
            ``adamw`` alone, for that package's FusedAdam.
        muon_momentum: of ``muon``, in [0, 1).
        muon_ns_steps: Newton-Schulz steps of ``muon``, 1 to 100.
        muon_adam_lr: learning rate of AdamW beside an optimizer of matrices; None for ``lr``, and for 3e-4 where that
            is None too.
        muon_embeddings: whether ``muon`` rather than AdamW is given embeddings, output layers and biases, where they
            are matrices whose long side is at most ten times the short one, as in KempnerForge.
        schedule_free_warmup_steps: of ``schedule_free_adamw``, at least 0.
        spectron_factor_pairs: for ``spectron``, names of parameters that are the two factors of one weight, such as
            ``[("blocks.*.up.A", "blocks.*.up.B")]``; each ``*`` stands for the same text in both.
        options: further arguments of the optimizer's class, such as ``{"rank": 32}`` for ``spectron``.

    Raises:
        ValueError: for an unknown name, with the nearest ones, or a setting out of its range.
        TypeError: for an unknown field, or a setting of another type.
    """

    name: str = "adamw"
    lr: float | None = None
    weight_decay: float = 0.1
    betas: tuple[float, float] | None = None
    eps: float = 1e-8
    fused: bool | Package = True
    muon_momentum: float = 0.95
    muon_ns_steps: int = 5
    muon_adam_lr: float | None = None
    muon_embeddings: bool = False
    schedule_free_warmup_steps: int = 0
    spectron_factor_pairs: Sequence[tuple[str, str]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        get_optimizer_builder(self.name)
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                check(name, value)
        if not isinstance(self.fused, bool):
            check_choice("fused, unless it is True or False,", self.fused, get_args(Package))
        if not isinstance(self.options, Mapping):
            raise ValueError(f"options must be a mapping of arguments to values, got {self.options!r}")
        for pair in self.spectron_factor_pairs:
            if isinstance(pair, str) or len(pair) != 2:
                raise ValueError(f"spectron_factor_pairs are pairs of names, got {pair!r} among them")


FIELDS = [each.name for each in fields(OptimizerConfig)]


def given_fields(config: Any, name: str | None = None) -> dict[str, Any]:
    """Fields of a mapping, object or name; ``TypeError`` without any."""
    given: dict[str, Any] = {}
    if isinstance(config, str):
        given["name"] = config
    elif isinstance(config, Mapping):
        given.update((str(field), value) for field, value in config.items())
    elif not isinstance(config, type):
        for field in (*FIELDS, *getattr(config, "__dict__", ())):
            if hasattr(config, field) and not field.startswith("_"):
                given[field] = getattr(config, field)
    if name and given:
        given.setdefault("name", name)
    if "name" not in given:
        raise TypeError(
            f"a config says by its field 'name' what to build, got {type(config).__name__} without it. Write "
            f"OptimizerConfig(name='muon', lr=0.02, muon_adam_lr=3e-3), a mapping or an object with such fields, or "
            f"'muon' for all defaults; a config of Megatron-Core is for megatron_eopt.get_megatron_optimizer"
        )
    return given


def config_of(config: Any, name: str) -> OptimizerConfig:
    """Our config from whatever :func:`given_fields` takes; the rest are defaults.

    A ``TypeError`` is for an unknown field, unless the config is for another optimizer.
    """
    given = given_fields(config, name)
    wrong = [f"{field!r}{did_you_mean(field, FIELDS)}" for field in given if field not in FIELDS]
    if wrong and given["name"] == name:
        raise TypeError(
            f"unknown fields in {type(config).__name__}: {'; '.join(wrong)}. A config has {listing(FIELDS, 'and')}; "
            f"further arguments of the optimizer's class go into options"
        )
    taken = {field: given[field] for field in FIELDS if field in given}
    taken["name"] = name
    return OptimizerConfig(**taken)
