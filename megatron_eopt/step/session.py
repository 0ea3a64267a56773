"""What an optimizer knows in one process, never saved."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.parallel.engine import Engine
from megatron_eopt.settings.modifiers import GroupModifiers
from megatron_eopt.step.gradients import WithoutGradients
from megatron_eopt.step.nonfinite import Flag, NonFinite

MOST_CHUNKS = 1024  # kept, one for each set of parameters that step together


@dataclass
class StepCache:
    """What follows from an engine and from settings by which ranks plan."""

    modifiers: list[GroupModifiers] = field(default_factory=list)  # of each group
    state_keys: list[set[str]] | None = None  # of the state of each parameter
    chunks: dict[object, Any] = field(default_factory=dict)  # of stacks, by the parameters that step
    further: list[ProcessGroup] | None = None  # beside those of the engine: ranks that skip steps together

    def chunks_for(self, key: object, make: Callable[[], Any]) -> Any:
        """Chunks of stacks for some parameters, made where they are not known."""
        if key not in self.chunks:
            if len(self.chunks) > MOST_CHUNKS:  # where other parameters have gradients in each step
                self.chunks.clear()
            self.chunks[key] = make()
        return self.chunks[key]


@dataclass
class Session[Cache: StepCache]:
    """What is known of plans, groups and steps."""

    planned: list[str] = field(default_factory=list)  # settings of groups by which ranks plan
    seen_keys: set[str] = field(default_factory=set)  # of groups, looked at for those that nobody reads
    engine: Engine | None = None
    parameters: list[Tensor] = field(default_factory=list)  # that it was made for
    sizes: list[int] = field(default_factory=list)  # how many of these each group has
    tags: list[object] = field(default_factory=list)  # what these said of their logical matrices
    engine_of: tuple[list[object], list[dict[str, Any]]] | None = None  # functions and settings that it was made for
    stepping: list[bool] | None = None  # which parameters have gradients, as sharing ranks have agreed
    settled: Cache = field(default_factory=StepCache)  # type: ignore[assignment]  # anew with each engine
    key_ends: dict[Tensor, list[str]] = field(default_factory=dict)
    said: list[tuple[torch.Size, dict[str, Any]]] = field(default_factory=list)  # by the parameters that were added
    begun: dict[tuple[Tensor, str], Tensor] = field(default_factory=dict)  # parameter and key -> state that has begun
    nonfinite: NonFinite | None = None
    group_of: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    offloaded: dict[Tensor, bool] = field(default_factory=dict)  # whether a parameter's state is in host memory
    after_step: Callable[[Flag], None] | None = None  # what else belongs to a step, as that of AdamW to Muon's
    after_step_groups: Sequence[dict[str, Any]] = ()  # whose parameters that steps
    adamw_settings: Mapping[str, Any] = MappingProxyType({})  # settings of the optimizer that does that
    scalable: bool = False  # whether a GradScaler has been checked
    without_gradients: WithoutGradients = field(default_factory=WithoutGradients)
    steps: int = 0  # that this object began, for errors
    changing: bool = False  # whether a step changes parameters and state, or an exception ended it while it did
    ended_by: str = ""  # the name of that exception
