"""The update at TP=k is the update at TP=1."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_eopt import TensorParallelMuon
from megatron_eopt.parallel.exchange import counters
from tests.distributed.ranks import run_ranks

EXACT = ("duplicated", "distributed")


@dataclass(frozen=True)
class Case:
    """One parameter: its global shape, the attributes on its shards, and settings of the optimizer."""

    name: str
    shape: tuple[int, int]
    attributes: dict = field(default_factory=dict)
    split: tuple[int, ...] | None = None
    settings: dict = field(default_factory=dict)


def sharded(dim, **more):
    return {"tensor_model_parallel": True, "partition_dim": dim, **more}


SHAPES = {"tall": (96, 32), "wide": (32, 96), "square": (48, 48)}
CASES = [
    *(Case(f"{kind} dim {dim}", shape, sharded(dim)) for kind, shape in SHAPES.items() for dim in (0, 1)),
    Case("fused qkv", (4 * 16, 48), sharded(0), (8, 4, 4)),
    Case("gated qkv", (4 * 24, 40), sharded(0), (8, 8, 4, 4)),
    Case("one query group for all ranks", (48, 40), sharded(0), (32, 8, 8)),
    Case("fused qkv of own shapes", (4 * 16, 48), sharded(0, qkv_split_shapes=[8, 4, 4]), (1, 1, 1)),
    Case("replicated", (40, 24)),
    Case("replicated with a partition_dim", (40, 24), {"partition_dim": 0, "tensor_model_parallel": False}),
    Case("replicated fused qkv", (4 * 16, 48), {"partition_dim": 0}, (8, 4, 4)),
    Case("expert", (32, 96), {"partition_dim": 1, "expert_tp": True}),
    Case("cubic, unit rms", (96, 32), sharded(0), None, {"coefficient_type": "cubic5", "scale_mode": "unit_rms_norm"}),
    Case("rank 2", (48, 32), sharded(1)),
    Case("zero", (48, 32), sharded(0)),
    Case("tiny", (48, 32), sharded(1)),
]


def whole(case):
    """A global parameter with its gradient."""
    generator = torch.Generator().manual_seed(len(case.name))
    p, g = (torch.randn(case.shape, generator=generator) for _ in range(2))
    if case.name == "rank 2":
        g = g[:, :2] @ g[:2, :]
    return p, g * {"zero": 0.0, "tiny": 1e-12}.get(case.name, 1.0)


def updated(case, p, g, groups, tp_mode, precision):
    p = torch.nn.Parameter(p.clone())
    for name, value in case.attributes.items():
        setattr(p, name, value)
    optimizer = TensorParallelMuon(
        [p],
        lr=0.1,
        split_qkv=case.split is not None,
        is_qkv_fn=lambda parameter: True,
        qkv_split_shapes=case.split,
        fp32_matmul_prec=precision,
        pg_collection=groups,
        tp_mode=tp_mode,
        **case.settings,
    )
    p.grad = g.clone()
    optimizer.step()
    assert torch.equal(p.grad, g)
    return p.detach()


def on_ranks(rank, world_size, precision):
    groups = SimpleNamespace(tp=dist.group.WORLD, expt_tp=dist.group.WORLD)
    results = {}
    for case in CASES:
        dim = case.attributes.get("partition_dim")
        is_cut = case.attributes.get("tensor_model_parallel") or case.attributes.get("expert_tp")
        for tp_mode in EXACT:
            p, g = whole(case)
            if is_cut:
                p, g = (x.chunk(world_size, dim)[rank].contiguous() for x in (p, g))
            counters.reset()
            shard = updated(case, p, g, groups, tp_mode, precision)
            calls = dict(counters.calls)
            if is_cut:
                shards = [torch.empty_like(shard) for _ in range(world_size)]
                dist.all_gather(shards, shard)
                shard = torch.cat(shards, dim)
            results[case.name, tp_mode] = (shard, calls)
    return results


@pytest.fixture(scope="module", params=[2, 4])
def results(request):
    return run_ranks(on_ranks, request.param, "highest")


@pytest.mark.parametrize("tp_mode", EXACT)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_update_equals_that_of_one_rank(results, case, tp_mode):
    expected = updated(case, *whole(case), None, "duplicated", "highest")
    for result in results:
        actual = result[case.name, tp_mode][0]
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert torch.equal(actual, results[0][case.name, tp_mode][0])
        if tp_mode == "duplicated":  # the same products on the same numbers
            assert torch.equal(actual, expected)


def test_collectives_are_counted(results):
    first = results[0]
    assert first["tall dim 0", "duplicated"][1] == {"all_gather": 1}
    assert first["fused qkv", "duplicated"][1] == {"all_gather": 1}
    assert first["tall dim 0", "distributed"][1] == {"all_reduce": 6}  # the norm and five Gram matrices
    assert first["replicated", "duplicated"][1] == first["replicated", "distributed"][1] == {}
    cut_inside_a_group = first["one query group for all ranks", "distributed"][1]
    assert cut_inside_a_group == {"all_gather": 1}


def test_medium_precision_is_as_exact():
    expected = {case.name: updated(case, *whole(case), None, "duplicated", "medium") for case in CASES}
    for (name, tp_mode), (actual, _) in run_ranks(on_ranks, 2, "medium")[0].items():
        if tp_mode == "duplicated":
            assert torch.equal(actual, expected[name]), name
        else:  # partial Gram matrices are rounded to bf16 before they are summed
            assert (actual - expected[name]).norm() <= 2e-2 * expected[name].norm(), name


def blockwise_on_ranks(rank, world_size):
    groups = SimpleNamespace(tp=dist.group.WORLD, expt_tp=dist.group.WORLD)
    case = CASES[0]
    p, g = (x.chunk(world_size, 0)[rank].contiguous() for x in whole(case))
    counters.reset()
    shard = updated(case, p, g, groups, "blockwise", "highest")
    assert not counters.calls
    return shard, updated(Case("shard", case.shape), p, g, None, "duplicated", "highest")


def test_blockwise_takes_each_shard_for_a_matrix():
    for shard, expected in run_ranks(blockwise_on_ranks, 2):
        assert torch.equal(shard, expected)


def without_groups(rank, world_size, tp_mode):
    p = torch.nn.Parameter(torch.ones(4, 4))
    p.tensor_model_parallel, p.partition_dim = True, 0
    try:
        TensorParallelMuon([p], tp_mode=tp_mode)
    except ValueError as error:
        return str(error)
    return None


def test_shards_without_a_group_are_refused():
    message = run_ranks(without_groups, 2, "duplicated")[0]
    assert "of shape (4, 4) is marked as sharded, but no process group completes it" in message
    assert run_ranks(without_groups, 2, "blockwise") == [None, None]
