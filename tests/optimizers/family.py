"""Every optimizer of the package, built for a few parameters."""

from megatron_eopt.optimizers import Lion, TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron_eopt.optimizers.hyperball import MuonHyperball
from megatron_eopt.optimizers.lion import Signum
from megatron_eopt.optimizers.polar_grad import PolarGrad
from megatron_eopt.optimizers.schedule_free import ScheduleFreeAdamW
from megatron_eopt.optimizers.scion import Scion
from megatron_eopt.optimizers.soap import SOAP
from megatron_eopt.optimizers.spectron import Spectron

CLASSES = {
    "muon": (TensorParallelMuon, {}),
    "adaptive_muon": (TensorParallelAdaptiveMuon, {"moment2_method": "normuon"}),
    "spectron": (Spectron, {"rank": 3}),
    "soap": (SOAP, {"precondition_frequency": 2}),
    "lion": (Lion, {}),
    "signum": (Signum, {}),
    "schedule_free_adamw": (ScheduleFreeAdamW, {"warmup_steps": 2}),
    "scion": (Scion, {}),
    "polargrad": (PolarGrad, {}),
    "muon_hyperball": (MuonHyperball, {}),
}
ELEMENTWISE = ("lion", "signum", "schedule_free_adamw")


def build(name, params, **settings):
    """An optimizer of the family."""
    cls, own = CLASSES[name]
    return cls(params, **{"lr": 0.01, **own, **settings})
