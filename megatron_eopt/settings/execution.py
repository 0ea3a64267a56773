"""Where and how Muon and its relatives compute a step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_eopt.settings.of_class import settings_of
from megatron_eopt.settings.records import EXECUTION


@dataclass(frozen=True)
class Execution:
    """Where and how steps are computed, of which a checkpoint has nothing.

    The update is the same, but for the rounding of momenta with a ``momentum_dtype``.

    Attributes:
        data_parallel_group: ranks with the same parameters and gradients (as under DDP), which share the work on
            matrices. Those that ``tp`` cuts are shared only where ``pg_collection.tp_dp_cp`` has the ranks of both
            groups, with ``tp_mode`` ``owner`` or ``auto``. Matrices of experts are not shared.
        symmetric_products: the kernel of symmetric products: ``triton``, ``blocked`` (on a CPU) or ``torch``. By
            default that of :func:`~megatron_eopt.kernels.choice.rule`.
        step_kernels: what does the elementwise work of a step: ``triton``, kernels for many parameters at once, or
            ``torch``. By default, on a GPU, ``triton`` where it serves.
        cuda_graphs: capture the third step as a CUDA graph and replay it; only where no parameter is sharded.
        workspace: bytes of a step's temporaries on this rank, beside what one iteration of its largest matrix needs.
        offload_fraction: share, in [0, 1], of parameter-shaped state (momenta, above all) kept in host memory, pinned
            where there is a GPU: whole parameters, spread evenly, and at least so many bytes. A step fetches the state
            of one chunk while it works on another. Before other code than ``state_dict`` reads it, call
            ``torch.cuda.synchronize()``.
        momentum_dtype: of momenta: None for that of each parameter, or ``torch.bfloat16``. These are averaged and
            orthogonalized in fp32 and rounded at random, with the same bits at every layout: see
            :mod:`~megatron_eopt.step.rounding`.

    Raises:
        ValueError: for a value out of its range, and for values that do not go together.
    """

    data_parallel_group: ProcessGroup | None = None
    symmetric_products: str | None = None
    step_kernels: str | None = None
    cuda_graphs: bool = False
    workspace: int = 2**31
    offload_fraction: float = 0.0
    momentum_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for setting in EXECUTION:
            if setting.check is not None:
                setting.check(f"Execution: {setting.name}", getattr(self, setting.name))
        if self.cuda_graphs and (self.offload_fraction or self.momentum_dtype):
            raise ValueError(
                "cuda_graphs cannot work with offload_fraction or momentum_dtype, by which steps differ: leave it off"
            )

    def __deepcopy__(self, memo: object) -> "Execution":
        return self  # process groups cannot be copied


def gathered(cls: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a class by name, as its arguments: those of :class:`Execution` together."""
    if "execution" not in settings_of(cls):
        return dict(settings)
    of_execution = {setting.name for setting in EXECUTION}
    arguments = {key: value for key, value in settings.items() if key not in of_execution}
    given = {key: value for key, value in settings.items() if key in of_execution}
    if given:
        arguments["execution"] = replace(arguments.get("execution", Execution()), **given)
    return arguments
