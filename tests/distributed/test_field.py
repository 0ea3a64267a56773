"""Scion, PolarGrad, MuonHyperball, MARS-Muon, Muown and Signum on two ranks take the steps of one."""

import copy
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron_eopt.optimizers.hyperball import MuonHyperball
from megatron_eopt.optimizers.lion import Signum
from megatron_eopt.optimizers.mars_muon import MarsMuon
from megatron_eopt.optimizers.muown import Muown
from megatron_eopt.optimizers.polar_grad import PolarGrad
from megatron_eopt.optimizers.scion import Scion
from megatron_eopt.parallel.collectives import counters
from megatron_eopt.parallel.records import Matrix
from megatron_eopt.parallel.statistics import StatisticsRequest, statistics_of
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, groups_of, message_of, part_of, placed, shard, sharded
from tests.distributed.test_statistics import layouts, matrix_of
from tests.distributed.test_tp_invariance import SHAPES
from tests.optimizers.field import assert_close, drawn

STEPS = 4
TOLERANCE = 1e-11  # what the iteration makes of rounding, 493 * 2^-53, and an ample margin for other orders of sums
KINDS = {"scion": Scion, "polar_grad": PolarGrad, "hyperball": MuonHyperball, "mars": MarsMuon, "muown": Muown}
SUMS = {"scion": 0, "muown": 4}  # all-reduces of a step in the groups tp and expt_tp, where there are not two
MODES = ("duplicated", "owner", "auto", "distributed", "gram")
CASES = {
    **{f"{kind} dim {dim}": (shape, sharded(dim)) for kind, shape in SHAPES.items() for dim in (0, 1)},
    "fused qkv": ((6 * 16, 48), sharded(0, qkv_split_shapes=[8, 4, 4])),
    # the shard ends inside the group, and one rank holds nothing of k and v
    "one query group": ((48, 40), sharded(0, qkv_split_shapes=[32, 8, 8])),
    "expert": ((36, 96), {"partition_dim": 1, "expert_tp": True}),
    "replicated": ((40, 24), {}),
    "zero": ((48, 36), sharded(0)),
}
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}


def trained(rank, world_size, kind, steps=range(STEPS), state=None, start=None, **settings):
    """Some steps of one optimizer of all cases; it, its parameters by name, and the collectives of the last step."""
    # in fp64, where the iteration does not multiply rounding to what could be taken for an error
    parameters = {
        name: placed(drawn(shape, index, torch.float64), attributes, rank, world_size)
        for index, (name, (shape, attributes)) in enumerate(CASES.items())
    }
    for name, value in (start or {}).items():
        parameters[name].data.copy_(value)
    several = list(parameters.values())
    opt = KINDS[kind](
        [{"params": several[:3], "momentum": 0.5}, {"params": several[3:], "lr": 0.02}],
        lr=0.05,
        momentum=0.8,
        split_qkv=True,
        is_qkv_fn=lambda p: hasattr(p, "qkv_split_shapes"),
        pg_collection=groups_of(world_size),
        **settings,
    )
    if state is not None:
        opt.load_state_dict(copy.deepcopy(state))
    for step in steps:
        for index, (name, (shape, attributes)) in enumerate(CASES.items()):
            # MARS-Muon clips by norms of matrices: some, none, and some whose shards have norms below 1
            size = (1.0, 1e-4, 1.2 / prod(shape) ** 0.5)[index % 3] * (name != "zero")
            gradient = drawn(shape, 1000 * (1 + step) + index, torch.float64) * size
            parameters[name].grad = cut(gradient, attributes, rank, world_size)
        counters.reset()
        opt.step()
    return opt, parameters, dict(counters.calls)


def found(parameters):
    return {name: p.detach() for name, p in parameters.items()}


def in_all_modes(rank, world_size):
    results = {}
    for kind in KINDS:
        for tp_mode in MODES:
            _, parameters, calls = trained(rank, world_size, kind, tp_mode=tp_mode)
            results[kind, tp_mode] = found(parameters), calls
        _, parameters, _ = trained(rank, 1, kind, data_parallel_group=dist.group.WORLD)
        results[kind, "shared out"] = found(parameters)
        first, parameters, _ = trained(rank, world_size, kind, range(2))
        state = first.state_dict(), found(parameters)
        _, parameters, _ = trained(rank, world_size, kind, range(2, STEPS), *state)
        results[kind, "resumed"] = found(parameters)
    return results


def of_dtensors(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    results = {}
    for kind, cls in (KINDS | {"signum": Signum}).items():
        for name, placement in PLACEMENTS.items():
            p, gradients = dtensor_case()
            q = torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [placement], src_data_rank=None))
            opt = cls([q], lr=0.05)
            for gradient in gradients:
                q.grad = distribute_tensor(gradient, mesh, [placement], src_data_rank=None)
                opt.step()
            results[kind, name] = q.full_tensor().detach()
    return results


def dtensor_case():
    p, *gradients = drawn((STEPS, 11, 7), dtype=torch.float64)
    return torch.nn.Parameter(p), gradients


def left_out(rank, world_size):
    """What stays bit for bit where one rank has a gradient that is not finite, or none has one."""
    results = {}
    for kind, cls in KINDS.items():
        parameters = [shard(torch.eye(12, 4) + rank) for _ in range(2)]
        opt = cls(parameters, lr=0.05, pg_collection=groups_of(), tp_mode="auto")
        same = []
        for step in range(4):
            for p in parameters:
                p.grad = drawn((12, 4), 10 * step + rank)
            if step == 1:
                parameters[0].data.mul_(1.5)  # off the sphere, if it is on one
            if step in (1, 2) and rank == step - 1:
                parameters[0].grad[1, 1] = torch.nan
            if step == 3:
                parameters[0].grad = None
            before = [p.detach().clone() for p in parameters]
            opt.step()
            same.append([torch.equal(*pair) for pair in zip(before, parameters, strict=True)])
        results[kind] = same
    return results


def refused(rank, world_size):
    """What is said of blockwise shards, and of a matrix that is zero on both ranks."""
    messages = {
        (kind, groups is None): message_of(
            lambda cls=cls, groups=groups: cls([shard(torch.eye(6, 4))], pg_collection=groups, tp_mode="blockwise")
        )
        for kind, cls in KINDS.items()
        for groups in (None, groups_of())
    }
    p, half = shard(torch.zeros(6, 4)), shard(torch.full((6, 4), float(rank)))  # zero on one rank alone
    opt = MuonHyperball([half, p], lr=0.05, pg_collection=groups_of())
    half.grad, p.grad = torch.ones(6, 4), torch.ones(6, 4)
    with pytest.raises(ValueError, match=r"parameter 1 of group 0, of shape \(6, 4\) is 0: initialize it"):
        opt.step()
    assert torch.equal(half, torch.full((6, 4), float(rank)))
    return messages


def inner_products(rank, world_size):
    """Of two matrices in every layout that there is, and in two dtypes."""
    matrices = [Matrix(name, *layout) for name, layout in ((n, ((14, 22), p)) for n, p in layouts(world_size).items())]
    x, y = matrix_of(0), matrix_of(1, dtype=torch.bfloat16)
    kept = x.double().clone()
    wanted = [
        StatisticsRequest(matrix=matrix, x=part_of(x.to(dtype), rectangle), inner=part_of(y, rectangle))
        for matrix in matrices
        for rectangle in [matrix.rectangles[rank]]
        for dtype in (torch.float32, torch.float64)
    ]
    counters.reset()
    statistics = statistics_of(wanted, {"tp": dist.group.WORLD})
    assert counters.calls == {"all_reduce": 1}
    for each in statistics:
        assert (each["inner_product"].dtype, each.get("squared_norm")) == (torch.float64, None)
        torch.testing.assert_close(each["inner_product"], (kept * y.double()).sum(), rtol=1e-12, atol=0)
    assert statistics_of([StatisticsRequest(matrix=matrices[0], x=wanted[0].x)], {"tp": dist.group.WORLD}) == [{}]


def on_all(rank, world_size):
    # in one go, since it takes seconds to start ranks
    inner_products(rank, world_size)
    return (
        in_all_modes(rank, world_size),
        of_dtensors(rank, world_size),
        left_out(rank, world_size),
        refused(rank, world_size),
    )


@pytest.fixture(scope="module")
def results():
    return run_ranks(on_all, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_take_the_steps_of_one(results, kind):
    _, alone, _ = trained(0, 1, kind)
    for rank, (in_modes, *_) in enumerate(results):
        for name, (_, attributes) in CASES.items():
            expected = cut(alone[name].detach(), attributes, rank, 2)
            for mode in MODES:
                assert_close(in_modes[kind, mode][0][name], expected, TOLERANCE, (mode, rank, name))
            assert_close(in_modes[kind, "shared out"][name], alone[name].detach(), TOLERANCE, (rank, name))
            assert torch.equal(in_modes[kind, "resumed"][name], in_modes[kind, "duplicated"][0][name])
        # parameters are gathered, so what is summed are statistics: of the groups tp and expt_tp
        assert in_modes[kind, "duplicated"][1].get("all_reduce", 0) == SUMS.get(kind, 2)


@pytest.mark.parametrize("kind", [*KINDS, "signum"])
def test_dtensors_take_the_steps_of_one_rank(results, kind):
    p, gradients = dtensor_case()
    opt = (KINDS | {"signum": Signum})[kind]([p], lr=0.05)
    for gradient in gradients:
        p.grad = gradient
        opt.step()
    for _, of_placements, *_ in results:
        for name in PLACEMENTS:
            assert_close(of_placements[kind, name], p.detach(), TOLERANCE, (kind, name))


def test_a_step_that_is_left_out_is_left_out_on_all_ranks(results):
    for _, _, same, _ in results:
        for of_kind in same.values():
            assert of_kind == [[False, False], [True, False], [True, False], [True, False]]
        assert same.keys() == KINDS.keys()


def test_blockwise_is_for_scion_alone(results):
    for *_, messages in results:
        assert [messages.pop(("scion", alone)) for alone in (True, False)] == [None, None]
        for (kind, _), message in messages.items():
            assert message.startswith(
                f"{KINDS[kind].__name__}: with tp_mode blockwise the norms would be those of shards"
            )
            assert message.endswith("number of ranks: take an exact tp_mode (auto, duplicated, ...)")
