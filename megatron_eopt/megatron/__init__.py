"""The room that speaks with Megatron-Core; no other imports it."""
