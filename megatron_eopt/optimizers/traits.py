"""What one kind of optimizer has otherwise than another."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_eopt.optimizers.modifiers import MODIFIERS

STEPS = "num_ns_steps"
COEFFICIENTS = "coefficient_type"
SCALE_MODE = "scale_mode"
EXTRA_SCALE = "extra_scale_factor"
PLANNED_IN_GROUPS = tuple(
    key for key in (STEPS, COEFFICIENTS, SCALE_MODE, EXTRA_SCALE, *MODIFIERS) if key not in ("beta2", "eps")
)


@dataclass(frozen=True)
class Traits:
    """What a class of optimizers says of itself.

    Attributes:
        carried_settings: settings of a group that the optimizer itself makes, and with which a resumed run has to go
            on.
        planned_in_groups: settings of groups on which the plan depends.
        split_lengths: how many logical matrices a fused projection may have.
        momentum_key: name of the momentum in a group.
        nesterov_key: name of the look-ahead in a group.
        decays_weights: whether there is a weight decay; where there is none, what fills settings from a run's leaves
            it at 0.
        instead_of_decay: what replaces weight decay, for messages.
        size_rule: how large an update is, where the scale settings have no effect.
        no_settings: settings of Muon's groups that a relative lacks.
        has_modifiers: the values of modifiers that it has, where it lacks some: see
            :mod:`~megatron_eopt.optimizers.modifiers`.
        measures: whether each step measures global matrices for the size of updates.
        multiplies: whether the kernel's products are its own, and nothing is orthogonalized.
        keeps_momenta: whether the program needs momenta after they were orthogonalized.
        weight_keys: state keys that hold a copy of the weight: ``scale_rows`` scales them too.
        live_key: state key of the training weights where the model file of a checkpoint holds ``exported()`` ones.
        pairs_rows: whether state pairs rows with rows, so that their order, which may follow the ranks, is part of it.
    """

    carried_settings: frozenset[str] = frozenset()
    planned_in_groups: tuple[str, ...] = PLANNED_IN_GROUPS
    split_lengths: tuple[int, ...] = (3, 4)
    momentum_key: str = "momentum"
    nesterov_key: str = "nesterov"
    decays_weights: bool = True
    instead_of_decay: str = ""
    size_rule: str | None = None
    no_settings: frozenset[str] = frozenset()
    has_modifiers: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    measures: bool = False
    multiplies: bool = False
    keeps_momenta: bool = False
    weight_keys: tuple[str, ...] = ()
    live_key: str | None = None
    pairs_rows: bool = False
