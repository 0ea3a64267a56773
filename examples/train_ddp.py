"""Train a small transformer under DistributedDataParallel with an optimizer of this package, without Megatron.

    torchrun --nproc-per-node 2 examples/train_ddp.py --optimizer muon --steps 200 --save ddp-out
    torchrun --nproc-per-node 2 examples/train_ddp.py --optimizer muon --steps 200 --load ddp-out/100

Each rank has all parameters. Optimizers that orthogonalize share that work out over the ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from small_model import SmallModel, optimizer_of, parse_arguments, ranks, scheduler_of, train
from torch.nn.parallel import DistributedDataParallel

from megatron_eopt.family import OPTIMIZERS

SHARED_OUT = [row.name for row in OPTIMIZERS.values() if row.takes("data_parallel_group")]
"""Optimizers that share their work out over a ``data_parallel_group``."""


def main() -> None:
    """Train, as the command line says."""
    arguments = parse_arguments("Train a small transformer under DistributedDataParallel.")
    with ranks() as device:
        torch.manual_seed(0)
        model = SmallModel().to(device)
        replicated = DistributedDataParallel(model)
        shared = {"data_parallel_group": dist.group.WORLD} if arguments.optimizer in SHARED_OUT else {}
        optimizer = optimizer_of(replicated, arguments, **shared)
        scheduler = scheduler_of(optimizer, arguments)
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        first = 0
        if arguments.load:
            saved = torch.load(arguments.load, map_location=device, weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(saved[name])
            first = saved["step"]

        def save(step: int) -> None:
            if dist.get_rank() == 0:
                arguments.save.mkdir(parents=True, exist_ok=True)
                state = {name: part.state_dict() for name, part in parts.items()}
                torch.save({**state, "step": step}, arguments.save / str(step))

        train(replicated, optimizer, scheduler, arguments, first, save)


if __name__ == "__main__":
    main()
