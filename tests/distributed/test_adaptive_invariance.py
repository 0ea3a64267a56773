"""AdaMuon, NorMuon and NAMO at TP=k take the steps of one rank, with one all-reduce for each group of ranks."""

import pytest
import torch
import torch.distributed as dist

from megatron_eopt import TensorParallelAdaptiveMuon
from megatron_eopt.parallel.collectives import counters
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, groups_of, placed, shard, sharded
from tests.distributed.test_tp_invariance import SHAPES
from tests.optimizers.field import assert_close

STEPS = 5
VARIANTS = {
    "adamuon": {"moment2_method": "adamuon"},
    "adamuon not aligned": {"moment2_method": "adamuon", "align_rms": False},
    "normuon": {"moment2_method": "normuon"},
    "namo": {"moment2_method": "namo"},
}
MODES = ("duplicated", "owner", "auto")
FURTHER_MODES = ("distributed", "gram")

CASES = {
    **{f"{kind} dim {dim}": (shape, sharded(dim)) for kind, shape in SHAPES.items() for dim in (0, 1)},
    "fused qkv": ((6 * 16, 48), sharded(0, qkv_split_shapes=[8, 4, 4])),
    "gated qkv": ((4 * 24, 40), sharded(0, qkv_split_shapes=[8, 8, 4, 4])),
    # shards end inside the group, and some hold nothing of k or v
    "one query group": ((48, 40), sharded(0, qkv_split_shapes=[32, 8, 8])),
    "expert": ((36, 96), {"partition_dim": 1, "expert_tp": True}),
    "tall expert": ((96, 24), {"partition_dim": 1, "expert_tp": True}),
    "replicated": ((40, 24), {}),
    "zero": ((48, 36), sharded(0)),
}


def trained(rank, world_size, variant, tp_mode, **settings):
    """Some steps of one optimizer of all cases; it, its parameters, and the collectives of the last step."""
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: placed(torch.randn(shape, generator=generator), attributes, rank, world_size)
        for name, (shape, attributes) in CASES.items()
    }
    several = list(parameters.items())
    optimizer = TensorParallelAdaptiveMuon(
        [{"params": several[:4], "weight_decay": 0.1}, {"params": several[4:], "beta2": 0.8, "lr": 0.6}],
        lr=1.0,
        momentum=0.8,
        split_qkv=True,
        is_qkv_fn=lambda p: hasattr(p, "qkv_split_shapes"),
        fp32_matmul_prec="highest",
        pg_collection=groups_of(world_size),
        tp_mode=tp_mode,
        **VARIANTS[variant],
        **settings,
    )
    for _ in range(STEPS):
        for name, (shape, attributes) in CASES.items():
            gradient = torch.randn(shape, generator=generator) * (name != "zero")
            parameters[name].grad = cut(gradient, attributes, rank, world_size)
        counters.reset()
        optimizer.step()
    return optimizer, parameters, dict(counters.calls)


def moments(optimizer, parameter):
    state = optimizer.state[parameter]
    return [value for key, value in state.items() if key.startswith("moment2_buffer")]


def on_ranks(rank, world_size, tp_modes):
    results = {}
    for tp_mode in tp_modes:
        for variant in VARIANTS:
            optimizer, parameters, calls = trained(rank, world_size, variant, tp_mode)
            rectangles = {
                name: [each.rectangle for each in optimizer.matrix_layouts(p)] for name, p in parameters.items()
            }
            found = {name: (p.detach(), moments(optimizer, p), rectangles[name]) for name, p in parameters.items()}
            results[variant, tp_mode] = found, calls
    return results


def bad_gradients(rank, world_size):
    """What becomes of the second moments where one rank has a gradient that is not finite."""
    kept = {}
    for variant, settings in VARIANTS.items():
        parameters = [shard(torch.eye(12, 4)) for _ in range(2)]
        optimizer = TensorParallelAdaptiveMuon(parameters, pg_collection=groups_of(), tp_mode="auto", **settings)
        before = []
        for step in range(2):
            for parameter in parameters:
                parameter.grad = torch.eye(12, 4) + step + rank
            if step == 1 and rank == 0:
                parameters[0].grad[1, 1] = torch.nan
            before = [moments(optimizer, parameter)[0].clone() for parameter in parameters] if step else []
            optimizer.step()
        same = [torch.equal(a, moments(optimizer, p)[0]) for a, p in zip(before, parameters, strict=True)]
        kept[variant] = same, all(p.isfinite().all() for p in parameters)
    return kept


def shared_out(rank):
    """Every rank has the whole parameters, and orthogonalizes its share of them."""
    results = {}
    for variant in VARIANTS:
        _, parameters, calls = trained(rank, 1, variant, "auto", data_parallel_group=dist.group.WORLD)
        assert set(calls) == {"all_gather", "agree"}
        results[variant] = {name: p.detach() for name, p in parameters.items()}
    return results


def on_all(rank, world_size, tp_modes):
    # in one go, since it takes seconds to start ranks
    further = (bad_gradients(rank, world_size), shared_out(rank)) if world_size == 2 else ({}, {})
    return on_ranks(rank, world_size, tp_modes), *further


def check(results, tp_modes):
    world_size = len(results)
    # where partial Gram matrices are summed, factors are rounded otherwise, by up to 6e-5 (tests/optimizers/field.py),
    # and adamuon makes as much of small entries (without AVX-512, 3.1e-5 was measured)
    loose = {("adamuon", mode): 6e-5 for mode in FURTHER_MODES}
    for variant in VARIANTS:
        optimizer, parameters, _ = trained(0, 1, variant, "duplicated")
        for tp_mode in tp_modes:
            tolerance = loose.get((variant.split()[0], tp_mode), 1e-5)
            for rank, result in enumerate(results):
                found, _ = result[variant, tp_mode]
                for name, (shape, attributes) in CASES.items():
                    actual, kept, rectangles = found[name]
                    what = variant, tp_mode, rank, name
                    assert parameters[name].shape == shape
                    assert_close(actual, cut(parameters[name].detach(), attributes, rank, world_size), tolerance, what)
                    whole = moments(optimizer, parameters[name])
                    if variant.startswith("adamuon"):
                        expected = [cut(whole[0], attributes, rank, world_size)]
                    elif variant == "namo":
                        expected = whole
                    else:
                        expected = [
                            v[p.top : p.bottom] if m.shape[0] >= m.shape[1] else v[p.left : p.right]
                            for v, p, m in zip(
                                whole, rectangles, optimizer.matrix_layouts(parameters[name]), strict=True
                            )
                        ]
                    for one, other in zip(kept, expected, strict=True):
                        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=str(what))


@pytest.mark.parametrize("world_size", [2, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (3, 4))])
def test_ranks_take_the_steps_of_one(world_size):
    results, bad, shared = zip(*run_ranks(on_all, world_size, MODES), strict=True)
    check(results, MODES)
    for result in results:
        for variant in VARIANTS:
            # parameters are gathered, so what is summed are statistics: of the groups tp and expt_tp
            sums = 0 if variant == "adamuon not aligned" else 2
            assert result[variant, "duplicated"][1].get("all_reduce", 0) == sums

    if world_size > 2:
        return
    # a bad gradient on one rank leaves the second moment on all of them
    for kept in bad:
        assert kept == dict.fromkeys(VARIANTS, ([True, False], True))
    for variant in VARIANTS:
        _, parameters, _ = trained(0, 1, variant, "duplicated")
        for found in shared:
            for name, p in parameters.items():
                assert_close(found[variant][name], p.detach(), what=(variant, name))


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_take_the_steps_of_one_in_the_other_modes(world_size):
    check(run_ranks(on_ranks, world_size, FURTHER_MODES), FURTHER_MODES)
