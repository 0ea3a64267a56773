"""What an optimizer knows in one process, never saved."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.optimizers.cuda_graph import GraphedUpdate
from megatron_eopt.optimizers.modifiers import Modifiers
from megatron_eopt.optimizers.nonfinite import NonFinite
from megatron_eopt.optimizers.offload import Streamed
from megatron_eopt.optimizers.rounding import Numbered
from megatron_eopt.optimizers.step_kernels import StepKernels
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.watched import Watched

ATTRIBUTES = "attributes_of_parameters"  # in what is copied and pickled

COPIED = frozenset(
    "logical_matrices name_in_model is_qkv qkv_split_shapes is_embedding_or_output_parameter use_muon allreduce "
    "expert_tp tensor_model_parallel partition_dim partition_stride is_gtp_weight_remat pad_length".split()
)
"""Attributes of parameters that optimizers read."""


@dataclass
class Plans:
    """What follows from parameters, groups and settings."""

    engine: Engine | None = None
    engine_of: object = None  # the settings that the engine was made for
    agree: Callable[[Tensor], Tensor] | None = None  # minimum of flags over ranks; None where no rank shares anything
    key_ends: dict[Tensor, list[str]] = field(default_factory=dict)
    further_keys: dict[Tensor, list[str]] = field(default_factory=dict)  # of state beside the momentum
    numbered: tuple[Engine, dict[Tensor, Numbered]] | None = None  # entries of momenta in bf16, and for which engine
    scales: tuple[Engine | None, list[list[float]]] = (None, [])  # of each parameter's matrices, and for which engine
    normed: Engine | None = None  # the engine for which norms of weights were measured
    graphed: GraphedUpdate | None = None
    kernels: StepKernels | None = None  # what does the elementwise work; None for torch


@dataclass
class Session:
    """What is known of groups and steps."""

    plans: Plans = field(default_factory=Plans)
    nonfinite: NonFinite | None = None
    group_of: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    offloaded: dict[Tensor, bool] = field(default_factory=dict)  # whether a parameter's state is in host memory
    streamed: Streamed | None = None
    watched: Watched | None = None
    shares_shards: bool = False  # with the data-parallel ranks, by the last plan
    also: Callable[[], None] | None = None  # what else belongs to a step, as that of AdamW to Muon's
    beside: Mapping[str, Any] = MappingProxyType({})  # settings of the optimizer that does that
    checked: list[object] | None = None  # settings of groups, and functions of the user's, as they were checked last
    modifiers: list[Modifiers] = field(default_factory=list)  # of each group, by these settings
    scalable: bool = False  # whether a GradScaler has been checked
    told_unmarked: bool = False
    warns_without_gradients: bool = True  # until it has; Megatron's first step says more
    steps: int = 0  # that this object began, for errors
    changing: bool = False  # whether a step changes parameters and state, or an exception ended it while it did
    ended_by: str = ""  # the name of that exception


class _Shared:
    """Process groups in a copy, which shares them."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Shared":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "an optimizer with process groups cannot be pickled, since they belong to this process: save its "
            "state_dict(), and load it into an optimizer that is built with the groups of the new process"
        )


def packed(attributes: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """Attributes for a copy, but what belongs to this process; groups are shared."""
    ours = [c for c in cls.__mro__ if c.__module__.startswith(f"{__name__.partition('.')[0]}.")]
    private = {name for c in ours for name in (*vars(c), *vars(c).get("__annotations__", ())) if name.startswith("_")}
    kept = [k for k in attributes if k not in private and not k.startswith(("_optimizer_", "_zero_grad_"))]
    return {key: _shared(attributes[key]) for key in kept}


def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`packed`."""
    return {key: x.value if isinstance(x, _Shared) else x for key, x in state.items()}


def attributes_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What parameters say of themselves, for a copy: torch copies tensors without it."""
    kept = [vars(p) for group in groups for p in group["params"]]
    return [{key: x for key, x in of_one.items() if key in COPIED} for of_one in kept]


def restore_attributes(groups: list[dict[str, Any]], attributes: list[dict[str, Any]]) -> None:
    """The inverse of :func:`attributes_of`, of parameters that lack them."""
    for p, of_one in zip((p for group in groups for p in group["params"]), attributes, strict=False):
        for key in of_one.keys() - vars(p).keys():
            setattr(p, key, of_one[key])


def _shared(value: Any) -> Any:
    groups = vars(value).values() if hasattr(value, "__dict__") else ()
    return _Shared(value) if any(isinstance(each, ProcessGroup) for each in (value, *groups)) else value
