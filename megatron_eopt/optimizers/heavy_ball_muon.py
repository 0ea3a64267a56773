"""Muon with heavy-ball momentum, as its original has it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.matrices import declared_split
from megatron_eopt.optimizers.foreach import heavy_ball
from megatron_eopt.optimizers.group_settings import UpdateSettings
from megatron_eopt.optimizers.muon import Chunk, decay, momentum, subtract
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.optimizers.traits import PLANNED_IN_GROUPS, STEPS
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.scheduler import Program

NS_STEPS = "ns_steps"  # setting of a group


class HeavyBallMuon(TensorParallelMuon):
    """The matrices of Muon beside AdamW: heavy-ball momentum, any dimensions."""

    traits = replace(
        TensorParallelMuon.traits,
        planned_in_groups=(*PLANNED_IN_GROUPS, NS_STEPS),
        has_modifiers={"moment2_method": ("none",)},
    )

    @property
    def _further(self) -> Mapping[str, Any]:  # type: ignore[override]
        return {NS_STEPS: self.newton_schulz.steps}

    def update_settings(self, group: Mapping[str, Any]) -> UpdateSettings:
        """As in Muon, with the steps as ``ns_steps`` alone."""
        if STEPS in group:
            raise ValueError(f"the Newton-Schulz steps of a group are {NS_STEPS!r} here, not {STEPS!r}")
        return super().update_settings({**group, STEPS: group[NS_STEPS]} if NS_STEPS in group else group)

    def program(self, chunk: Chunk, engine: Engine) -> Program:
        """One chunk's step, of parameters read as matrices."""
        decay(chunk)
        u = engine.split(chunk.indices, momentum(chunk, heavy_ball))
        factors = yield from engine.orthogonalize(chunk.indices, u)
        subtract(chunk, engine, factors, chunk.scales)

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
