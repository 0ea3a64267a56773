"""Build the optimizer of a run with Megatron-FSDP.

Its parameters are DTensors that cut flat buffers at any row. Megatron builds one distributed optimizer, which writes
weights back into the model and gathers them once a step: :class:`Joined` makes several optimizers one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import megatron.core.optimizer as core_optimizer
import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.from_config import with_fields
from megatron_eopt.megatron.overrides import Overrides
from megatron_eopt.registry import create_emerging_optimizer
from megatron_eopt.step.parameters import local, parameters_in


class Joined:
    """Several torch optimizers as one, for Megatron's distributed optimizer."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.chained_optimizers = list(optimizers)  # Megatron's name for it

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all optimizers, in order."""
        return [group for optimizer in self.chained_optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """That of all optimizers, by parameter."""
        return {p: state for optimizer in self.chained_optimizers for p, state in optimizer.state.items()}

    def step(self) -> None:
        """Let each optimizer make its step."""
        for optimizer in self.chained_optimizers:
            for parameter in parameters_in(optimizer.param_groups):
                # Megatron-FSDP gives none to a parameter without entries here, and other ranks would wait for this one
                if parameter.grad is None and not local(parameter).numel():
                    parameter.grad = torch.zeros_like(parameter)
        for optimizer in self.chained_optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let each optimizer forget its gradients."""
        for optimizer in self.chained_optimizers:
            optimizer.zero_grad(set_to_none)


def mark_shards(model_chunks: Sequence[Any]) -> None:
    """Restore marks that Megatron-FSDP drops: chunks, and experts."""
    for chunk in model_chunks:
        for parameter in chunk.parameters():
            update_uneven_dtensor_chunk_metadata(parameter)
            if not getattr(parameter.orig_param, "allreduce", True):
                parameter.expert_tp = True


def build(config: Any, model_chunks: Sequence[Any], overrides: Overrides, groups: Any) -> ChainedOptimizer:
    """Build Megatron's distributed optimizer around those that overrides name."""
    of_names: dict[str, list[dict[str, Any]]] = {config.optimizer: []}
    for group in core_optimizer._get_param_groups(model_chunks, config, overrides):
        of_names.setdefault(group.get("optimizer", config.optimizer), []).append(group)
    made: list[tuple[Optimizer, Callable[..., None]]] = []
    for name, of_name in of_names.items():
        if name == config.optimizer:
            made.append(create_emerging_optimizer(config, of_name, name, model_chunks, groups))
            continue
        other = with_fields(config, optimizer=name, use_distributed_optimizer=False)
        arguments = {"model_chunks": model_chunks, "param_groups": of_name, "pg_collection": groups}
        build_other = core_optimizer._get_megatron_optimizer_based_on_param_groups
        made.append(build_other(config=other, **arguments, skip_megatron_wrapping=True))

    def init_state(joined: Joined, config: Any = None) -> None:
        for optimizer, (_, init) in zip(joined.chained_optimizers, made, strict=True):
            init(optimizer, config)

    groups_of_ranks = ProcessGroupCollection.setup_process_groups_for_optimizer
    ranks = groups_of_ranks(groups, model_chunks, use_gloo_process_groups=False)
    instances = ranks["dp_cp_group"].size() > ranks["intra_dp_cp_group"].size()
    optimizer = DistributedOptimizer(
        Joined([each for each, _ in made]),
        config,
        None,
        init_state,
        model_chunks=list(model_chunks),
        per_model_buffers={},
        data_parallel_group=ranks["dp_cp_group"],
        data_parallel_group_gloo=None,
        data_parallel_group_idx=ranks["mp_group"].rank(),
        distributed_optimizer_instance_id=ranks["inter_dist_opt_group"].rank() if instances else 0,
    )
    optimizer.grad_stats_parallel_group = ranks["intra_dist_opt_group"]
    optimizer.tp_group = groups.tp
    optimizer.expert_tp_group = groups.expt_tp
    return ChainedOptimizer([optimizer])
