"""The engine: several iterations in one plan, what it sums, gathers and agrees on, and how ranks end without one."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_eopt.matrices import Part, Split
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel import collectives
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.collectives import counters
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.exchange import Spread
from megatron_eopt.parallel.layout import Layout, on_one_rank
from megatron_eopt.parallel.plan_records import Bucket, Matrix, Plan
from megatron_eopt.parallel.rectangles import cut, cut_at
from megatron_eopt.parallel.schemes import SCHEMES
from tests.distributed.buckets import executed
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import counted, message_of, part_of
from tests.optimizers.field import assert_close, drawn
from tests.parallel.plans import predicted

CPU, F32 = torch.device("cpu"), torch.float32
ITERATIONS = {
    each.name: each
    for each in (
        NewtonSchulz(fp32_matmul_prec="highest"),
        NewtonSchulz(steps=8, coefficient_type="polar_express", fp32_matmul_prec="highest"),
        NewtonSchulz(coefficient_type="cubic5", fp32_matmul_prec="highest"),
    )
}
MODES = ("owner", "duplicated", "distributed", "gram", "auto")
SHAPES = [((24, 96), 1), ((96, 24), 0), ((48, 48), 1), ((8, 20), None)]
TIMEOUT = 5
"""Seconds of the groups in which a rank dies."""


def cut_evenly(shape, dim, ranks):
    return Layout(shape, cut(shape, dim, ranks), dist.group.WORLD, "tp")


# Several iterations in one plan.


def mixed(ranks):
    """Parameters of which each kind has every iteration, in an order that mixes these."""
    lying = [on_one_rank(shape) if dim is None else cut_evenly(shape, dim, ranks) for shape, dim in SHAPES]
    return [
        ParamSpec(f"{number}.{copy}.{name}", F32, layout, iteration=iteration)
        for copy in range(2)
        for number, layout in enumerate(lying)
        for name, iteration in ITERATIONS.items()
    ]


def factors_of(engine, parameters, rank, indices=None):
    indices = range(len(parameters)) if indices is None else indices
    shards = [part_of(drawn(parameters[i].layout.shape, i), parameters[i].layout.rectangle) for i in indices]
    return engine.factors(indices, shards)


def several_iterations(rank, ranks):
    """What one engine and one for each iteration make of the same parameters, and what is sent and predicted."""
    found = {}
    for mode in MODES:
        parameters = mixed(ranks)
        engine = Engine(parameters, CPU, mode)
        engine.prepare()
        counters.reset()
        together = factors_of(engine, parameters, rank)
        sent = counted()
        expected = predicted(engine.plan, rank, engine.works)
        # the same matrices and buckets, but only those of one iteration at a time
        alone = {}
        for name in ITERATIONS:
            own = [i for i, parameter in enumerate(parameters) if parameter.iteration.name == name]
            alone |= dict(zip(own, factors_of(engine, parameters, rank, own), strict=True))
        found[mode] = together, [alone[i] for i in range(len(parameters))], sent, expected, engine.explain()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_iterations_are_one_plan(ranks):
    parameters = [(name, shape) for _ in range(2) for shape in SHAPES for name in ITERATIONS]
    for rank, found in enumerate(run_ranks(several_iterations, ranks)):
        for mode, (together, alone, sent, by_the_plan, table) in found.items():
            assert sent == by_the_plan, mode
            for i, (actual, by_itself, (name, (shape, dim))) in enumerate(
                zip(together, alone, parameters, strict=True)
            ):
                assert torch.equal(actual, by_itself), (mode, i)
                expected = ITERATIONS[name](drawn(shape, i))
                expected = expected if dim is None else part_of(expected, cut(shape, dim, ranks)[rank])
                # as in test_schemes: with polar_express the Gram form is itself 1e-5 from the polynomial
                assert_close(actual, expected, 3e-5, (mode, i))
            for name in ITERATIONS:
                assert f"{name}, " in table


def waits_and_starts(rank, ranks):
    """What happens in which order in a plan of a bucket for each of three iterations."""
    events, count, wait = [], counters.count, collectives.Pending.wait

    def waits(pending):
        events.append("wait")
        return wait(pending)

    matrices = [Matrix(str(i), (24, 96), cut((24, 96), 1, ranks), iteration=name) for i, name in enumerate(ITERATIONS)]
    plan = Plan(tuple(matrices), tuple(Bucket((i,), "owner", (0,)) for i in range(3)))
    shards = [torch.ones(24, 96 // ranks) for _ in matrices]
    counters.count = lambda name, sent: (events.append("start"), count(name, sent))
    collectives.Pending.wait = waits
    try:
        executed(plan, shards, {"tp": dist.group.WORLD}, ITERATIONS)
    finally:
        counters.count, collectives.Pending.wait = count, wait
    return events


def test_exchanges_of_several_iterations_overlap(of_two):
    for events in of_two[waits_and_starts.__name__]:
        at_once = [events[:i].count("start") - events[:i].count("wait") for i in range(len(events) + 1)]
        assert events.count("start") == events.count("wait") == 6
        assert events[:2] == ["start", "start"]  # of two iterations, before either is computed
        assert at_once[-1] == 0
        assert min(at_once[1:-1]) >= 1  # something is on its way from the first exchange to the last


# Sums, whole matrices, agreement.


def finished(generator):
    """How often a generator yields, and what it returns."""
    for waits in range(3):
        try:
            next(generator)
        except StopIteration as stop:
            return waits, stop.value
    raise AssertionError("it waits more than twice")


def summed_and_gathered(rank, ranks):
    pair = dist.new_group([0, 1])
    other = dist.new_group([1, 2])
    groups = {"all": dist.group.WORLD, **({"pair": pair} if rank < 2 else {}), **({"other": other} if rank else {})}
    # no layout, no iteration: such an engine only agrees and sums
    names = ["all", "pair", "other", "own"]
    of_each = [{name: groups[name]} if name in groups else {} for name in names]
    engine = Engine([ParamSpec(*each, groups=own) for *each, own in zip(names, [F32] * 4, of_each, strict=True)], CPU)
    assert engine.prepare() is None
    assert engine.groups == groups
    assert (engine.plan, engine.matrices, engine.works) == (Plan((), ()), [()] * 4, {})
    assert [engine.shares(i) for i in range(4)] == [True, rank < 2, rank > 0, False]
    counters.reset()
    agreed = engine.agree(torch.tensor(3 + rank, dtype=torch.int32), [True] * 4)
    assert agreed == 3
    assert counters.calls == {"agree": len(groups)}
    # of gradients that only some ranks have
    assert engine.agree(torch.tensor(1, dtype=torch.int32), [rank == 0, True, True, True]) == -1
    assert engine.agree(torch.tensor(1, dtype=torch.int32), [True, True, True, rank == 0]) == 1  # shared by nobody

    counters.reset()
    tensors = [torch.full((2, 3), 1.0 + rank), torch.tensor(10.0 * rank), torch.arange(2.0) + rank, torch.ones(4)]
    tensors += [torch.full((1, 2), rank, dtype=torch.float64), torch.empty(0)]
    labels = ["all", "pair" if rank < 2 else "", "all", "", "all", "all"]
    sums = engine.sums(tensors, labels)
    assert torch.equal(sums[0], torch.full((2, 3), 6.0))
    assert sums[1].item() == (10.0 if rank < 2 else 20.0)
    assert sums[1].shape == ()
    assert torch.equal(sums[2], torch.tensor([3.0, 6.0]))
    assert sums[3] is tensors[3]
    assert torch.equal(sums[4], torch.full((1, 2), 3.0, dtype=torch.float64))
    assert sums[5].shape == (0,)
    # one exchange for each group and dtype
    assert counters.calls == {"all_reduce": 3 if rank < 2 else 2}
    assert engine.sums([], []) == []

    # whole matrices of unequal shards, several stacks in one exchange, and back: to all ranks, and to one each
    uneven = [((7, 5), 0, [0, 4, 4, 7]), ((4, 6), 1, [0, 1, 3, 6])]
    layouts = [Layout(shape, cut_at(shape, *cut), dist.group.WORLD, "tp") for shape, *cut in uneven]
    engine = Engine([ParamSpec(str(each.shape), F32, each) for each in layouts], CPU)
    matrices = [of_parameter[0] for of_parameter in engine.matrices]
    whole = [torch.stack([drawn(m.shape, 10 * i + n) for n in range(3 + i)]) for i, m in enumerate(matrices)]
    shards = [
        torch.stack([part_of(x, m.rectangles[rank]) for x in stack]) for stack, m in zip(whole, matrices, strict=True)
    ]
    for numbers, collective in (([(), ()], "all_gather"), ([[0, 3, 0], [2, 1, 1]], "all_to_all")):
        counters.reset()
        spread, alone = [*map(Spread, matrices, numbers), None], torch.tensor([[10.0 * rank]])
        waits, gathered = finished(engine.gather_whole([*([x] for x in shards), [alone]], spread))
        own = [stack.split(of)[rank] if of else stack for stack, of in zip(whole, numbers, strict=True)]
        for (found,), expected in zip(gathered, [*own, alone], strict=True):
            assert torch.equal(found, expected)
        waits_back, back = finished(engine.scatter_back(gathered, spread))
        for (found,), expected in zip(back, [*shards, alone], strict=True):
            assert torch.equal(found, expected)
            assert bool(numbers[0]) or found is alone or found._base is not None
        assert (waits, waits_back) == (1, 1)
        # where nothing is exchanged nothing is waited for
        assert finished(engine.gather_whole([[alone]], [None])) == (0, [[alone]])
        assert finished(engine.scatter_back([[], []], spread[:2])) == (0, [[], []])
        assert counters.calls == {collective: 2 if numbers[0] else 1}
    # fp32: what others compute goes there, a shard each, and from here the others' shards of what is computed here
    there, back = 0, 0
    for matrix, of_rank, stack in zip(matrices, own, whole, strict=True):
        here = matrix.rectangles[rank].numel
        there += (len(stack) - len(of_rank)) * here
        back += len(of_rank) * (matrix.shape[0] * matrix.shape[1] - here)
    assert counters.bytes == {"all_to_all": 4 * (there + back)}
    return True


def test_sums_whole_matrices_and_agreement():
    assert all(run_ranks(summed_and_gathered, 3))


def with_and_without_layout(rank, ranks):
    """Parameters of both kinds in one engine: indices are those of all parameters."""
    group = dist.group.WORLD
    iteration = NewtonSchulz(fp32_matmul_prec="highest")
    fused = ParamSpec("fused", F32, cut_evenly((8, 30), 1, ranks), Split((Part("a", 3), Part("b", 5))), iteration)
    vector = ParamSpec("vector", F32, groups={"tp": group})
    own = ParamSpec("own", F32)
    plain = ParamSpec("plain", F32, cut_evenly((8, 30), 1, ranks), iteration=iteration)
    engine = Engine([vector, fused, own, plain], CPU, "owner")
    engine.prepare()
    assert [len(matrices) for matrices in engine.matrices] == [0, 2, 0, 1]
    assert [matrix.shape for matrix in engine.flat([1, 3])] == [(3, 30), (5, 30), (8, 30)]
    assert [engine.shares(i) for i in range(4)] == [True, True, False, True]
    x = drawn((8, 30), 0)
    shard = part_of(x, fused.layout.rectangle)
    assert torch.equal(engine.merge([1], engine.split([1], [shard]))[0], shard)
    shards = engine.split([1, 3], [shard, shard])
    assert [len(each) for each in shards] == [3, 5, 8]
    assert all(map(torch.equal, engine.merge([1, 3], shards), [shard, shard]))
    expected = [iteration(x[:3]), iteration(x[3:]), iteration(x)]
    for actual, of_whole in zip(engine.factors([1, 3], shards), expected, strict=True):
        of_rank = of_whole[:, fused.layout.rectangle.left : fused.layout.rectangle.right]
        torch.testing.assert_close(actual, of_rank, rtol=1e-5, atol=1e-5)
    return True


def test_parameters_with_and_without_layout_are_one_engine(of_two):
    assert all(of_two[with_and_without_layout.__name__])


def blockwise(rank, ranks):
    """Shards of different shapes, of matrices of one shape."""
    iteration = NewtonSchulz(fp32_matmul_prec="highest")
    layouts = [cut_evenly((40, 40), dim, ranks) for dim in (0, 1)]
    parameters = [ParamSpec(str(i), F32, layout, iteration=iteration) for i, layout in enumerate(layouts)]
    engine = Engine(parameters, CPU, "blockwise")
    engine.prepare()
    shards = [part_of(drawn((40, 40), 0), layout.rectangle) for layout in layouts]
    expected = [iteration(shard) for shard in shards]
    return all(map(torch.equal, engine.factors([0, 1], shards), expected))


def test_each_shard_gets_the_iteration_of_its_shape(of_two):
    assert all(of_two[blockwise.__name__])


def differing(rank, ranks):
    """What is said where ranks have other settings, iterations or names, of matrices and of what has no layout."""
    layout, iterations = cut_evenly((24, 96), 1, ranks), list(ITERATIONS.values())
    messages = []
    for of_rank in (
        [("a", iterations[rank], {}), ("b", iterations[rank], {})],
        [("a", iterations[0], {"lr": 0.1}), ("b", iterations[0], {"lr": 0.1, "betas": (0.9, 0.5 + rank)})],
        [("a", iterations[0], {}), ("bc"[rank], iterations[0], {})],
        [("a", None, {"lr": 0.1}), ("b", None, {"lr": 0.1, "eps": 1e-8} if rank else {"lr": 0.1})],
        [("a", None, {}), ("bc"[rank], None, {})],
    ):
        parameters = [
            ParamSpec(name, F32, layout if i else None, iteration=i, settings=each, groups={"tp": dist.group.WORLD})
            for name, i, each in of_rank
        ]
        engine = Engine(parameters, CPU, "owner")
        messages.append(message_of(lambda engine=engine: engine.prepare()))
    return messages


def test_ranks_that_differ_are_refused(of_two):
    one, two, _ = ITERATIONS
    for messages in of_two[differing.__name__]:
        iteration, settings, name, elementwise, other = messages
        assert f"the iteration of 'a' is {one!r} on rank 0 and {two!r} on rank 1" in iteration
        assert "betas of 'b' is (0.9, 0.5) on rank 0 and (0.9, 1.5) on rank 1" in settings
        assert "parameter 1 is 'b' on rank 0 and 'c' on rank 1" in name
        assert "eps of 'b' is 'missing' on rank 0 and 1e-08 on rank 1" in elementwise
        assert "parameter 1 is 'b' on rank 0 and 'c' on rank 1" in other
        assert all("the optimizer's plan differs between ranks of group 'tp': " in each for each in messages)


def on_two(rank, ranks):
    several = (waits_and_starts, with_and_without_layout, blockwise, differing)
    return {each.__name__: each(rank, ranks) for each in several}


@pytest.fixture(scope="module")
def of_two():
    """What two ranks found, by function."""
    first, second = run_ranks(on_two, 2)
    return {name: (found, second[name]) for name, found in first.items()}


# A rank that is gone.


def stopping(rank, ranks, folder, scheme):
    """Three buckets, twice; the last rank is gone when it goes on with the second one, in the middle of the step."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT))
    matrix, run = Matrix("a", (32, 96), cut((32, 96), 1, ranks)), SCHEMES[scheme]
    plan = Plan((matrix,) * 6, tuple(Bucket((2 * index, 2 * index + 1), scheme, (1, 2)) for index in range(3)))
    shards = [torch.randn(matrix.rectangles[rank].shape) for _ in plan.matrices]

    def leaving(job, shards):
        running = run(job, shards)
        next(running)
        yield
        if rank == ranks - 1 and job.bucket == plan.buckets[1]:
            os._exit(0)
        return (yield from running)

    SCHEMES[scheme] = leaving
    start = time.monotonic()
    try:
        # what the others still needed of the first step may have been sent before; of the second nothing was
        for _ in range(2):
            executed(plan, shards, {"tp": dist.group.WORLD}, NewtonSchulz())
    except RuntimeError:
        (folder / f"{rank}").write_text(str(time.monotonic() - start))
        raise


@pytest.mark.parametrize("scheme", ["owner", "duplicated", "distributed", "gram_replicated", "gram_split"])
def test_a_rank_that_is_gone_ends_the_others(tmp_path, scheme):
    ranks = 3
    context = mp.get_context("forkserver")
    processes = [context.Process(target=stopping, args=(rank, ranks, tmp_path, scheme)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(60)
        *others, gone = [process.exitcode for process in processes]
        assert gone == 0
        assert all(others)  # neither None, which is a process that runs, nor 0
    finally:
        for process in processes:
            process.kill()
    for rank in range(ranks - 1):
        assert float((tmp_path / f"{rank}").read_text()) < TIMEOUT + 2
