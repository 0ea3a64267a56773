"""Ranks of a run have the same kernel of symmetric products, whatever each measures: timed by fake clocks."""

import os
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_eopt.matrices import ATTRIBUTE, experts
from megatron_eopt.megatron.kernels import choose_kernels
from megatron_eopt.optimizers import step_choice
from megatron_eopt.optimizers.base import KERNEL
from megatron_eopt.optimizers.distributed_muon import DistributedMuon
from megatron_eopt.optimizers.soap import SOAP
from megatron_eopt.optimizers.spectron import Spectron
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.orthogonalize import timing
from megatron_eopt.orthogonalize.kernels import KERNELS
from megatron_eopt.parallel.agreement import in_turns
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import shard
from tests.orthogonalize.test_timing import TILES, by_size, clocked, no_memory


def optimizer_of(*shapes, **settings):
    return TensorParallelMuon([torch.nn.Parameter(torch.ones(shape)) for shape in shapes], **settings)


def kernel_of(optimizer):
    """What a step of an optimizer was made with."""
    optimizer.prepare()
    return optimizer.param_groups[0][KERNEL]


SECONDS = {(): (4.0, 4.0), TILES[0]: (1.0, 9.0), TILES[1]: (2.0, 3.0)}
"""Of torch and of some tiles on each rank."""


def on_rank(rank, ranks):
    """What each case chooses on this rank."""

    def cost(tiles, shape):
        return SECONDS.get(tiles, (10.0,) * ranks)[rank]

    def of_run(wrong=(), **settings):
        """As in Megatron, with replicas that have no group in common."""
        clocked(cost, wrong if rank == 1 else ())
        here = [optimizer_of((20, 24), (24, 20), **settings), optimizer_of((40, 50), **settings)]
        choose_kernels(here)
        return [kernel_of(each) for each in here]

    warnings.simplefilter("ignore")
    found = {"run": of_run(), "failing": of_run((20,)), "named": of_run(symmetric_products="torch")}
    # kernels of steps, where none serves on a CPU, where they serve on one rank, and on both
    for case, faults in (("no GPU", None), ("one rank", [None, "wrong"]), ("both", [None, None])):
        if faults is not None:
            step_choice.reason_against = lambda optimizer, device, faults=faults: faults[rank]
        here = optimizer_of((20, 24))
        choose_kernels([here])
        found[f"steps: {case}"] = here.param_groups[0]["step_kernels"]
    # of one stage of a pipeline alone
    factored = [Spectron([torch.nn.Parameter(torch.randn(24, 20))], rank=8)] if rank == 0 else []
    choose_kernels(factored)
    found["stage"] = [kernel_of(each) for each in factored]
    # SOAP's are in fp32, where tiles are not timed, and muon's in bf16
    factors = SOAP([torch.nn.Parameter(torch.randn(24, 20))])
    beside = [optimizer_of((20, 24)), factors]
    choose_kernels(beside)
    found["beside SOAP"] = [kernel_of(each) for each in beside]
    # plain torch
    clocked(cost, (20,) if rank == 1 else ())
    shared = optimizer_of((20, 24), (40, 50), data_parallel_group=dist.group.WORLD)
    found["shared"] = kernel_of(shared)
    clocked(lambda tiles, shape: no_memory((40, 50), tiles)(tiles, shape) if rank and not tiles else cost(tiles, shape))
    found["no memory"] = kernel_of(optimizer_of((20, 24), (40, 50), data_parallel_group=dist.group.WORLD))
    clocked(cost)
    resumed = optimizer_of((20, 24), (40, 50), data_parallel_group=dist.group.WORLD)
    resumed.load_state_dict(shared.state_dict())
    found["resumed"] = kernel_of(resumed)
    # replicas that exchange nothing: DDP, and HSDP, whose groups have one rank each here
    found["replicas"] = kernel_of(optimizer_of((20, 24)))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(20, 24), mesh, [Replicate(), Shard(0)]))
    found["hsdp"] = kernel_of(TensorParallelMuon([sharded]))
    dealt = DistributedMuon([torch.nn.Parameter(torch.ones(20, 24)) for _ in range(3)], collective_state_dict=True)
    found["dealt"] = kernel_of(dealt)
    found["SOAP"] = kernel_of(SOAP([torch.nn.Parameter(torch.ones(20, 24))]))
    # one fails on one rank
    clocked(cost, (20,) if rank == 1 else ())
    found["a replica fails"] = kernel_of(optimizer_of((20, 24)))
    clocked(cost)
    # one rank of a node compiles first, and the other waits, also where that fails
    order = []

    def compiling():
        order.append(time.time())
        sleep = 0.2 if rank == 0 else 0.0
        time.sleep(sleep)
        order.append(time.time())
        if rank == 0 and len(order) > 2:
            raise RuntimeError("of the first")
        return rank

    os.environ["LOCAL_RANK"] = str(rank)
    assert in_turns(compiling, {"world": dist.group.WORLD}) == rank
    try:
        in_turns(compiling, {"world": dist.group.WORLD})
    except RuntimeError:
        assert rank == 0
    found["turns"] = order
    # so does a kernel that a checkpoint has kept
    checks = []

    def slow(tiles, shape):
        checks.append(time.time())
        time.sleep(0.1 if rank == 0 else 0.0)
        return 1.0

    clocked(slow)
    shared.load_state_dict(shared.state_dict())
    shared.prepare()
    found["kept"] = (checks[0], checks[-1])
    checks.clear()
    replica = optimizer_of((20, 24))
    replica.param_groups[0][KERNEL] = "triton"
    choose_kernels([replica])
    found["kept in Megatron"] = (checks[0], checks[-1])
    clocked(cost)
    del os.environ["LOCAL_RANK"]
    # without clocks nothing is agreed: a rank may step alone
    timing.is_timed = lambda device: False
    found["alone"] = kernel_of(optimizer_of((20, 24))) if rank == 0 else "triton"
    timing.is_timed = lambda device: True
    # a replica with another momentum
    try:
        kernel_of(optimizer_of((20, 24), momentum=0.9 + rank / 100))
        found["differing"] = None
    except ValueError as error:
        found["differing"] = str(error)
    # stages of a pipeline hold other parameters, and may have other settings
    found["pipeline"] = kernel_of(optimizer_of((20 + rank, 24), momentum=0.9 + rank / 100))
    return found


def test_all_ranks_of_a_run_choose_alike():
    first, second = run_ranks(on_rank, 2)
    for case, form in (("no GPU", "torch"), ("one rank", "torch"), ("both", "triton")):
        assert first[f"steps: {case}"] == second[f"steps: {case}"] == form
    of_both, none_for_20_rows = "triton/128x32x8x4x4", "torch, triton/128x32x8x4x4 from 32"
    # by its own times rank 0 would take other tiles, and rank 1 alone finds numbers wrong
    for case, kernel in (("run", of_both), ("failing", none_for_20_rows), ("named", "torch")):
        assert first[case] == second[case] == [kernel] * 2, case
    assert (first["stage"], second["stage"]) == (["triton/64x64x8x4x3"], [])
    assert first["beside SOAP"] == second["beside SOAP"] == [of_both, "torch"]
    chosen = {
        "SOAP": "torch",
        **dict.fromkeys(("shared", "resumed"), none_for_20_rows),
        **dict.fromkeys(("replicas", "hsdp", "pipeline", "dealt"), of_both),
        "no memory": of_both,  # torch has none on one rank
        "a replica fails": "torch",
        "alone": "triton",
    }
    for case, kernel in chosen.items():
        assert first[case] == second[case] == kernel, case
    for began, ended in ((0, 1), (2, 3)):
        assert second["turns"][began] >= first["turns"][ended]
    for case in ("kept", "kept in Megatron"):
        assert second[case][0] >= first[case][1], case
    assert first["differing"] == second["differing"]
    assert "differ between ranks 0 and 1, which hold the same parameters" in first["differing"]
    assert "has momentum 0.9 in the one and 0.91 in the other" in first["differing"]


@pytest.mark.parametrize(
    ("mode", "count", "stack"),
    [
        ("gram", 1, (24, 8)),
        ("duplicated", 3, (3, 8, 24)),
        ("distributed", 1, (8, 24)),
        ("owner", 3, (2, 8, 24)),  # of three, one rank computes two
    ],
)
def test_factors_are_checked_as_the_step_has_them(mode, count, stack):
    """Of tall matrices transposed where their shards are multiplied as they are, else contiguous."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        shards = [shard(torch.ones(12, 8)) for _ in range(count)]
        groups = SimpleNamespace(tp=dist.group.WORLD, expt_tp=None)
        assert TensorParallelMuon(shards, pg_collection=groups, tp_mode=mode).proposed().stacks()[0] == [stack]
    finally:
        dist.destroy_process_group()


def test_a_process_of_its_own_times_what_its_plan_has(monkeypatch):
    for name, kernel in KERNELS.items():
        monkeypatch.setitem(KERNELS, name, kernel)
    for name in ("time", "is_timed"):
        monkeypatch.setattr(timing, name, getattr(timing, name))
    seen = set()

    def cost(tiles, shape):
        seen.add(shape)
        return by_size(tiles, shape)

    clocked(cost)
    optimizer = optimizer_of((20, 24), (20, 24), (24, 20), (40, 50))
    chosen = kernel_of(optimizer)
    assert chosen == "torch, triton/64x64x8x4x3 from 32"
    assert seen == {(2, 20, 24), (20, 24), (40, 50)}  # checked and timed as stacks where there are some
    clocked(lambda tiles, shape: 1.0 if tiles else 2.0)
    resumed = optimizer_of((20, 24), (20, 24), (24, 20), (40, 50))
    resumed.load_state_dict(optimizer.state_dict())
    assert kernel_of(resumed) == chosen
    older = optimizer.state_dict()
    older["param_groups"][0][KERNEL] = "triton"
    resumed.load_state_dict(older)
    assert kernel_of(resumed) == "triton"
    assert kernel_of(optimizer_of((20, 24), symmetric_products="torch")) == "torch"


def test_kernels_of_a_step_are_looked_for_without_other_ranks(monkeypatch):
    """A DTensor that tells its chunk, as under Megatron-FSDP, gathers its layout from all of them."""
    stack = torch.nn.Parameter(torch.ones(3, 8, 10))
    setattr(stack, ATTRIBUTE, experts(3))
    optimizer = TensorParallelMuon([stack])
    monkeypatch.setitem(KERNELS, "triton", replace(KERNELS["triton"], missing=lambda device: None))
    for name in ("layout", "split_of", "proposed"):
        monkeypatch.setattr(TensorParallelMuon, name, lambda *given: pytest.fail("it may need all ranks"))
    monkeypatch.setattr(step_choice, "fault", lambda *kind: None)
    assert step_choice.reason_against(optimizer, torch.device("cpu")) is None
    stack.is_gtp_weight_remat, stack.pad_length = True, 2
    assert "has 2 rows of padding" in step_choice.reason_against(optimizer, torch.device("cpu"))
