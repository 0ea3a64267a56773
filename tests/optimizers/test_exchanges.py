"""What a step exchanges is what its plan prints, at any number of ranks, and its buffers do not grow with them.

One rank steps on the meta device, in a group whose others are not there.
"""

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from counting import Allocations
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_eopt import Execution
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.optimizers.with_adamw import WithAdamW
from megatron_eopt.parallel.collectives import counters
from megatron_eopt.parallel.exchange_cost import most_buffers
from megatron_eopt.screen import figure, megabytes
from megatron_eopt.step import stacked_optimizer
from megatron_eopt.step.exchange_table import NOTHING
from megatron_eopt.step.stacked_optimizer import StackedOptimizer
from megatron_eopt.step.state import STEPS
from tests.distributed.shards import shard
from tests.optimizers.family import RECORDS, having

STACK = 2**18  # bytes, so that there are several chunks
WORKSPACE = 3 * STACK
SHAPES = [(128, 64, 0), (64, 128, 1), (64, 64, 0), (192, 64, 0)] * 3  # and the dimension that is cut
UNEVEN = [(10, 64, 0), (100, 96, 0)] * 2  # DTensors, of which some ranks have nothing
STACKED = [name for name, row in OPTIMIZERS.items() if issubclass(row.cls, StackedOptimizer)]
STACKED.remove("spectron")  # exchanges as Muon does
FACTORED = having("share_over_dp")
CASES = [(name, layout) for name in STACKED for layout in ("cut", "DTensors")]
CASES += [(name, layout) for name in FACTORED for layout in ("copies", "cut copies")]


@contextmanager
def group_of(ranks, rank):
    """A group of which one rank is there."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def parameter(rows, cols):
    return torch.nn.Parameter(torch.empty(rows, cols, device="meta"))


def cut(rows, cols, dim, ranks):
    held = (rows // ranks, cols) if dim == 0 else (rows, cols // ranks)
    return shard(parameter(*held).data, dim)


def placed(layout, ranks, rank, shapes=SHAPES):
    """This rank's parameters, and settings of the optimizer."""
    world = dist.group.WORLD
    if layout == "cut":
        return [cut(*each, ranks) for each in shapes], {"pg_collection": SimpleNamespace(tp=world, expt_tp=world)}
    if layout == "copies":
        groups = SimpleNamespace(tp=None, expt_tp=None, dp_cp=world)
        return [parameter(rows, cols) for rows, cols, _ in shapes], {"pg_collection": groups, "share_over_dp": True}
    if layout == "cut copies":
        first = rank // 2 * 2
        tp = dist.new_group([first, first + 1])
        dp = dist.new_group(list(range(rank % 2, ranks, 2)))
        groups = SimpleNamespace(tp=tp, expt_tp=tp, dp_cp=dp, tp_dp_cp=world)
        return [cut(*each, 2) for each in shapes], {"pg_collection": groups, "share_over_dp": True}
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    parameters = []
    for rows, cols, _ in shapes:
        size = -(-rows // ranks)
        held = max(0, min(size, rows - rank * size))
        local = torch.empty(held, cols, device="meta")
        x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(rows, cols), stride=(cols, 1))
        parameters.append(torch.nn.Parameter(x))
    return parameters, {}


def made(name, parameters, settings):
    """An optimizer that has begun, with two groups."""
    row = OPTIMIZERS[name]
    half = len(parameters) // 2
    groups = [{"params": parameters[:half], **RECORDS[name].first_group}, {"params": parameters[half:]}]
    optimizer = row.cls(groups, lr=0.01, **settings)
    vars(optimizer)["execution"] = Execution(workspace=WORKSPACE, symmetric_products="torch")
    optimizer.init_state()
    for each in parameters:
        each.grad = torch.empty_like(each)
        if name in FACTORED:
            optimizer._note_begun(each, STEPS)  # there are factors, which a first gradient makes
    return optimizer


def stepped(optimizer):
    """What a step sends, by collective, and the most bytes of its temporaries."""
    session = optimizer._session
    session.engine = optimizer.proposed()  # nobody is there to agree
    session.settled = optimizer._settled(session.engine)
    session.stepping = [True] * len(optimizer._parameters())
    counters.reset()
    with torch.no_grad(), Allocations() as allocated:
        optimizer._take(None)
    return {name: (counters.calls[name], counters.bytes[name]) for name in counters.calls}, allocated.peak


def planned(optimizer, rank):
    """Calls and bytes of a rank by collective, the most of a rank, and the most bytes of buffers."""
    listed = [[optimizer.exchanges(chunk.stacks) for chunk in together] for together in optimizer._proposed_chunks()]
    every = [exchange for together in listed for exchanges in together for exchange in exchanges]
    calls = Counter()
    sent = Counter()
    for exchange in every:
        calls[exchange.collective] += exchange.calls
        sent[exchange.collective] += exchange.sent[rank]
    of_ranks = [sum(of_rank) for of_rank in zip(*(exchange.sent for exchange in every), strict=True)]
    return {name: (calls[name], sent[name]) for name in calls}, max(of_ranks), max(map(most_buffers, listed))


@pytest.fixture(scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacked_optimizer, "MOST_STACK_BYTES", STACK)
        yield


@pytest.fixture(scope="module")
def alone(small):
    """Temporaries of a step of one rank, by optimizer."""
    shapes = [each[:2] for each in SHAPES + UNEVEN]
    return {name: stepped(made(name, [parameter(*shape) for shape in shapes], {}))[1] for name in STACKED}


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_step_exchanges_what_its_plan_prints(name, layout, ranks, alone):
    rank = ranks - 1 if "copies" in layout else 1
    shapes = SHAPES + UNEVEN if layout == "DTensors" else SHAPES
    with group_of(ranks, rank):
        optimizer = made(name, *placed(layout, ranks, rank, shapes))
        expected, most, buffers = planned(optimizer, rank)
        text = optimizer.explain()
        traffic, peak = stepped(optimizer)
    assert traffic == expected
    _, printed = text.split("\nall ")
    calls = sum(calls for calls, _ in traffic.values())
    assert printed.split("\n")[0].split()[1:] == [figure(most / 1e6), f"{calls:,}"]
    assert f"exchanges take at most {megabytes(buffers)} MB" in printed
    assert peak <= alone[name] + buffers
    assert buffers <= 6 * (STACK + WORKSPACE // 3)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "layout", "shapes"),
    [
        ("soap", "copies", SHAPES),
        ("soap", "cut copies", SHAPES),
        ("dion", "cut", SHAPES),
        ("dion2", "DTensors", [(8, 256, 0)] * 16),  # an all-gather takes as many rows of each rank
    ],
)
def test_temporaries_do_not_grow_with_ranks(name, layout, shapes, small):
    peaks = []
    for ranks in (4, 64):
        with group_of(ranks, 1):
            peaks.append(stepped(made(name, *placed(layout, ranks, 1, shapes * 5)))[1])
    few, many = peaks
    assert many <= 1.1 * few


@pytest.mark.parametrize(("name", "said"), [("shampoo", "\nall-gather "), ("muon", ": this plan"), ("lion", NOTHING)])
def test_plain_torch_says_it_behind_who_has_what(name, said):
    with group_of(4, 1):
        matrices, _ = placed("DTensors", 4, 1)
        optimizer = OPTIMIZERS[name].cls(matrices)
        if name != "lion":
            optimizer = WithAdamW(optimizer, [torch.nn.Parameter(torch.ones(8))], {})
        owners, exchanged = optimizer.explain().split("\n\n", 1)
    assert type(optimizer.matrices).__name__ in owners
    assert said in exchanged
    assert ("AdamW" in owners) is (name != "lion")
