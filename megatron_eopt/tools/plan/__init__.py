"""The command ``megatron-eopt plan``."""
