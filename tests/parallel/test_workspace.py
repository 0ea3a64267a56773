"""The workspace bounds what a step takes: chunks of a plan, and the bytes that a step of a large model allocates."""

from itertools import pairwise

import pytest
import torch
from counting import Allocations
from hypothesis import given
from hypothesis import strategies as st
from step import CASES, MODES, RANKS, counted_step
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_eopt import Execution
from megatron_eopt.orthogonalize import NewtonSchulz
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.cost import largest_iteration, step_bytes
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout, on_one_rank
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.workspace import IN_FLIGHT, OFFLOADED_CHUNKS, Workspace, chunk_bytes
from tests.parallel.plans import flat, matrices, modes, works
from tests.parallel.test_plan import summary


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
    if mode != "auto" and len({(x.group, x.ranks) for x in given_matrices}) == 1:
        # what is decided of each is the same; auto may find another scheme faster where chunks bound it
        assert summary(plan) == summary(make_plan(given_matrices, mode, work))
    needed, room = chunk_bytes(plan, workspace), workspace.for_chunks(largest_iteration(plan.matrices, work))
    alone = [sum(chunks == {n} for chunks in of_parameters.values()) == 1 for n in range(len(needed))]
    assert all(each <= room or single for each, single in zip(needed, alone, strict=True))
    if sum(needed) > room:
        # no two that follow one another, of one group, are apart though together they are small
        first = {bucket.chunk: plan.matrices[bucket.matrices[0]] for bucket in plan.buckets}
        group_of = {chunk: matrix.group for chunk, matrix in first.items()}
        for a, b in pairwise(range(len(needed))):
            if group_of[a] == group_of[b]:  # whose chunks do not depend on what else there is, nor does their room
                largest = largest_iteration([each for each in plan.matrices if each.group == group_of[a]], work)
                assert needed[a] + needed[b] > workspace.for_chunks(largest) // IN_FLIGHT


def test_momenta_of_a_small_model_cut_no_bucket():
    """Of a GPT of 124M, whose buckets fit into a chunk each; in larger models chunks are as the workspace has them."""
    chunks = []
    for layers in (12, 120):
        shapes = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * layers
        parameters = [
            ParamSpec(str(i), torch.float32, on_one_rank(each), iteration=NewtonSchulz())
            for i, each in enumerate(shapes)
        ]
        engine = Engine(parameters, torch.device("cpu"), workspace=Workspace(state=4, kept=4))
        buckets = engine.plan.buckets
        chunks.append(1 + buckets[-1].chunk)
        assert layers > 12 or len(buckets) == len(set(shapes))
    assert 1 < chunks[0] < OFFLOADED_CHUNKS <= chunks[1]


@pytest.mark.parametrize(
    ("mode", "form", "workspace"),
    [
        *((mode, "gram", 2**31) for mode in (*MODES, "blockwise")),
        *((mode, "standard", 2**31) for mode in ("owner", "distributed")),
        *(("owner", "gram", workspace) for workspace in (2**30, 2**32)),
        *((mode, "gram", 2**33) for mode in ("gram", "distributed")),  # with several chunks at work
    ],
)
def test_a_step_takes_no_more_than_its_workspace(fake_group, monkeypatch, mode, form, workspace):
    if form == "gram":  # as on a GPU: in fp16
        monkeypatch.setitem(NewtonSchulz.compile.__globals__, "gram_dtype", lambda dtype, device: torch.float16)
    engine, peak = counted_step(fake_group, mode, 2, Execution(workspace=workspace))
    rows, cols = 8192, 57344
    # X, its successor and two Gram matrices, in bf16, of the largest matrix
    assert peak <= workspace + 2 * (2 * rows * cols + 2 * rows * rows)
    assert peak <= step_bytes(engine.plan, engine.works, engine.workspace)


def orthogonalizing(shards):
    """A program that frees the factors."""
    assert len((yield list(shards))) == len(shards)


@pytest.mark.parametrize("workspace", [2**25, 2**31])
def test_nor_where_shards_differ_from_matrix_to_matrix(fake_group, workspace):
    shapes = [(2816, 2048), (2048, 1408)] * 16
    layouts = [Layout(*each, fake_group, "dp") for each in zip(shapes, flat(shapes, RANKS), strict=True)]
    parameters = [ParamSpec(str(i), torch.bfloat16, each, iteration=NewtonSchulz()) for i, each in enumerate(layouts)]
    engine = Engine(parameters, torch.device("cpu"), "owner", workspace=Workspace(bytes=workspace))
    with FakeTensorMode():
        shards = [torch.empty(each.rectangle.shape, dtype=torch.bfloat16) for each in layouts]
        with Allocations() as allocated:
            engine.run(range(len(shards)), lambda some: orthogonalizing([shards[i] for i in some]))
    assert (len({bucket.chunk for bucket in engine.plan.buckets}) > 1) == (workspace < 2**31)
    assert allocated.peak <= step_bytes(engine.plan, engine.works, engine.workspace)


@pytest.mark.parametrize("state", [0, 4])
def test_a_chunk_waits_for_room_beside_those_at_work(state):
    """With state in host memory none works beside another one."""
    shapes = [(8 * (1 + i % 5), 40) for i in range(12)]
    iteration = NewtonSchulz(fp32_matmul_prec="highest")
    parameters = [
        ParamSpec(str(i), torch.float32, on_one_rank(each), iteration=iteration) for i, each in enumerate(shapes)
    ]
    engine = Engine(parameters, torch.device("cpu"), workspace=Workspace(bytes=2**15, state=state, kept=state))
    engine.prepare()
    chunks = engine._chunks_of(range(len(shapes)))
    chunk_of = {i: number for number, chunk in enumerate(chunks) for each in chunk.slices for i in each.parameters}
    room = 0 if state else engine.workspace.for_chunks(largest_iteration(engine.plan.matrices, engine.works))
    at_work = set()

    def program(some):
        at_work.add(chunk_of[some[0]])
        assert len(at_work) == 1 or sum(chunks[number].bytes for number in at_work) <= room
        yield [torch.ones(shapes[i]) for i in some]
        at_work.discard(chunk_of[some[0]])

    engine.run(range(len(shapes)), program)
    assert len(chunks) > 3
    assert not at_work


@pytest.mark.parametrize("name", ["adamuon", "normuon", "namo", "muon_hyperball", "polargrad"])
def test_no_relative_takes_more(fake_group, name):
    engine, peak = counted_step(fake_group, "owner", 2, optimizer=CASES[name])
    assert peak <= step_bytes(engine.plan, engine.works, engine.workspace)
    assert peak <= 2**31 + 2 * (2 * 8192 * 57344 + 2 * 8192 * 8192)


@pytest.mark.parametrize(
    ("name", "mode"), [("muon", "owner"), ("muon", "gram"), ("adamuon", "owner"), ("mars_muon", "auto")]
)
def test_state_from_host_memory_is_on_the_device_within_the_workspace(fake_group, name, mode):
    engine, peak = counted_step(fake_group, mode, 2, Execution(offload_fraction=1.0), CASES[name])
    assert peak <= step_bytes(engine.plan, engine.works, engine.workspace)
    assert peak <= 2**31 + 2 * (2 * 8192 * 57344 + 2 * 8192 * 8192)
