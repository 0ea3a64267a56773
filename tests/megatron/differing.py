"""Builds optimizers on two ranks that differ in one thing each time, by AXIS: run by test_settings.py."""

import re
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

import megatron_eopt
from megatron_eopt.parallel.agreement import versions
from megatron_eopt.routing.selectors import unwrapped
from tests.megatron import small_gpt

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig  # isort: skip


def model_of(axis):
    sizes = {f"{axis}_model_parallel_size": 2} if axis != "data" else {}
    small_gpt.begin(**sizes)
    model = small_gpt.gpt(layers=2, pipeline_dtype=torch.float32, **sizes)
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def show_one_source(optimizer, name):
    """All ranks name the first rank's file as the source of a rate."""
    rows = [family.like for family in optimizer.megatron_eopt.families]
    (source,) = {row.sources["lr"] for row in rows if row.name.endswith(name)}
    assert {row.lr for row in rows if row.name.endswith(name)} == {0.1}
    of_ranks = [None, None]
    torch.distributed.all_gather_object(of_ranks, source)
    assert of_ranks[0] == of_ranks[1]
    assert Path(source).name == "of_rank_0.yaml:1"


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

    def with_versions(**of_rank_1):
        with ExitStack() as stack:
            if rank == 1:
                stack.enter_context(mock.patch.dict(versions(), of_rank_1))
            build()

    build()
    fc1, folder = "linear_fc1.weight", tempfile.TemporaryDirectory()
    there, wrong = Path(folder.name, f"of_rank_{rank}.yaml"), Path(folder.name, f"wrong_{rank}.yaml")
    there.write_text(f"{fc1}: {{lr: 0.1}}")
    wrong.write_text(f"{fc1}: {{lr: 0.1, wieght_decay: 1}}")
    show_one_source(build(optimizer_overrides=str(there)), fc1)  # of a file that each rank has in its own folder
    cases = {
        "missing.yaml: cannot be read": partial(build, optimizer_overrides=str((there, "missing.yaml")[rank])),
        "wieght_decay: unknown setting, did you mean": partial(build, optimizer_overrides=str(wrong)),
        "muon_momentum is 0.95 on rank 0 and 0.5 on rank 1": partial(build, muon_momentum=(0.95, 0.5)[rank]),
        "adam_eps is 1e-08 on rank 0 and 0.001 on rank 1": partial(build, adam_eps=(1e-8, 1e-3)[rank]),
        "clip_grad is 1.0 on rank 0 and 0.1 on rank 1": partial(build, clip_grad=(1.0, 0.1)[rank]),
        "{'lr': 0.1}) on rank 0 and": partial(build, {fc1: {"lr": (0.1, 0.2)[rank]}}),
        "the version of torch is": partial(with_versions, torch="2.0"),
        "the version of megatron_eopt is": partial(with_versions, megatron_eopt="0.0.1"),
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
