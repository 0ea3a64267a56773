"""Weights (in, out) under FSDP2: cut along their rows, which are columns of what is orthogonalized."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_eopt import TensorParallelAdaptiveMuon
from megatron_eopt.plain import build_optimizer
from tests.contracts.test_hugging_face import alike, config, trained
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import whole
from tests.optimizers.family import options

pytestmark = pytest.mark.wide

WHOLE_STATE = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
NAMES = ["muon", "spectron", "soap", "normuon"]


def train(name, shard):
    model, _ = alike()
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if name == "normuon":
        build_optimizer(model, config())  # which declares
        weights = [p for p in model.parameters() if p.ndim == 2]
        optimizer = TensorParallelAdaptiveMuon(weights, lr=0.01, moment2_method="normuon")
    else:
        optimizer = build_optimizer(model, config(name, options=options(name, max_dim=16)))
    trained(model, optimizer)
    if shard:  # and saved and loaded as whole tensors, which placements have to be right for
        state = get_optimizer_state_dict(model, optimizer, options=WHOLE_STATE)
        set_optimizer_state_dict(model, optimizer, state, options=WHOLE_STATE)
    trained(model, optimizer, 1)
    return list(map(whole, model.parameters()))


def under_fsdp2(rank, world_size):
    return {name: train(name, shard=True) for name in NAMES}


def test_conv1d_under_fsdp2_trains_as_on_one_rank():
    for of_rank in run_ranks(under_fsdp2, 2):
        for name, found in of_rank.items():
            for parameter, wanted in zip(found, train(name, shard=False), strict=True):
                torch.testing.assert_close(
                    parameter, wanted, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
                )
