"""Which logical matrices a parameter is made of; split and merge are exact inverses."""

from megatron_eopt.matrices.qkv import check_split_shapes, merge_piece, merge_rows, part_rows, split_piece, split_rows

__all__ = ["check_split_shapes", "merge_piece", "merge_rows", "part_rows", "split_piece", "split_rows"]
