"""The steps of every optimizer on several ranks are those of one rank, however parameters lie over them."""

import functools

import pytest
import torch
import torch.distributed as dist

from megatron_eopt import MuonHyperball, TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS
from tests.distributed.layouts import (
    BAD,
    LAYOUTS,
    PROGRAMS,
    STEPS,
    Copies,
    DTensors,
    Grid,
    Stacks,
    TensorParallel,
    assert_as_one,
    found,
    on_one_rank,
    trained,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import groups_of, marked, message_of, shard
from tests.optimizers.family import ELEMENTWISE, build
from tests.optimizers.on_gpu import masking


def modes_of(program, layout):
    if program.takes("tp_mode") and isinstance(layout, Stacks):
        return [{"tp_mode": "duplicated"}, {"tp_mode": "auto"}]
    if not program.takes("tp_mode") or isinstance(layout, DTensors):
        return [{}]
    # shards are shared over copies by owner
    return [{"tp_mode": mode} for mode in (program.modes if type(layout) is TensorParallel else ("owner",))]


# The first program of each optimizer, and of each of its second moments.
FIRST = {(each.name, each.settings.get("moment2_method")): key for key, each in reversed(PROGRAMS.items())}.values()


def tried(keys, ranks, every):
    """Layouts and the programs that are tried on them: (layout, its name, program, its key).

    Without ``every``, those that differ from one of ``FIRST`` by settings are tried on plain shards alone.
    """
    for name, layout in LAYOUTS[ranks].items():
        for key in keys:
            program = PROGRAMS[key]
            shares = program.takes("data_parallel_group") or program.takes("share_over_dp")
            serves = name not in program.without and (shares or not isinstance(layout, Copies | Grid))
            if serves and (every or type(layout) is TensorParallel or key in FIRST):
                yield layout, name, program, key


def on_all(rank, ranks, every, keys):
    return {
        (name, key): [ran(program, layout, rank, **mode) for mode in modes_of(program, layout)]
        for layout, name, program, key in tried(keys, ranks, every)
    }


def ran(program, layout, rank, **mode):
    """What a rank found, what its last step called, what it counted, and whether a stopped run went on as this one."""
    optimizer, parameters, calls = trained(program, layout, rank, **mode)
    results = found(optimizer, parameters, layout, rank)
    counts = optimizer.skipped_steps(), optimizer.matrices_updated
    same = True
    if type(layout) is TensorParallel and mode.get("tp_mode") in (None, program.modes[0]):
        first, begun, _ = trained(program, layout, rank, range(2), **mode)
        start = first.state_dict(), {name: p.detach() for name, p in begun.items()}
        again = found(*trained(program, layout, rank, range(2, STEPS), start, **mode)[:2], layout, rank)
        same = all(torch.equal(x.x, again[name][key].x) for name, of in results.items() for key, x in of.items())
    return results, {name: number for name, (number, _) in calls.items()}, counts, same


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, True), id="2"),
        pytest.param((4, False), id="4", marks=pytest.mark.wide),
        pytest.param((4, True), id="4, every program", marks=pytest.mark.full),
    ],
)
def results(request, selected):
    return request.param, run_ranks(on_all, *request.param, selected("key"))


@functools.cache
def alone(key, kind):
    """The steps of a program on one rank, of the cases of a kind of layout."""
    return on_one_rank(PROGRAMS[key], kind)


@pytest.mark.parametrize("key", PROGRAMS)
def test_update_equals_that_of_one_rank(results, key):
    which, of_ranks = results
    for layout, name, program, _ in tried([key], *which):
        of_one = alone(key, type(layout))
        skipped = int(any(each in layout.cases for each in BAD))
        assert of_one[0].skipped_steps() == skipped
        for number, mode in enumerate(modes_of(program, layout)):
            of_mode = [of_rank[name, key][number] for of_rank in of_ranks]
            assert_as_one(program, layout, [found for found, *_ in of_mode], of_one, (name, mode))
            for _, calls, counts, same in of_mode:
                assert counts == (skipped, of_one[0].matrices_updated)
                assert same
                if name == "TP=2" and number == 0:
                    of_schemes = ("agree", "all_to_all", "all_gather") if mode else ("agree",)
                    assert {each: n for each, n in calls.items() if each not in of_schemes} == program.calls


# What ranks do where gradients, weights or settings differ between them.


def missing(name):
    """What is said where rank 0 alone has no gradient of the first of two shards, and whether the other one moved."""
    parameters = [shard(torch.eye(6)) for _ in range(2)]
    optimizer = build(name, list(zip("ab", parameters, strict=True)), pg_collection=groups_of())
    for p in parameters:
        p.grad = torch.ones(6, 6) + torch.eye(6)
    if dist.get_rank() == 0:
        parameters[0].grad = None
    return message_of(optimizer.step, RuntimeError), torch.equal(parameters[1], torch.eye(6))


def missing_as_on_a_gpu(rank):
    """A step in which rank 0 has no gradient of ``a``, and neither has ``b`` on any: skipped, and read later."""
    parameters = [shard(torch.eye(6)) for _ in range(3)]
    for p in parameters:
        p.grad = torch.ones(6, 6) + torch.eye(6)
    optimizer = TensorParallelMuon(list(zip("abc", parameters, strict=True)), pg_collection=groups_of())
    optimizer.step()
    masking(optimizer)._session.nonfinite._report = lambda *args: None
    parameters[0].grad = None if rank == 0 else parameters[0].grad
    parameters[1].grad = None
    before = [x.detach().clone() for p in parameters for x in (p, optimizer.state[p]["momentum_buffer"])]
    optimizer.step()
    after = [x.detach() for p in parameters for x in (p, optimizer.state[p]["momentum_buffer"])]
    return list(map(torch.equal, before, after))


def zero(rank):
    """What is said of a matrix that is zero on both ranks, and whether one that is zero on one of them moved."""
    p, half = shard(torch.zeros(6, 4)), shard(torch.full((6, 4), float(rank)))
    optimizer = MuonHyperball([half, p], lr=0.05, pg_collection=groups_of())
    half.grad, p.grad = torch.ones(6, 4), torch.ones(6, 4)
    return message_of(optimizer.step), torch.equal(half, torch.full((6, 4), float(rank)))


def skipping(rank, name):
    """Whether all stays in a step with a bad gradient on rank 1: of an expert, of a shard; and what is counted."""
    found = []
    for as_on_a_gpu in (False, True):
        for bad in ("expert", "shard"):
            whole, expert = (torch.nn.Parameter(torch.eye(6)) for _ in range(2))
            expert.allreduce = False
            parameters = {"whole": whole, "shard": shard(torch.eye(6)), "expert": expert}
            groups = groups_of()
            groups.tp_dp_cp = dist.group.WORLD
            optimizer = build(name, list(parameters.items()), pg_collection=groups)
            if as_on_a_gpu:
                masking(optimizer)
            for step in range(3):
                for number, p in enumerate(parameters.values()):
                    generator = torch.Generator().manual_seed(10 * step + number)
                    p.grad = torch.randn(6, 6, generator=generator)
                if step == 1 and rank == 1:
                    parameters[bad].grad[2, 1] = torch.nan
                before = [x.clone() for p in parameters.values() for x in (p, *optimizer.state[p].values())]
                optimizer.step()
                after = [x for p in parameters.values() for x in (p, *optimizer.state[p].values())]
                if step:
                    found.append(all(map(torch.equal, before, after)))
            found.append(optimizer.skipped_steps())
    return found


def differing(rank, ranks, names):
    said = {name: (*missing(name), without_group(name)) for name in names}
    skipped = {name: skipping(rank, name) for name in names}
    return said, missing_as_on_a_gpu(rank), zero(rank), skipped, of_users()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_ranks_skip_a_step_with_a_bad_gradient_on_one(differ, name):
    assert [skipped[name] for *_, skipped, _ in differ] == [[True, False, 1] * 4] * 2


def without_group(name):
    return message_of(lambda: build(name, [marked(torch.ones(4, 3), partition_dim=0)]))


@pytest.fixture(scope="module")
def differ(selected):
    return run_ranks(differing, 2, selected("name"))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_or_a_group_that_ranks_lack_is_an_error(differ, name):
    for of_names, *_ in differ:
        message, untouched, alone = of_names[name]
        assert "a gradient on some of the ranks that share it, none on others; here " in message
        assert untouched
        if name in ELEMENTWISE:
            assert alone is None
        else:
            assert "of shape (4, 3) is marked as sharded, but no process group completes it" in alone


def test_on_a_gpu_ranks_that_lack_a_gradient_skip_together(differ):
    assert [same for _, same, *_ in differ] == [[True] * 6] * 2


def test_a_norm_is_that_of_all_shards_and_zero_is_refused(differ):
    for _, _, (message, untouched), *_ in differ:
        assert "parameter 1 of group 0, of shape (6, 4) is 0: initialize it" in message
        assert untouched


@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if row.takes("tp_mode")])
def test_blockwise_is_refused_where_norms_would_be_of_shards(name):
    message = message_of(lambda: build(name, [shard(torch.ones(4, 3))], tp_mode="blockwise"))
    if name in ("muon", "scion"):
        assert message is None
    else:
        assert "blockwise" in message
        assert "of shards" in message


class Fails(TensorParallelMuon):
    """A user's function that returns NaN for the first parameter on rank 1 alone."""

    def orthogonalize(self, p, grad):
        return grad * (torch.nan if dist.get_rank() == 1 and p is self.param_groups[0]["params"][0] else 1)


def of_users():
    """Which weights stay, whether the momentum moves, and what is counted."""
    p, q = shard(torch.ones(4, 6)), torch.nn.Parameter(torch.ones(4, 6))
    optimizer = Fails([("a", p), ("b", q)], lr=0.1, weight_decay=0.0, pg_collection=groups_of())
    p.grad, q.grad = torch.ones(4, 6), torch.ones(4, 6)
    optimizer.step()
    kept = [bool(x.eq(1).all()) for x in (p, q)]
    return kept, bool(optimizer.state[p]["momentum_buffer"].any()), optimizer.skipped_steps()


def test_a_users_update_that_is_not_finite_is_zero_on_all_ranks(differ):
    assert [found for *_, found in differ] == [([True, True], True, 1)] * 2
