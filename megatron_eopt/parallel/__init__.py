"""Matrices that lie on several ranks: where they lie, what is exchanged, and how they are orthogonalized."""

from megatron_eopt.parallel.layout import Layout, layout_of
from megatron_eopt.parallel.schemes import NewtonSchulz, TpMode, orthogonalize, validate_tp_mode

__all__ = ["Layout", "NewtonSchulz", "TpMode", "layout_of", "orthogonalize", "validate_tp_mode"]
