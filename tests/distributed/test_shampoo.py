"""Shampoo, KL-Shampoo and SOAP-Muon at TP=k and with DTensors take the steps of one rank."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron_eopt import SOAP, KLShampoo, Shampoo
from megatron_eopt.matrices import GATE_UP, experts
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, groups_of, placed, sharded, whole
from tests.optimizers.field import assert_close

STEPS = 6
CASES = {
    "in fp64": ((24, 8), sharded(0)),
    **{
        f"{kind} along dim {dim}": (shape, sharded(dim))
        for kind, shape in {"square": (24, 24), "tall": (48, 20), "wide": (20, 48)}.items()
        for dim in (0, 1)
    },
    "one side": ((60, 8), sharded(0)),
    "fused qkv": ((4 * 16, 24), sharded(0, qkv_split_shapes=[8, 4, 4])),
    "gate and up": ((32, 12), sharded(0, logical_matrices=GATE_UP)),
    "stacked experts": ((2, 16, 20), sharded(1, logical_matrices=experts(2))),
    "expert": ((20, 48), {"partition_dim": 1, "expert_tp": True}),
    "replicated": ((20, 12), {}),
}
SETTINGS = {"lr": 0.05, "max_dim": 48, "weight_decay": 0.1, "precondition_frequency": 2}
# a side that no gradient spans so far has the damping alone, which is large enough to hide what rounding leaves there
DAMPED = {"damping": 1e-3}
SOAP_MUON = {"orthogonalize": True, "nesterov": True, "eps": 1.0}
VARIANTS = [
    (Shampoo, {**DAMPED, "precondition_frequency": 1}),
    (Shampoo, {**DAMPED, "root_method": "cans", "weight_norm": "hold"}),
    (KLShampoo, {**DAMPED, "precondition_frequency": 1, "maximize": True}),
    (KLShampoo, {**DAMPED, "root_method": "cans"}),
    (SOAP, SOAP_MUON),
]


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    xs = {name: torch.randn(shape, generator=generator) for name, (shape, _) in CASES.items()}
    return {name: x.double() if name == "in fp64" else x for name, x in xs.items()}


def trained(rank, world_size, cls, settings, numbers=range(STEPS)):
    parameters = {name: placed(x, CASES[name][1], rank, world_size) for name, x in drawn(0).items()}
    several = list(parameters.items())
    optimizer = cls(
        [{"params": several[:6]}, {"params": several[6:], "lr": 0.1}],
        split_qkv=True,
        is_qkv_fn=lambda p: hasattr(p, "qkv_split_shapes"),
        pg_collection=groups_of(world_size),
        **{**SETTINGS, **settings},
    )
    for step in numbers:
        for name, x in drawn(100 + step).items():
            parameters[name].grad = cut(x, CASES[name][1], rank, world_size)
        optimizer.step()
    return {name: (p.detach(), dict(optimizer.state[p])) for name, p in parameters.items()}


def on_ranks(rank, world_size):
    return [trained(rank, world_size, cls, settings) for cls, settings in VARIANTS]


def assert_ranks_equal_one(world_size):
    ranks = run_ranks(on_ranks, world_size)
    for index, (cls, settings) in enumerate(VARIANTS):
        expected = trained(0, 1, cls, settings)
        for rank, found in enumerate(ranks):
            for name, (_, attributes) in CASES.items():
                (p, state), (of_one, of_whole) = found[index][name], expected[name]
                assert_close(p, cut(of_one, attributes, rank, world_size), what=(cls, settings, rank, name))
                assert set(state) == set(of_whole)
                for key, value in of_whole.items():
                    value = cut(value, attributes, rank, world_size) if key.startswith("exp_avg") else value
                    if state[key].numel() or key[0] not in "LRPQ":
                        assert_close(state[key], value, what=(cls, settings, rank, name, key))
        for name in set(CASES) - {"replicated"}:
            for key in (key for key in expected[name][1] if key[0] in "LRPQ"):
                assert sum(found[index][name][1][key].numel() > 0 for found in ranks) == 1, (name, key)


def test_two_ranks_step_as_one():
    assert_ranks_equal_one(2)


@pytest.mark.wide
def test_four_ranks_step_as_one():
    assert_ranks_equal_one(4)


CLASSES = (Shampoo, KLShampoo, SOAP)
SHAPES = {"even": (24, 8), "square": (6, 6), "uneven": (13, 9), "wide": (7, 30), "gate and up": (18, 24)}


def of_dtensors(spread, cls):
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: torch.nn.Parameter(spread(torch.randn(shape, generator=generator))) for name, shape in SHAPES.items()
    }
    parameters["gate and up"].logical_matrices = GATE_UP
    settings = SOAP_MUON if cls is SOAP else DAMPED
    optimizer = cls(list(parameters.items()), **{**SETTINGS, **settings, "max_dim": 9, "weight_norm": "hold"})
    for step in range(STEPS):
        generator.manual_seed(100 + step)
        for name, shape in SHAPES.items():
            parameters[name].grad = spread(torch.randn(shape, generator=generator))
        optimizer.step()
    return {
        name: (whole(p), {key: whole(value) for key, value in optimizer.state[p].items()})
        for name, p in parameters.items()
    }


def dtensors_on_two(rank, world_size):
    mesh = init_device_mesh("cpu", (2,))
    kinds = [[Shard(0)], [Shard(1)], [Replicate()]]
    return [
        of_dtensors(lambda x, kind=kind: distribute_tensor(x, mesh, kind), cls) for kind in kinds for cls in CLASSES
    ]


def test_dtensors_step_as_tensors():
    for found in run_ranks(dtensors_on_two, 2):
        for index, of_kind in enumerate(found):
            expected = of_dtensors(lambda x: x, CLASSES[index % 3])
            for name, (p, state) in expected.items():
                assert_close(of_kind[name][0], p, what=(index, name))
                assert list(of_kind[name][1]) == list(state)
                for key, value in state.items():
                    assert_close(of_kind[name][1][key], value, what=(index, name, key))
