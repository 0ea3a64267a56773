"""The manifest: for every trainable parameter its optimizer and why, as plain data. No torch, no Megatron.

Rows are collected elsewhere; all that follows from them is here: families, the union of all ranks, what is wrong, the
table, JSON, and what changed from one manifest to another.
"""

from megatron_eopt.manifest.checks import compare, problems, warnings
from megatron_eopt.manifest.families import Family, LogicalMatrix, ManifestRow, families, merged, rows
from megatron_eopt.manifest.saved import FORMAT, from_json, to_json
from megatron_eopt.manifest.text import table

__all__ = [
    "FORMAT",
    "Family",
    "LogicalMatrix",
    "ManifestRow",
    "compare",
    "families",
    "from_json",
    "merged",
    "problems",
    "rows",
    "table",
    "to_json",
    "warnings",
]
