"""Modifiers of Muon's step take the same steps at every tensor-parallel size, and under FSDP2."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from megatron_eopt import TensorParallelMuon
from megatron_eopt.parallel.collectives import counters
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, groups_of, placed
from tests.distributed.test_field import CASES, PLACEMENTS, TOLERANCE, dtensor_case
from tests.optimizers.field import assert_close, drawn

STEPS = 4
MODIFIED = {
    "hold": {"weight_norm": "hold", "weight_decay": 0.0},
    "brake, cautious": {"weight_norm": "brake", "brake_outward": 0.1, "cautious_weight_decay": True},
    "match, cautious": {"relative_update": "match", "cautious_weight_decay": True},
    "bound, brake": {"relative_update": "bound", "update_ratio": 0.3, "weight_norm": "brake"},
    "hold, normuon": {"weight_norm": "hold", "weight_decay": 0.0, "moment2_method": "normuon"},
}
# second moments are in fp32, so that another order of a sum moves them by a rounding
TOLERANCES = dict.fromkeys(MODIFIED, TOLERANCE) | {"hold, normuon": 1e-6}
MODES = ("duplicated", "auto", "gram")


def trained(rank, ranks, modifiers, steps=range(STEPS), state=None, start=None, **settings):
    """Some steps; the optimizer, its parameters by name, and the collectives of the last step."""
    parameters = {
        name: placed(drawn(shape, index, torch.float64), attributes, rank, ranks)
        for index, (name, (shape, attributes)) in enumerate(CASES.items())
    }
    for name, value in (start or {}).items():
        parameters[name].data.copy_(value)
    *several, last = parameters.values()
    # the last one is not modified
    opt = TensorParallelMuon(
        [{"params": several, **modifiers}, {"params": [last]}],
        lr=0.05,
        momentum=0.8,
        weight_decay=0.5,
        split_qkv=True,
        is_qkv_fn=lambda p: hasattr(p, "qkv_split_shapes"),
        pg_collection=groups_of(ranks),
        **settings,
    )
    if state is not None:
        opt.load_state_dict(copy.deepcopy(state))
    for step in steps:
        for index, (name, (shape, attributes)) in enumerate(CASES.items()):
            gradient = drawn(shape, 1000 * step + index, torch.float64)
            parameters[name].grad = cut(gradient, attributes, rank, ranks)
        counters.reset()
        opt.step()
    return opt, {name: p.detach().clone() for name, p in parameters.items()}, dict(counters.calls)


def on_all(rank, ranks):
    results = {}
    for kind, modifiers in MODIFIED.items():
        for mode in MODES:
            _, *results[kind, mode] = trained(rank, ranks, modifiers, tp_mode=mode)
        first, start, _ = trained(rank, ranks, modifiers, range(2))
        _, *results[kind, "resumed"] = trained(rank, ranks, modifiers, range(2, STEPS), first.state_dict(), start)
        results |= {(kind, name): of_dtensors(ranks, modifiers, name) for name in PLACEMENTS}
    return results


def of_dtensors(ranks, modifiers, name):
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    p, gradients = dtensor_case()
    q = torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [PLACEMENTS[name]], src_data_rank=None))
    opt = TensorParallelMuon([q], lr=0.05, **modifiers)
    for gradient in gradients:
        q.grad = distribute_tensor(gradient, mesh, [PLACEMENTS[name]], src_data_rank=None)
        opt.step()
    return q.full_tensor().detach()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.wide)], ids="TP{}".format)
def results(request):
    return run_ranks(on_all, request.param)


@pytest.mark.parametrize("kind", MODIFIED)
def test_ranks_take_the_steps_of_one(results, kind):
    _, alone, _ = trained(0, 1, MODIFIED[kind])
    for rank, of_rank in enumerate(results):
        for name, (_, attributes) in CASES.items():
            expected = cut(alone[name], attributes, rank, len(results))
            for mode in MODES:
                assert_close(of_rank[kind, mode][0][name], expected, TOLERANCES[kind], (mode, rank, name))
            assert torch.equal(of_rank[kind, "resumed"][0][name], of_rank[kind, "duplicated"][0][name])
        # parameters are gathered, so what is summed are statistics: one for each of the groups tp and expt_tp, and of
        # the moment
        assert of_rank[kind, "duplicated"][1].get("all_reduce", 0) == (4 if "normuon" in kind else 2)


@pytest.mark.parametrize("kind", MODIFIED)
def test_dtensors_take_the_steps_of_one_rank(results, kind):
    p, gradients = dtensor_case()
    opt = TensorParallelMuon([p], lr=0.05, **MODIFIED[kind])
    for gradient in gradients:
        p.grad = gradient
        opt.step()
    for of_rank in results:
        for name in PLACEMENTS:
            assert_close(of_rank[kind, name], p.detach(), TOLERANCES[kind], (kind, name))
