"""The workspace bounds what a step takes: chunks of a plan, and the bytes that a step of a large model allocates."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.allocations import Allocations
from megatron_eopt import TensorParallelMuon
from megatron_eopt.optimizers.muon import muon
from megatron_eopt.orthogonalize import NewtonSchulz
from megatron_eopt.parallel.cost import largest_iteration, step_bytes
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.workspace import IN_FLIGHT, Workspace, chunk_bytes
from tests.parallel.plans import matrices, modes, works
from tests.parallel.test_plan import summary

RANKS = 8
# rows, columns and the dimension that is cut, of a layer of llama3-70b
LAYER = {"qkv": (10240, 8192, 0), "proj": (8192, 8192, 1), "fc1": (57344, 8192, 0), "fc2": (8192, 28672, 1)}


@given(matrices(), modes, works, st.integers(1, 2**20), st.data())
def test_chunks_are_whole_parameters_within_the_workspace(given_matrices, mode, work, size, data):
    numbers = [(each.group, each.ranks, data.draw(st.integers(0, 3))) for each in given_matrices]
    parameters = [sorted(set(numbers)).index(number) for number in numbers]
    workspace = Workspace(bytes=size)
    plan = make_plan(given_matrices, mode, work, workspace=workspace, parameters=parameters)
    chunk_of = {i: bucket.chunk for bucket in plan.buckets for i in bucket.matrices}
    of_parameters = {}
    for i, parameter in enumerate(parameters):
        of_parameters.setdefault(parameter, set()).add(chunk_of[i])
    assert all(len(chunks) == 1 for chunks in of_parameters.values())
    assert [bucket.chunk for bucket in plan.buckets] == sorted(bucket.chunk for bucket in plan.buckets)
    assert summary(plan) == summary(make_plan(given_matrices, mode, work))  # what is decided of each is the same
    needed, room = chunk_bytes(plan, workspace), workspace.for_chunks(largest_iteration(plan.matrices, work))
    alone = [sum(chunks == {n} for chunks in of_parameters.values()) == 1 for n in range(len(needed))]
    assert all(each <= room or single for each, single in zip(needed, alone, strict=True))
    if sum(needed) > room:
        # no two that follow one another, of one group, are apart though together they are small
        first = {bucket.chunk: plan.matrices[bucket.matrices[0]] for bucket in plan.buckets}
        group_of = {chunk: (matrix.group, matrix.ranks) for chunk, matrix in first.items()}
        pairs = [(a, b) for a, b in pairwise(range(len(needed))) if group_of[a] == group_of[b]]
        assert all(needed[a] + needed[b] > room // IN_FLIGHT for a, b in pairs)


@pytest.fixture(scope="module")
def fake_ranks():
    """A group of eight ranks of which one is there: what it receives has no numbers."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield SimpleNamespace(tp=dist.group.WORLD, expt_tp=None)
    dist.destroy_process_group()


def counted(groups, mode, layers, workspace):
    """An optimizer of layers at TP=8, and the most bytes that its step on a GPU has in use at a time."""
    with FakeTensorMode():
        parameters = []
        for layer in range(layers):
            for name, (rows, cols, dim) in LAYER.items():
                parameter = torch.nn.Parameter(torch.empty(rows, cols).chunk(RANKS, dim)[0].contiguous())
                parameter.tensor_model_parallel, parameter.partition_dim = True, dim
                parameter.grad = torch.empty_like(parameter)
                parameters.append((f"{layer}.{name}", parameter))
        optimizer = TensorParallelMuon(parameters, pg_collection=groups, tp_mode=mode, workspace=workspace)
        optimizer.init_state()
        optimizer._engine = optimizer.proposed()
        batches = optimizer._batches(torch.empty(len(parameters), dtype=torch.bool), masked=True)
        with torch.no_grad(), Allocations() as allocated:
            muon(batches, optimizer.engine, optimizer)
    assert allocated.bytes == 0
    return optimizer.engine, allocated.peak


MODES = ("duplicated", "owner", "auto", "gram", "distributed", "blockwise")


@pytest.mark.parametrize(
    ("mode", "form", "workspace"),
    [
        *((mode, form, 2**31) for mode in MODES for form in ("standard", "gram")),
        *(("owner", "gram", workspace) for workspace in (2**30, 2**32)),
    ],
)
def test_a_step_takes_no_more_than_its_workspace(fake_ranks, monkeypatch, mode, form, workspace):
    if form == "gram":  # as on a GPU: in fp16
        monkeypatch.setitem(NewtonSchulz.compile.__globals__, "gram_dtype", lambda dtype, device: torch.float16)
    engine, peak = counted(fake_ranks, mode, 2, workspace)
    rows, cols = 8192, 57344
    # X, its successor and two Gram matrices, in bf16, of the largest matrix
    assert peak <= workspace + 2 * (2 * rows * cols + 2 * rows * rows)
    assert peak <= step_bytes(engine.plan, engine.works, engine.workspace)
