"""Distributed Muon as its users write it: DDP scripts, each rank with the momenta of its own matrices."""

import copy
import logging
from logging.handlers import BufferingHandler

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from megatron_eopt import DistributedMuon
from megatron_eopt.optimizers import distributed_muon
from megatron_eopt.parallel.collectives import counters
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import message_of
from tests.plain.made import SIMPLE, gradients, muon_reference, parameters, run, values

SHAPES = [(8, 6)] * 5 + [(4, 12)] * 2 + [(9, 3)] + [(3, 2, 2)]
STEPS = 4


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(**settings):
    params = parameters(*SHAPES)
    return params, DistributedMuon(params, **settings)


def train(params, optimizer, first=0, end=STEPS):
    run(optimizer, params, gradients(params, STEPS)[first:end])
    return values(params)


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.8, "nesterov": False, "weight_decay": 0.5}, {"lr": 0.1, "ns_steps": 3}]
)
def test_one_process_steps_as_the_original(settings):
    params = parameters(*SHAPES, dtype=torch.float64)
    starts, steps = values(params), gradients(params, STEPS)
    run(DistributedMuon(params, **settings, fp32_matmul_prec="highest"), params, steps)
    given = {"lr": 0.02, "momentum": 0.95, "nesterov": True, **settings}
    coefficients = SIMPLE[: given.pop("ns_steps", 5)]
    for p, start, own in zip(params, starts, zip(*steps, strict=True), strict=True):
        expected = muon_reference(start, own, **given, coefficients=coefficients)
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-6)


def on_ranks(rank, world_size, settings):
    params = parameters(*SHAPES)
    optimizer = DistributedMuon(params, 0.02, 0.95, True, 5, **settings)
    results = train(params, optimizer)
    untouched = all(torch.equal(p.grad, g) for p, g in zip(params, gradients(params, STEPS)[-1], strict=True))
    momenta = {i: optimizer.state[p]["momentum_buffer"] for i, p in enumerate(params) if optimizer.state[p]}
    return results, momenta, untouched


@pytest.mark.parametrize(("world_size", "settings"), [(2, {"fp32_matmul_prec": "highest"}), (3, {})])
def test_ranks_step_as_one_process_and_share_the_momenta(world_size, settings):
    params, alone = made(**settings)
    expected = train(params, alone)
    kept = {}
    for results, momenta, untouched in run_ranks(on_ranks, world_size, settings):
        assert all(map(torch.equal, results, expected))
        assert untouched
        assert not kept.keys() & momenta.keys()
        kept |= momenta
    for index, momentum in kept.items():
        assert torch.equal(momentum, alone.state[params[index]]["momentum_buffer"])
    assert sorted(kept) == list(range(len(SHAPES)))


@given(
    ranks=st.integers(1, 9), shapes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=25)
)
def test_no_rank_has_more_than_its_share_and_one_matrix(ranks, shapes):
    params = [nn.Parameter(torch.empty(shape)) for shape in shapes]
    found = DistributedMuon(params, process_group=dist.ProcessGroup(0, ranks)).compute_ranks
    assert list(found) == [p for p in params if p.numel()]
    loads = [0] * ranks
    for p, rank in found.items():
        loads[rank] += p.numel()
    sizes = [p.numel() for p in params]
    assert max(loads) <= sum(sizes) / ranks + max(sizes)


def watched(rank, world_size, shapes):
    events = []

    def watch(name, function):
        def call(*args):
            events.append(name)
            pending = function(*args)
            wait, pending.wait = pending.wait, lambda: (events.append("wait"), wait())[1]
            return pending

        return call

    distributed_muon.all_gather = watch("send", distributed_muon.all_gather)
    iterate = distributed_muon.newton_schulz
    distributed_muon.newton_schulz = lambda *args, **kwargs: (events.append("compute"), iterate(*args, **kwargs))[1]
    params = parameters(*shapes * 3)
    optimizer = DistributedMuon(params)
    counters.reset()
    run(optimizer, params, gradients(params, 1))
    return events, dict(counters.calls), dict(counters.bytes)


def test_factors_travel_in_bf16_while_the_next_are_computed():
    for events, calls, sent in run_ranks(watched, 2, [(8, 6), (6, 8)]):
        assert events == ["compute", "send", "compute", "send", "wait", "compute", "send", "wait", "wait"]
        assert calls == {"agree": calls["agree"], "all_gather": 3}
        assert sent["all_gather"] == 3 * 8 * 6 * 2


def saved(rank, world_size, steps):
    params, optimizer = made()
    for number, p in enumerate(params):
        optimizer.state[p]["mine"] = torch.full((1,), float(number))
    on_all = train(params, optimizer, end=steps)
    optimizer.consolidate_state_dict()
    if rank:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
    state = copy.deepcopy(optimizer.state_dict()) if rank == 0 else None
    optimizer.consolidate_state_dict(to=None)
    assert len(optimizer.state_dict()["state"]) == len(SHAPES)
    train(params, optimizer, steps)
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):  # a step has been made since
        optimizer.state_dict()
    return state, on_all


def speedrun(rank, collective, lines):
    """A script as its users write it: the master alone saves, at the end. ``lines`` are what the warning asks for."""
    logging.getLogger("megatron_eopt").addHandler(logged := BufferingHandler(9))
    params, optimizer = made(collective_state_dict=collective)
    logging.getLogger("megatron_eopt").removeHandler(logged)
    messages = [record.getMessage() for record in logged.buffer if record.levelno == logging.WARNING]
    train(params, optimizer)
    if lines == "consolidate":
        optimizer.consolidate_state_dict()
    if lines == "on all" or rank == 0:
        try:
            return messages, sorted(optimizer.state_dict()["state"])
        except RuntimeError as error:
            return messages, str(error)
    return messages, None


def speedruns(rank, world_size):
    cases = [(None, None), (None, "consolidate"), (False, "consolidate"), (True, "on all")]
    return [speedrun(rank, *case) for case in cases]


def test_a_script_whose_master_alone_saves_is_told():
    """At its start."""
    first, second = run_ranks(speedruns, 2)
    assert all(messages == [] for messages, _ in second)
    (unmodified, error), (_, consolidated), (told, same), (collective, together) = first
    [warning] = unmodified
    assert "outside of 'if rank == 0', write optimizer.consolidate_state_dict()" in warning
    assert "before state_dict(), call consolidate_state_dict() on all ranks" in error
    assert told == collective == []
    assert consolidated == same == together == list(range(len(SHAPES)))


def resumed(rank, world_size, state, values, steps):
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = DistributedMuon(params, lr=7.0)
    optimizer.load_state_dict(copy.deepcopy(state))  # torch keeps the tensors of a state, and ranks share memory
    assert [optimizer.state[p]["mine"].item() for p in params] == list(map(float, range(len(params))))
    assert sum("momentum_buffer" in state for state in optimizer.state.values()) < len(params) or world_size == 1
    return train(params, optimizer, steps)


def test_a_checkpoint_goes_on_at_another_number_of_ranks():
    expected = train(*made())
    [state, values], _ = run_ranks(saved, 2, 2)
    for results in (*run_ranks(resumed, 3, state, values, 2), resumed(0, 1, state, values, 2)):
        assert all(map(torch.equal, results, expected))


def in_torch_checkpoint(rank, world_size, folder, load):
    params = list(model := nn.ParameterList(parameters(*SHAPES)))
    optimizer = DistributedMuon(params, collective_state_dict=load or None)
    if not load:
        train(params, optimizer, end=2)
        optimizer.consolidate_state_dict(to=None)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    if not load:
        dcp.save(state, checkpoint_id=folder)
        return None
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return train(params, optimizer, 2)


def test_a_checkpoint_of_torch_goes_on_at_other_sizes(tmp_path):
    expected = train(*made())
    run_ranks(in_torch_checkpoint, 2, tmp_path, False)
    for results in run_ranks(in_torch_checkpoint, 3, tmp_path, True):
        assert all(map(torch.equal, results, expected))


def load_what_one_rank_computes(rank, world_size, saved):
    """What each rank says of a momentum that is not finite, of a matrix of the first rank."""
    params, optimizer = made()
    first = next(i for i, p in enumerate(params) if optimizer.compute_ranks[p] == 0)
    saved["state"][first]["momentum_buffer"].fill_(torch.nan)
    return message_of(lambda: optimizer.load_state_dict(saved))


def test_all_ranks_refuse_a_momentum_that_one_of_them_would_keep():
    """Else the others would wait for it in the next step."""
    params, optimizer = made()
    train(params, optimizer, end=1)
    for said in run_ranks(load_what_one_rank_computes, 2, optimizer.state_dict()):
        assert "'momentum_buffer' of parameter" in said
        assert "not finite" in said


def test_the_part_of_one_rank_is_refused():
    params, optimizer = made()
    train(params, optimizer, end=1)
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][4]
    _, fresh = made()
    with pytest.raises(ValueError, match=r"no momentum of parameter 4 .*consolidate_state_dict"):
        fresh.load_state_dict(state)
    assert not fresh.state


def without_some_gradients(rank, world_size):
    params, optimizer = made(weight_decay=0.1)
    found = [train(params, optimizer, end=1)]  # a momentum of zero would move nothing
    params[1].grad = None
    for bad in (False, rank == 1):
        if bad:
            params[3].grad[0, 0] = torch.nan
        optimizer.step()
        found.append(values(params))
    return *([*map(torch.equal, found[i], found[i + 1])] for i in (0, 1)), optimizer.skipped_steps()


def test_a_broken_gradient_leaves_all_as_it_is():
    for still, all_still, skipped in run_ranks(without_some_gradients, 2):
        assert [i for i, same in enumerate(still) if same] == [1]
        assert all(all_still)
        assert skipped == 1


def sharded():
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.tensor_model_parallel, parameter.partition_dim = True, 0
    return parameter


@pytest.mark.parametrize(
    ("error", "message", "params", "settings"),
    [
        (ValueError, "parameter 1 of group 0, of shape .4,. to another optimizer", [(4, 4), (4,)], {}),
        (ValueError, "every rank has whole", [sharded], {}),
        (TypeError, "nesterov must be True or False, got 0.1", [(4, 4)], {"nesterov": 0.1}),
    ],
)
def test_what_cannot_work_is_refused_at_construction(error, message, params, settings):
    made = [each() if callable(each) else nn.Parameter(torch.ones(each)) for each in params]
    with pytest.raises(error, match=message):
        DistributedMuon(made, **settings)
