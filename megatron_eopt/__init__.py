"""Muon and its relatives for Megatron-Core: tensor-parallel, exact, resumable, nothing silent."""
