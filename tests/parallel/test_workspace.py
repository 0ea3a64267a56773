"""The workspace bounds what a step takes: chunks of a plan, and the bytes that a step of a large model allocates."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from step import CASES, MODES, counted_step

from megatron_eopt import Execution
from megatron_eopt.orthogonalize import NewtonSchulz
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.cost import largest_iteration, step_bytes
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import on_one_rank
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.workspace import IN_FLIGHT, Workspace, chunk_bytes
from tests.parallel.plans import matrices, modes, works
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


@pytest.mark.parametrize(
    ("mode", "form", "workspace"),
    [
        *((mode, "gram", 2**31) for mode in (*MODES, "blockwise")),
        ("distributed", "standard", 2**31),
        ("owner", "gram", 2**30),
        ("gram", "gram", 2**33),  # with several chunks at work
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


@pytest.mark.parametrize(
    ("name", "mode", "fraction"),
    [
        *((name, "owner", 0.0) for name in ("adamuon", "normuon", "muon_hyperball", "polargrad")),
        *(("muon", "gram", 1.0), ("adamuon", "owner", 1.0), ("mars_muon", "auto", 1.0)),
    ],
)
def test_no_relative_takes_more_nor_state_from_host_memory(fake_group, name, mode, fraction):
    engine, peak = counted_step(fake_group, mode, 2, Execution(offload_fraction=fraction), CASES[name])
    assert peak <= step_bytes(engine.plan, engine.works, engine.workspace)
    assert peak <= 2**31 + 2 * (2 * 8192 * 57344 + 2 * 8192 * 8192)
