"""Which logical matrices a parameter is made of; split and merge are exact inverses."""

from megatron_eopt.matrices.declared import ATTRIBUTE, declare, declared_for, declared_split, tag_declared, undeclare
from megatron_eopt.matrices.kinds import (
    GATE_UP,
    WHOLE,
    concatenated,
    experts,
    heads,
    interleaved,
    interleaved_gate_up,
    key_value,
    latent_down,
    per_shard,
    query_key_value,
)
from megatron_eopt.matrices.pattern import Block, LocalRows, Pattern
from megatron_eopt.matrices.qkv import check_split_shapes, merge_piece, merge_rows, part_rows, split_piece, split_rows
from megatron_eopt.matrices.split import Order, Part, Split

__all__ = [
    "ATTRIBUTE",
    "GATE_UP",
    "WHOLE",
    "Block",
    "LocalRows",
    "Order",
    "Part",
    "Pattern",
    "Split",
    "check_split_shapes",
    "concatenated",
    "declare",
    "declared_for",
    "declared_split",
    "experts",
    "heads",
    "interleaved",
    "interleaved_gate_up",
    "key_value",
    "latent_down",
    "merge_piece",
    "merge_rows",
    "part_rows",
    "per_shard",
    "query_key_value",
    "split_piece",
    "split_rows",
    "tag_declared",
    "undeclare",
]
