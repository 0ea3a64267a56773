"""Metrics of steps, to Megatron's writers and log."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.megatron.consensus import log_rank0
from megatron_eopt.megatron.support.facts import training_args
from megatron_eopt.megatron.wrappers import torch_optimizers, wrappers
from megatron_eopt.metrics import Metrics, Sample, Shares, line
from megatron_eopt.step.parameters import parameters_in

SECOND_LOSS = (
    "Megatron counts the loss of the first step after a start twice: its second lm loss is the mean of two steps, so "
    "compare with the run before from the third on"
)


def interval_of(config: Any, args: Any) -> int:
    """Steps from one measurement to the next; 0 for none."""
    given = getattr(config, "optimizer_metrics_interval", None)
    return getattr(args, "log_interval", 0) or 0 if given is None else given


def measure(optimizer: Any, model_chunks: Sequence[Any], interval: int, layer_wise: bool) -> None:
    """Measure the ``step`` of Megatron's optimizer at every ``interval``-th iteration."""
    step = optimizer.step
    steps = 0
    device = next(p.device for chunk in model_chunks for p in chunk.parameters())

    @functools.wraps(step)
    def measured_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        known = getattr(training_args(), "curr_iteration", None)
        iteration = steps if known is None else known + 1
        if steps == 1 and iteration > 1 and training_args().log_interval == 1:
            log_rank0(SECOND_LOSS)
        if iteration % interval:
            return step(*args, **kwargs)
        sample = Sample(list(torch_optimizers(optimizer)), shares(optimizer, layer_wise), device)
        result = step(*args, **kwargs)
        metrics = sample.metrics(result[1])
        if result[0]:  # else Megatron has left the step out, on all ranks
            report(metrics, iteration)
        return result

    optimizer.step = measured_step


def shares(optimizer: Any, layer_wise: bool) -> Shares:
    """What Megatron counts in its norm of gradients."""
    found: dict[Tensor, float] = {}
    for wrapper in wrappers(optimizer):
        group = None if layer_wise else wrapper.get_grad_stats_parallel_group()
        ranks = dist.get_world_size() if group is None else group.size()  # those outside of the group have the same
        groups = getattr(wrapper, "tp_group", None), getattr(wrapper, "expert_tp_group", None)
        for inner in torch_optimizers(wrapper):
            for p in parameters_in(inner.param_groups):
                counts = param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p, *groups)
                # the group of Megatron-FSDP has the ranks of the mesh
                shards = p.device_mesh.size() if isinstance(p, DTensor) and not hasattr(p, "__fsdp_param__") else 1
                found[p] = counts * shards * ranks / dist.get_world_size()
    return found


def report(metrics: Metrics, iteration: int) -> None:
    """Send metrics to writers and log, on the last rank."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return
    writer, wandb = training_writers()
    for name, figures in metrics.items():
        tagged = {f"{name}/{key}": value for key, value in figures.items()}
        if writer is not None:
            for tag, value in tagged.items():
                writer.add_scalar(tag, value, iteration)
        if wandb is not None:
            wandb.log(tagged, iteration)
    print(f"megatron_eopt: iteration {iteration:8d} | {line(metrics)}", flush=True)


def training_writers() -> tuple[Any, Any]:
    """Megatron's TensorBoard and W&B writers; None for a missing one."""
    known = sys.modules.get("megatron.training.global_vars")
    return getattr(known, "_GLOBAL_TENSORBOARD_WRITER", None), getattr(known, "_GLOBAL_WANDB_WRITER", None)
