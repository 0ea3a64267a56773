"""Checkpoints on disk, without Megatron: what one holds, what is wrong with it, and whether a run could load it."""
