"""Muon with heavy-ball momentum, as its original has it."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.kernels.precision import MatmulPrecision
from megatron_eopt.matrices import is_flattened
from megatron_eopt.optimizers.tensor_parallel_muon import Modifiers, TensorParallelMuon
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.parallel.plan_records import TpMode
from megatron_eopt.settings.execution import Execution
from megatron_eopt.settings.records import DecayMethod, Setting
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.foreach import heavy_ball
from megatron_eopt.step.momenta.momentum_stack import MomentumStack, Update
from megatron_eopt.step.parameters import Matrices
from megatron_eopt.step.stacks import Rule


class MuonSettings(Matrices, Modifiers, total=False):
    """What is as in Muon."""

    lr: float
    momentum: float
    weight_decay: float
    use_decoupled_weight_decay: bool
    weight_decay_method: DecayMethod | None
    extra_scale_factor: float
    execution: Execution


class HeavyBallMuon(TensorParallelMuon):
    """The matrices of Muon beside AdamW: heavy-ball momentum, any dimensions."""

    own_settings = (Setting("ns_steps", planned=True),)

    def __init__(
        self,
        params: ParamsT,
        ns_steps: int = 5,
        *,
        nesterov: bool = False,
        scale_mode: ScaleMode = "shape_scaling",
        coefficient_type: str | Sequence[Coefficients] = "simple",
        fp32_matmul_prec: MatmulPrecision = "highest",
        tp_mode: TpMode = "auto",
        **settings: Unpack[MuonSettings],
    ) -> None:
        BaseOptimizer.__init__(self, params, locals())

    def _iteration(self, group: Mapping[str, Any]) -> NewtonSchulz:
        return super()._iteration({**group, "num_ns_steps": group["ns_steps"]})

    def update(self, stack: MomentumStack) -> Rule:
        """The update of equal matrices, of parameters read as matrices."""
        u = yield stack.momentum(heavy_ball)
        O = yield stack.orthogonalize(u)
        return Update(O, stack.scale)

    def _check_parameter(self, parameter: Tensor, called: str) -> None:
        if is_flattened(parameter):
            self.layout(parameter)  # refuses one that cannot be laid out
        else:
            super()._check_parameter(parameter, called)


HeavyBallMuon.__name__ = "Muon"  # what users built, for messages; pickles go by the qualified name
