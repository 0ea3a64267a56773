"""Kernels of Triton, and the rule by device, dtype and shape that says where they serve."""
