"""Settings of single parameters: who may set them, how they are written, and which of several wins.

Parameters are described by :class:`ParameterInfo`, so nothing here needs a model or Megatron.
"""

from megatron_eopt.overrides.entries import Entry, Layer, entries_from_dict, make_entry, read_overrides
from megatron_eopt.overrides.known import Known, OverrideError, SettingError
from megatron_eopt.overrides.rules import Overruled, Resolved, match_counts, resolve
from megatron_eopt.overrides.selectors import ParameterInfo, Predicate, Selector, unwrapped
from megatron_eopt.overrides.settings import SETTINGS, check_setting, check_settings

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
    "SettingError",
    "check_setting",
    "check_settings",
    "entries_from_dict",
    "make_entry",
    "match_counts",
    "read_overrides",
    "resolve",
    "unwrapped",
]
