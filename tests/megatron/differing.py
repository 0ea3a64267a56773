"""Builds optimizers on two ranks that differ in one thing each time, by AXIS: run by test_settings.py."""

import re
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch

import megatron_eopt
from megatron_eopt.routing.selectors import unwrapped
from tests.megatron import small_gpt

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig  # isort: skip


def model_of(axis):
    sizes = {f"{axis}_model_parallel_size": 2} if axis != "data" else {}
    small_gpt.begin(**sizes)
    model = small_gpt.gpt(layers=2, pipeline_dtype=torch.float32, **sizes)
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def main(axis):
    torch.distributed.init_process_group("nccl")
    rank, model = torch.distributed.get_rank(), model_of(axis)
    megatron_eopt.activate()

    def build(overrides=None, optimizer="muon", **settings):
        config = OptimizerConfig(optimizer=optimizer, lr=1e-2, min_lr=1e-3, **settings)
        return megatron_eopt.get_megatron_optimizer(config, [model], overrides)

    def frozen(parameter):
        parameter.requires_grad_(rank == 0)
        try:
            build()
        finally:
            parameter.requires_grad_(True)

    build()
    fc1, folder = "linear_fc1.weight", tempfile.TemporaryDirectory()
    there = Path(folder.name, f"of_rank_{rank}.yaml")
    there.write_text(f"{fc1}: {{lr: 0.1}}")
    build(optimizer_overrides=str(there))  # a file that each rank has in its own folder
    cases = {
        "missing.yaml: cannot be read": partial(build, optimizer_overrides=str((there, "missing.yaml")[rank])),
        "muon_momentum is 0.95 on rank 0 and 0.5 on rank 1": partial(build, muon_momentum=(0.95, 0.5)[rank]),
        "{'lr': 0.1}) on rank 0 and": partial(build, {fc1: {"lr": (0.1, 0.2)[rank]}}),
    }
    if axis != "pipeline":  # stages have no parameter in common
        for name, parameter in model.named_parameters():
            cases[f"{unwrapped(name)} is 'trainable, torch.float32, "] = partial(frozen, parameter)
    for message, case in cases.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            case()
    print("all were refused", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
