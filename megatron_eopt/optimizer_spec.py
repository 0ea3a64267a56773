"""What a row of the table of optimizers says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_eopt.flags import CliFlag
from megatron_eopt.settings.of_class import settings_of
from megatron_eopt.settings.records import EXECUTION, Setting
from megatron_eopt.step.base import BaseOptimizer


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """A row of the table."""

    name: str  # for ``--optimizer``, and for the config of plain torch
    cls: type[BaseOptimizer]
    of_muon: tuple[str, ...] = ()  # settings that it takes from Muon's flags
    betas: str = ""  # prefix of the flags for its betas and ``eps``
    flags: tuple[Any, ...] = ()  # given as flags, or as names of settings; then flags
    update_rms: float | None = None  # RMS of an update's entries, before the rate, where no matrix has one of its own

    def __post_init__(self) -> None:
        known = self.settings
        flags = [CliFlag(each) if isinstance(each, str) else each for each in self.flags]
        object.__setattr__(self, "flags", tuple(flag.completed(self.name, known) for flag in flags))

    @property
    def owns(self) -> Literal["matrices", "all"]:
        """The parameters that it updates in Megatron; Adam updates the rest."""
        return "all" if self.cls.elementwise else "matrices"

    @property
    def settings(self) -> Mapping[str, Setting]:
        """Arguments of the constructor, and what ``execution`` has."""
        known = settings_of(self.cls)
        if "execution" not in known:
            return known
        return {**known, **{setting.name: setting for setting in EXECUTION}}

    def takes(self, setting: str) -> bool:
        """Whether the optimizer has a setting."""
        return setting in self.settings
