"""Who has which parameter, with which settings, and why; without a model or Megatron."""

from megatron_eopt.routing.checks import compare as compare
from megatron_eopt.routing.checks import problems as problems
from megatron_eopt.routing.checks import warnings as warnings
from megatron_eopt.routing.entries import entries_from_dict as entries_from_dict
from megatron_eopt.routing.entries import read_overrides as read_overrides
from megatron_eopt.routing.patterns import ManifestRow as ManifestRow
from megatron_eopt.routing.patterns import ParamPattern as ParamPattern
from megatron_eopt.routing.patterns import families as families
from megatron_eopt.routing.patterns import from_json as from_json
from megatron_eopt.routing.patterns import merged as merged
from megatron_eopt.routing.patterns import rows as rows
from megatron_eopt.routing.patterns import to_json as to_json
from megatron_eopt.routing.patterns import write_json as write_json
from megatron_eopt.routing.rules import Resolved as Resolved
from megatron_eopt.routing.rules import resolve as resolve
from megatron_eopt.routing.selectors import OverrideError as OverrideError
from megatron_eopt.routing.selectors import ParameterInfo as ParameterInfo
from megatron_eopt.routing.selectors import Predicate as Predicate
from megatron_eopt.routing.text import table as table
