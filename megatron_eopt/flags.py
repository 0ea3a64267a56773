"""Flags of the command line, and the fields of Megatron's config that they fill."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any

from megatron_eopt.settings.records import Setting
from megatron_eopt.settings.values import Check


@dataclass(frozen=True)
class CliFlag:
    """``--OPTIMIZER-SETTING``, or ``--OPTIMIZER-no-SETTING`` for the default True.

    Of a setting of the optimizer's constructor the record and the signature say what is left out here.
    """

    setting: str
    help: str = ""
    default: Any = Parameter.empty  # where Megatron's flag has another than the constructor, or a run knows more
    kind: type = str  # of a value without a default
    choices: tuple[str, ...] = ()
    field: str = ""  # of the config, where it has another name
    shared: bool = False  # by all optimizers of matrices that have the setting
    execution: bool = False  # read by those optimizers alone that take an Execution
    megatrons: bool = False  # Megatron has the flag itself, so that it is not added
    metavar: str | None = None
    check: Check | None = None  # which values it may have
    optimizer: str = ""  # filled in for the flags of a row; empty for a flag of the run

    def completed(self, optimizer: str, known: Mapping[str, Setting]) -> "CliFlag":
        """The flag of an optimizer, with what its settings say."""
        flag = replace(self, optimizer=optimizer)
        if self.setting not in known:
            return flag
        setting = known[self.setting]
        if flag.default is Parameter.empty:
            flag = replace(flag, default=setting.default)
        return replace(
            flag,
            help=flag.help or setting.help,
            choices=flag.choices or setting.choices,
            megatrons=flag.megatrons or (setting.megatrons and optimizer == "muon"),
            metavar=flag.metavar or setting.metavar,
            check=flag.check or setting.check,
        )

    @property
    def name(self) -> str:
        """The flag as it is typed."""
        words = (self.optimizer, "no" if self.default is True else "", self.setting)
        return "--" + "-".join(filter(None, words)).replace("_", "-")

    @property
    def dest(self) -> str:
        """Field of the config and of the parsed arguments."""
        return self.field or "_".join(filter(None, (self.optimizer, self.setting)))

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``add_argument`` without name, destination and help."""
        if isinstance(self.default, bool):
            return {"action": f"store_{not self.default}".lower()}
        kind = self.kind if self.default is None else type(self.default)
        choices = {"choices": self.choices} if self.choices else {}
        return {"type": kind, "default": self.default, "metavar": self.metavar, **choices}
