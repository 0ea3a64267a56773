"""Optimizers: subclasses of torch.optim.Optimizer, thin over the rooms below.

The optimizers of the table, :mod:`megatron_eopt.family`, are names of this room too, which the package gives it.
"""

from megatron_eopt.optimizers.distributed_muon import DistributedMuon as DistributedMuon
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer as OrthogonalizedOptimizer
from megatron_eopt.optimizers.spectron import factor_pairs as factor_pairs
