"""Metrics of steps, to Megatron's writers and log."""

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_eopt.megatron import releases
from megatron_eopt.megatron.wrappers import torch_optimizers, wrappers
from megatron_eopt.metrics import Metrics, Sampler, line, squared_norms


def interval_of(config: Any, args: Any) -> int:
    """Steps from one measurement to the next; 0 for none."""
    given = getattr(config, "optimizer_metrics_interval", None)
    if given is None:
        return getattr(args, "log_interval", 0) or 0
    if given < 0:
        raise ValueError(f"--optimizer-metrics-interval is a number of steps, or 0 for none, got {given}")
    return int(given)


def measure(optimizer: Any, model_chunks: Sequence[Any], interval: int, layer_wise: bool) -> None:
    """Measure the ``step`` of Megatron's optimizer at every ``interval``-th iteration."""
    step = optimizer.step
    steps = 0
    device = next(p.device for chunk in model_chunks for p in chunk.parameters())
    sampler = Sampler(torch_optimizers(optimizer), device)

    @functools.wraps(step)
    def measured_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        known = getattr(releases.training_args(), "curr_iteration", None)
        iteration = steps if known is None else known + 1
        if iteration % interval:
            return step(*args, **kwargs)
        sampler.begin()
        result = step(*args, **kwargs)
        metrics = sampler.end(squared_gradients(optimizer, layer_wise), result[1])
        if result[0]:  # else Megatron has left the step out, on all ranks
            report(metrics, iteration)
        return result

    optimizer.step = measured_step


def squared_gradients(optimizer: Any, layer_wise: bool) -> dict[int, float]:
    """This rank's part of squared gradient norms, by optimizers' ``id``."""
    norms: dict[int, float] = {}
    for wrapper in wrappers(optimizer):
        inner = list(torch_optimizers(wrapper))
        if len(inner) != 1:  # which have one norm for all, as under Megatron-FSDP
            return {}
        group = None if layer_wise else wrapper.get_grad_stats_parallel_group()
        ranks = dist.get_world_size() if group is None else group.size()  # those outside of the group have the same
        gradients = wrapper.get_grads_for_grad_norm()
        shards = [x.device_mesh.size() if isinstance(x, DTensor) else 1 for x in gradients]
        squares = sum(n * square for n, square in zip(shards, squared_norms(gradients), strict=True))
        norms[id(inner[0])] = squares * ranks / dist.get_world_size()
    return norms


def report(metrics: Metrics, iteration: int) -> None:
    """Send metrics to writers and log, on the last rank."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return
    writer, wandb = releases.training_writers()
    for name, figures in metrics.items():
        tagged = {f"{name}/{key}": value for key, value in figures.items()}
        if writer is not None:
            for tag, value in tagged.items():
                writer.add_scalar(tag, value, iteration)
        if wandb is not None:
            wandb.log(tagged, iteration)
    print(f"megatron_eopt: iteration {iteration:8d} | {line(metrics)}", flush=True)
