"""The command ``megatron-eopt verify-checkpoint``."""
