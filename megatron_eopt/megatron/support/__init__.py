"""What works with which release of Megatron-Core, and what not."""
