"""The settings of all optimizers of plain torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from megatron_eopt.settings.other_names import check_arguments

Package = Literal["transformer_engine", "apex"]


@dataclass(kw_only=True)
class OptimizerConfig:
    """What ``build_optimizer`` builds; without ``preset`` as the class does.

    The defaults of classes are those of their originals, whose sizes of updates differ: those of ``muon`` are Jordan's,
    for rates such as 0.02. A ``preset`` sets what is recommended. A field that the optimizer has no use of is an error;
    None leaves it out.

    Attributes:
        name: under which a builder is registered.
        preset: ``match_adamw`` for what is recommended of the optimizer
            (:data:`~megatron_eopt.settings.presets.TO_BEGIN_WITH`), a published one of ``muon``, ``adaptive_muon`` or
            ``mars_muon``, or ``megatron`` of ``soap``. Fields and options come before it. None for the class's own.
        lr: learning rate; of optimizers of matrices, that of the matrices. None for the default of the class, with a
            ``preset`` for what is recommended beside AdamW's rate.
        weight_decay: of parameters with more than one dimension.
        betas: of ``lion``, ``schedule_free_adamw``, ``ademamix``, ``soap`` and AdamW, also beside an optimizer of
            matrices. None for the optimizer's own, (0.9, 0.95) of AdamW.
        eps: of the same but for ``lion``, above 0; None for 1e-8.
        fused: whether AdamW uses torch's fused kernel; None for yes, if there is one; ``transformer_engine`` or
            ``apex``, for ``adamw`` alone, for that package's FusedAdam.
        muon_momentum: of ``muon``, in [0, 1); None for 0.95.
        muon_ns_steps: Newton-Schulz steps of ``muon``, 1 to 100; None for 5.
        muon_adam_lr: learning rate of AdamW beside an optimizer of matrices; None for ``lr``, with a ``preset`` for
            the rate beside which ``lr`` is recommended; 3e-4 where ``lr`` is None too.
        muon_embeddings: whether ``muon`` rather than AdamW is given embeddings, output layers and biases, where they
            are matrices whose long side is at most ten times the short one, as in KempnerForge.
        schedule_free_warmup_steps: of ``schedule_free_adamw``, at least 0; None for 0.
        spectron_factor_pairs: for ``spectron``, names of parameters that are the two factors of one weight, such as
            ``[("blocks.*.up.A", "blocks.*.up.B")]``; each ``*`` stands for the same text in both.
        options: further arguments of the optimizer's class, such as ``{"rank": 32}`` for ``spectron``.
    """

    name: str = "adamw"
    preset: str | None = None
    lr: float | None = None
    weight_decay: float = 0.1
    betas: tuple[float, float] | None = None
    eps: float | None = None
    fused: bool | Package | None = None
    muon_momentum: float | None = None
    muon_ns_steps: int | None = None
    muon_adam_lr: float | None = None
    muon_embeddings: bool = False
    schedule_free_warmup_steps: int | None = None
    spectron_factor_pairs: Sequence[tuple[str, str]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


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
            f"a config says by its field 'name' what to build, got {type(config).__name__} without it: give "
            f"OptimizerConfig(name='muon', lr=0.02), a mapping or an object with such fields, or the name alone"
        )
    return given


def set_fields(config: Any) -> dict[str, Any]:
    """Fields that are not None, and not the defaults of a dataclass."""
    defaults = {each.name: each.default for each in fields(config)} if is_dataclass(config) else {}
    return {
        field: value
        for field, value in given_fields(config).items()
        if value is not None and (field not in defaults or value != defaults[field])
    }


def config_of(config: Any, name: str) -> OptimizerConfig:
    """Our config from whatever :func:`given_fields` takes; the rest are defaults.

    A ``TypeError`` is for an unknown field, unless the config is for another optimizer.
    """
    given = given_fields(config, name)
    if given["name"] != name:
        given = {field: given[field] for field in FIELDS if field in given}
    check_arguments(OptimizerConfig.__name__, given, FIELDS)
    return OptimizerConfig(**{**given, "name": name})
