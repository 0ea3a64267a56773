"""What to build, and how: the settings of all optimizers in one dataclass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from numbers import Real
from typing import Any, Literal, get_args

from megatron_eopt.orthogonalize.choices import check_choice, check_count
from megatron_eopt.registry import get_optimizer_builder

Package = Literal["transformer_engine", "apex"]


@dataclass(kw_only=True)
class OptimizerConfig:
    """Which optimizer :func:`~megatron_eopt.plain.build.build_optimizer` builds, checked when it is made.

    Attributes:
        name: under which a builder is registered.
        lr: learning rate; of ``muon`` and the like that of the matrices.
        weight_decay: of matrices and all else that has more than one dimension.
        betas: of AdamW, also of the one beside an optimizer of matrices; of ``lion``, ``schedule_free_adamw`` and
            ``soap`` theirs. None for the optimizer's own: (0.9, 0.95) of AdamW.
        eps: of the same but for ``lion``, above 0.
        fused: whether AdamW uses torch's fused kernel where torch has one for the parameters; ``transformer_engine`` or
            ``apex``, for ``adamw`` alone, for that package's FusedAdam.
        muon_momentum: of ``muon``, in [0, 1).
        muon_ns_steps: Newton-Schulz steps of ``muon``, at least 1.
        muon_adam_lr: learning rate of AdamW beside an optimizer of matrices; None for ``lr``.
        muon_embeddings: whether ``muon`` is given embeddings, output layers and biases too, where they are matrices
            whose long side is at most ten times the short one, as in KempnerForge. Otherwise AdamW is.
        schedule_free_warmup_steps: of ``schedule_free_adamw``, at least 0.
        spectron_factor_pairs: for ``spectron``, names of parameters that are the two factors of one weight, such as
            ``[("blocks.*.up.A", "blocks.*.up.B")]``; each ``*`` stands for the same text in both.
        options: further arguments of the optimizer's class by their names, such as ``{"rank": 32}`` for ``spectron``.

    Raises:
        ValueError: for a name that is not registered, with the nearest ones, or a setting out of its range.
    """

    name: str = "adamw"
    lr: float = 3e-4
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
        for rate in ("lr", "weight_decay", "muon_adam_lr"):
            value = getattr(self, rate)
            if value is not None and not (_is_number(value) and 0 <= value < inf):
                raise ValueError(f"{rate} must be a finite number of at least 0, got {value!r}")
        two = isinstance(self.betas, Sequence) and len(self.betas) == 2
        if self.betas is not None and not (two and all(map(_is_share, self.betas))):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas!r}")
        if not (_is_number(self.eps) and 0 < self.eps < inf):
            raise ValueError(f"eps must be a finite number above 0, got {self.eps!r}")
        if not isinstance(self.fused, bool):
            check_choice("fused, unless it is True or False,", self.fused, get_args(Package))
        if not _is_share(self.muon_momentum):
            raise ValueError(f"muon_momentum must lie in [0, 1), got {self.muon_momentum!r}")
        for count, least in (("muon_ns_steps", 1), ("schedule_free_warmup_steps", 0)):
            check_count(count, getattr(self, count), least)
        for pair in self.spectron_factor_pairs:
            if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(each, str) for each in pair):
                raise ValueError(f"spectron_factor_pairs are pairs of names, got {pair!r} among them")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_share(value: float) -> bool:
    return _is_number(value) and 0 <= value < 1
