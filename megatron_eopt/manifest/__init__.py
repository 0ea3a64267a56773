"""The manifest: optimizers of parameters and why, as plain data."""

from megatron_eopt.manifest.checks import compare as compare
from megatron_eopt.manifest.checks import problems as problems
from megatron_eopt.manifest.checks import warnings as warnings
from megatron_eopt.manifest.families import LogicalMatrix as LogicalMatrix
from megatron_eopt.manifest.families import ManifestRow as ManifestRow
from megatron_eopt.manifest.families import ParamPattern as ParamPattern
from megatron_eopt.manifest.families import families as families
from megatron_eopt.manifest.families import merged as merged
from megatron_eopt.manifest.families import rows as rows
from megatron_eopt.manifest.saved import FORMAT as FORMAT
from megatron_eopt.manifest.saved import from_json as from_json
from megatron_eopt.manifest.saved import to_json as to_json
from megatron_eopt.manifest.saved import write_json as write_json
from megatron_eopt.manifest.text import table as table
