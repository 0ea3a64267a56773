"""Muon at TP=2 and DP=2: what tensor parallelism cuts is shared over data parallelism, too; steps as on one rank."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron_eopt import TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron_eopt.parallel.collectives import counters
from megatron_eopt.parallel.cost import Rates, bucket_traffic
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import counted, cut, grid, placed, sharded
from tests.optimizers.field import assert_close

STEPS = 3
CASES = {
    **{f"wide {i}": ((36, 96), sharded(1)) for i in range(3)},
    **{f"tall {i}": ((96, 36), sharded(0)) for i in range(5)},
    "short side": ((96, 36), sharded(1)),
    "fused": ((6 * 16, 48), sharded(0, qkv_split_shapes=[8, 4, 4])),
    "one query group": ((48, 40), sharded(0, qkv_split_shapes=[32, 8, 8])),
    "whole": ((40, 24), {}),
}
KINDS = {
    "muon": (TensorParallelMuon, {}),
    "adamuon": (TensorParallelAdaptiveMuon, {"moment2_method": "adamuon"}),
    "normuon": (TensorParallelAdaptiveMuon, {"moment2_method": "normuon"}),
}
MODES = ("owner", "auto", "distributed")
SLOW, FAR = Rates(flops=1e6), Rates(flops=1e15, bytes=1e15, latency=1.0)


def trained(kind, part=0, parts=1, groups=None, **settings):
    """The optimizer after some steps, its parameters, and what the last step exchanged."""
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: placed(torch.randn(shape, generator=generator), attributes, part, parts)
        for name, (shape, attributes) in CASES.items()
    }
    cls, of_kind = KINDS[kind]
    optimizer = cls(
        parameters.items(),
        lr=0.1,
        split_qkv=True,
        is_qkv_fn=lambda p: hasattr(p, "qkv_split_shapes"),
        fp32_matmul_prec="highest",
        pg_collection=groups,
        **of_kind,
        **settings,
    )
    for _ in range(STEPS):
        for name, (shape, attributes) in CASES.items():
            parameters[name].grad = cut(torch.randn(shape, generator=generator), attributes, part, parts)
        counters.reset()
        optimizer.step()
    return optimizer, parameters, counted()


def expected_of(engine):
    """Collective -> calls and bytes of a step by the plan."""
    found = {}
    for bucket in engine.plan.buckets:
        label = engine.plan.matrices[bucket.matrices[0]].group
        for name, figures in bucket_traffic(engine.plan, bucket, engine.groups[label].rank(), engine.works).items():
            found[name] = tuple(map(sum, zip(found.get(name, (0, 0)), figures, strict=True)))
    return found


def on_a_grid(rank, world_size):
    tp, dp = grid(rank)
    groups, replicas = SimpleNamespace(tp=tp, expt_tp=None, tp_dp_cp=dist.group.WORLD), {"data_parallel_group": dp}
    found, exchanged, labels, owned = {}, {}, {}, 0
    for kind in KINDS:
        for mode in MODES if kind == "muon" else MODES[:1]:
            optimizer, parameters, sent = trained(kind, rank % 2, 2, groups, tp_mode=mode, **replicas)
            found[kind, mode] = [p.detach() for p in parameters.values()]
            if kind == "muon":
                sent.pop("agree")
                exchanged[mode] = sent, expected_of(optimizer.prepare())
            if (kind, mode) == ("muon", "owner"):
                plan = optimizer.prepare().plan
                owned = sum(
                    b.compute_ranks.count(rank) for b in plan.buckets if plan.matrices[b.matrices[0]].ranks == 4
                )
    for name, rates in (("operations", SLOW), ("calls", FAR)):
        optimizer = trained("muon", rank % 2, 2, groups, tp_mode="auto", plan_rates=rates, **replicas)[0]
        labels[name] = sorted(optimizer.prepare().groups)
    return found, exchanged, labels, owned


def test_shards_are_shared_over_data_parallel_ranks():
    ranks = run_ranks(on_a_grid, 4)
    expected = {kind: [p.detach() for p in trained(kind)[1].values()] for kind in KINDS}
    for rank, (found, exchanged, labels, _) in enumerate(ranks):
        for (kind, mode), parameters in found.items():
            for number, (name, (_, attributes)) in enumerate(CASES.items()):
                p, whole = parameters[number], expected[kind][number]
                assert_close(p, cut(whole, attributes, rank % 2, 2), 1e-5 * STEPS, (kind, mode, name))
                assert torch.equal(p, ranks[rank % 2][0][kind, mode][number])  # as on the other replica
        for mode, (sent, predicted) in exchanged.items():
            assert sent == predicted, mode
        # auto shares where it is faster, and stays within tensor parallelism where it is not
        assert labels == {"operations": ["dp", "tp x dp"], "calls": ["dp", "tp"]}
    # fifteen matrices that are cut, of which within tensor parallelism each rank would compute seven or eight
    assert sum(owned for *_, owned in ranks) == 15
    assert max(owned for *_, owned in ranks) <= 5
