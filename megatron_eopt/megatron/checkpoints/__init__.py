"""State of our optimizers in Megatron's torch_dist checkpoints."""
