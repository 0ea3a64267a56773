"""Muon with heavy-ball momentum, as its original has it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.kernels.precision import MatmulPrecision
from megatron_eopt.matrices import declared_split
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon, Transport
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.plan_records import TpMode
from megatron_eopt.parallel.scheduler import Program
from megatron_eopt.settings.groups import DECOUPLED, METHOD
from megatron_eopt.settings.of_class import with_settings
from megatron_eopt.settings.records import Setting
from megatron_eopt.step.foreach import heavy_ball
from megatron_eopt.step.step import Step


class HeavyBallMuon(TensorParallelMuon):
    """The matrices of Muon beside AdamW: heavy-ball momentum, any dimensions."""

    own_settings = (Setting("ns_steps", planned=True),)
    group_keys = ("lr", "momentum", "nesterov", "weight_decay", DECOUPLED, METHOD, "ns_steps")
    only = MappingProxyType({"moment2_method": ("none",)})
    instead = MappingProxyType(
        {"moment2_method": "take adaptive_muon by build_optimizer, or TensorParallelAdaptiveMuon"}
    )

    @with_settings(Transport, TensorParallelMuon)
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
        **settings: Any,
    ) -> None:
        self._begin(params, locals())

    def _settle(self, values: dict[str, Any]) -> None:
        values["num_ns_steps"] = values["ns_steps"]
        super()._settle(values)

    def effective(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a group in a step: its Newton-Schulz steps are ``ns_steps``."""
        settings = super().effective(group)
        return {**settings, "num_ns_steps": settings["ns_steps"]}

    def _check_together(self, group: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        if "num_ns_steps" in group:
            raise ValueError("the Newton-Schulz steps of a group are 'ns_steps' here, not 'num_ns_steps'")
        super()._check_together(group, settings)

    def program(self, step: Step) -> Program:
        """One chunk's step, of parameters read as matrices."""
        step.decay()
        u = step.momentum(heavy_ball)
        O = yield from step.orthogonalize(u)
        step.subtract(O, step.scales)

    def layout(self, parameter: Tensor) -> Layout:
        """The layout of a parameter, read as a matrix."""
        if _is_flattened(parameter) and not isinstance(parameter, DTensor):
            parameter = parameter.detach().flatten(1)
        return super().layout(parameter)

    def _check_parameter(self, parameter: Tensor, called: str) -> None:
        if _is_flattened(parameter):
            self.layout(parameter)  # refuses one that cannot be laid out
        else:
            super()._check_parameter(parameter, called)


HeavyBallMuon.__name__ = "Muon"  # what users built, for messages; pickles go by the qualified name


def _is_flattened(parameter: Tensor) -> bool:
    return parameter.ndim > 2 and declared_split(parameter) is None
