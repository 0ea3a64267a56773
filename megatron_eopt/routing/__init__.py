"""Who has which parameter, with which settings, and why; without a model or Megatron."""

from megatron_eopt.routing.checks import compare, problems, warnings, with_schedule
from megatron_eopt.routing.entries import entries_from_dict, read_overrides
from megatron_eopt.routing.patterns import (
    ManifestRow,
    ParamPattern,
    families,
    from_json,
    merged,
    rows,
    to_json,
    write_json,
)
from megatron_eopt.routing.precedence import Resolved, resolve
from megatron_eopt.routing.selectors import OverrideError, ParameterInfo, Predicate
from megatron_eopt.routing.text import table

__all__ = [
    "ManifestRow",
    "OverrideError",
    "ParamPattern",
    "ParameterInfo",
    "Predicate",
    "Resolved",
    "compare",
    "entries_from_dict",
    "families",
    "from_json",
    "merged",
    "problems",
    "read_overrides",
    "resolve",
    "rows",
    "table",
    "to_json",
    "warnings",
    "with_schedule",
    "write_json",
]
