"""What works with which release of Megatron-Core, and what is refused at start."""
