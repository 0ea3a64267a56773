"""AdaMuon, NorMuon and NAMO on parameters that two ranks share."""

import logging

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.distributed.ranks import run_ranks
from tests.distributed.shards import groups_of, message_of, shard
from tests.optimizers.field import assert_close, gradient, matrix, run
from tests.optimizers.test_adaptive_muon import METHODS, VARIANTS, optimizer


def dtensors(rank, world_size):
    """Steps on sharded parameters."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    logging.disable()
    results = {}
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("replicated", Replicate())):
        for method, align in VARIANTS:
            p = torch.nn.Parameter(distribute_tensor(matrix(10, 7).detach(), mesh, [placement], src_data_rank=None))
            opt = optimizer([p], method, align_rms=align)
            for seed in range(1, 4):
                p.grad = distribute_tensor(gradient(matrix(10, 7), seed), mesh, [placement], src_data_rank=None)
                opt.step()
            moment = opt.state[p]["moment2_buffer"]
            assert type(moment) is (torch.Tensor if method == "namo" else type(p.data))
            whole = moment if method == "namo" else moment.full_tensor()
            results[name, method, align] = p.full_tensor().detach(), whole
    return results


def test_dtensors_take_the_steps_of_one_rank():
    for results in run_ranks(dtensors, 2):
        assert len(results) == 12
        for (_, method, align), (actual, moment) in results.items():
            p = matrix(10, 7)
            opt = optimizer([p], method, align_rms=align)
            run(opt, p, range(1, 4))
            assert_close(actual, p.detach().double())
            torch.testing.assert_close(moment, opt.state[p]["moment2_buffer"], rtol=1e-4, atol=1e-7)


def blockwise(rank, world_size):
    refused = {
        (method, groups is None): message_of(
            lambda method=method, groups=groups: optimizer(
                [shard(torch.ones(6, 4))], method, tp_mode="blockwise", pg_collection=groups
            )
        )
        for groups in (None, groups_of())
        for method in METHODS
    }
    p = shard(matrix().detach())
    run(optimizer([p], "adamuon", tp_mode="blockwise", pg_collection=groups_of()), p, [1, 2])
    return refused, p.detach()


def test_blockwise_takes_adamuon_alone():
    p = matrix()
    run(optimizer([p], "adamuon"), p, [1, 2])
    for refused, found in run_ranks(blockwise, 2):
        assert torch.equal(found, p.detach())  # each shard by itself
        for (method, _), message in refused.items():
            if method == "adamuon":
                assert message is None
            else:
                assert f"statistics of {method} would be those of shards" in message
                assert "take an exact tp_mode (auto, duplicated, ...), or adamuon" in message
