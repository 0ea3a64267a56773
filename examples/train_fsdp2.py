"""Train a small transformer under FSDP2 with an optimizer of this package, without Megatron.

    torchrun --nproc-per-node 2 examples/train_fsdp2.py --optimizer muon --steps 200 --save fsdp2-out
    torchrun --nproc-per-node 1 examples/train_fsdp2.py --optimizer muon --steps 200 --load fsdp2-out/100

Checkpoints are those of torch.distributed.checkpoint: another number of ranks goes on from them. ``--replicas 2`` on
four ranks is HSDP. One needs no GPU for it.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_model import SmallModel, optimizer_of, parse_arguments, ranks, scheduler_of, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer


def mesh_of(arguments: argparse.Namespace, device: torch.device) -> DeviceMesh:
    """All ranks in one dimension; with replicas in two."""
    shards, left = divmod(dist.get_world_size(), arguments.replicas)
    if left:
        raise ValueError(f"{dist.get_world_size()} ranks are no multiple of --replicas {arguments.replicas}")
    if arguments.replicas == 1:
        return init_device_mesh(device.type, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (arguments.replicas, shards), mesh_dim_names=("replicate", "shard"))


def state_of(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, step: int) -> dict[str, Any]:
    """What a checkpoint holds, by the names of the parameters."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "scheduler": scheduler.state_dict(), "step": step}


def load(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, path: Path) -> int:
    """Go on from a checkpoint; returns its step."""
    state = state_of(model, optimizer, scheduler, 0)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return state["step"]


def main() -> None:
    """Train, as the command line says."""
    arguments = parse_arguments("Train a small transformer under FSDP2.")
    with ranks() as device:
        torch.manual_seed(0)
        model = SmallModel().to(device)
        mesh = mesh_of(arguments, device)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = optimizer_of(model, arguments)
        scheduler = scheduler_of(optimizer, arguments)
        first = load(model, optimizer, scheduler, arguments.load) if arguments.load else 0

        def save(step: int) -> None:
            dcp.save(state_of(model, optimizer, scheduler, step), checkpoint_id=arguments.save / str(step))

        train(model, optimizer, scheduler, arguments, first, save)


if __name__ == "__main__":
    main()
