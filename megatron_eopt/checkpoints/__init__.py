"""Checkpoints on disk, without Megatron."""
