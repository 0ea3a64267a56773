"""Settings of single parameters: who may set them, where they are written, and which of several wins.

Pure Python: parameters are described by :class:`ParameterInfo`, so nothing here needs a model or Megatron.
"""

from megatron_eopt.overrides.conditions import ParameterInfo, Predicate, unwrapped
from megatron_eopt.overrides.errors import OverrideError, SettingError
from megatron_eopt.overrides.files import read_overrides
from megatron_eopt.overrides.known import Known
from megatron_eopt.overrides.python import entries_from_dict, entries_from_megatron, make_entry
from megatron_eopt.overrides.rules import Entry, Layer, Overruled, Resolved, match_counts, resolve
from megatron_eopt.overrides.selectors import Selector
from megatron_eopt.overrides.settings import SETTINGS, Setting, check_setting, check_settings

__all__ = [
    "SETTINGS",
    "Entry",
    "Known",
    "Layer",
    "OverrideError",
    "Overruled",
    "ParameterInfo",
    "Predicate",
    "Resolved",
    "Selector",
    "Setting",
    "SettingError",
    "check_setting",
    "check_settings",
    "entries_from_dict",
    "entries_from_megatron",
    "make_entry",
    "match_counts",
    "read_overrides",
    "resolve",
    "unwrapped",
]
