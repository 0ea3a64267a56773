"""AdaMuon, NorMuon and NAMO on parameters that two ranks share."""

import logging

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.distributed.ranks import run_ranks
from tests.optimizers.test_adaptive_muon import METHODS, VARIANTS, assert_close, gradient, optimizer, run
from tests.optimizers.test_muon import matrix


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
            run(p, opt, range(1, 4))
            assert_close(actual, p.detach().double())
            torch.testing.assert_close(moment, opt.state[p]["moment2_buffer"], rtol=1e-4, atol=1e-7)


def blockwise(rank, world_size):
    messages = []
    for groups in (None, type("Groups", (), {"tp": dist.group.WORLD, "expt_tp": None})):
        for method in METHODS:
            p = matrix(tensor_model_parallel=True, partition_dim=0)
            try:
                opt = optimizer([p], method, tp_mode="blockwise", pg_collection=groups)
            except ValueError as error:
                messages.append((method, str(error)))
            else:
                run(p, opt, [1, 2])
                messages.append((method, p.detach()))
    return messages


def test_blockwise_takes_adamuon_alone():
    p = matrix()
    run(p, optimizer([p], "adamuon"), [1, 2])
    for messages in run_ranks(blockwise, 2):
        for method, found in messages:
            if method == "adamuon":  # each shard by itself
                assert torch.equal(found, p.detach())
            else:
                assert f"statistics of {method} would be those of shards" in found
                assert "take an exact tp_mode (auto, duplicated, ...), or adamuon" in found
