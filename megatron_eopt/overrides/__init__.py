"""Settings of single parameters, without a model or Megatron."""

from megatron_eopt.overrides.entries import Entry as Entry
from megatron_eopt.overrides.entries import Layer as Layer
from megatron_eopt.overrides.entries import entries_from_dict as entries_from_dict
from megatron_eopt.overrides.entries import make_entry as make_entry
from megatron_eopt.overrides.entries import read_overrides as read_overrides
from megatron_eopt.overrides.known import Known as Known
from megatron_eopt.overrides.known import OverrideError as OverrideError
from megatron_eopt.overrides.known import SettingError as SettingError
from megatron_eopt.overrides.rules import Overruled as Overruled
from megatron_eopt.overrides.rules import Resolved as Resolved
from megatron_eopt.overrides.rules import match_counts as match_counts
from megatron_eopt.overrides.rules import resolve as resolve
from megatron_eopt.overrides.selectors import ParameterInfo as ParameterInfo
from megatron_eopt.overrides.selectors import Predicate as Predicate
from megatron_eopt.overrides.selectors import Selector as Selector
from megatron_eopt.overrides.selectors import unwrapped as unwrapped
from megatron_eopt.overrides.settings import SETTINGS as SETTINGS
from megatron_eopt.overrides.settings import check_setting as check_setting
