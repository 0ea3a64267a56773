"""Optimizers: subclasses of torch.optim.Optimizer, thin over the rooms below."""

from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.distributed_muon import DistributedMuon
from megatron_eopt.optimizers.hyperball import MuonHyperball
from megatron_eopt.optimizers.lion import Lion, Signum
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer
from megatron_eopt.optimizers.polar_grad import PolarGrad
from megatron_eopt.optimizers.schedule_free import ScheduleFreeAdamW
from megatron_eopt.optimizers.scion import Scion
from megatron_eopt.optimizers.soap import SOAP
from megatron_eopt.optimizers.spectron import Spectron, factor_pairs

__all__ = [
    "SOAP",
    "DistributedMuon",
    "Lion",
    "MuonHyperball",
    "OrthogonalizedOptimizer",
    "PolarGrad",
    "ScheduleFreeAdamW",
    "Scion",
    "Signum",
    "Spectron",
    "TensorParallelAdaptiveMuon",
    "TensorParallelMuon",
    "factor_pairs",
]
