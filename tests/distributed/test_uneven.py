"""Matrices whose shards differ from one to the next give the factors of one process, and send what was predicted."""

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.matrices import Part, Split
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.chunks import ParamSpec, subset
from megatron_eopt.parallel.collectives import counters
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout, on_one_rank
from megatron_eopt.parallel.rectangles import cut, cut_at
from megatron_eopt.parallel.workspace import Workspace
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import counted, part_of
from tests.parallel.plans import flat, predicted

CPU = torch.device("cpu")
ITERATION = NewtonSchulz(fp32_matmul_prec="highest")
IN_BF16 = NewtonSchulz(fp32_matmul_prec="medium")
# two query groups of 8 + 4 + 4 rows
QKV = Split((Part("q", 8), Part("k", 4), Part("v", 4)))
SHAPES = [(32, 12), (12, 32), (24, 24)]
MODES = ("owner", "auto", "duplicated", "gram")
SEEDS = range(4)


def lying(seed, ranks):
    """Shapes, shards and declarations of parameters: back to back in a buffer, or each cut at a place of its own."""
    draw = random.Random(seed)
    shapes = [draw.choice(SHAPES) for _ in range(draw.randint(4, 9))]
    cuts = flat(shapes, ranks)
    if seed % 2:
        dims = [0 if shape == (32, 12) else draw.choice((0, 1)) for shape in shapes]
        inner = [sorted(draw.randint(0, s[dim]) for _ in range(ranks - 1)) for s, dim in zip(shapes, dims, strict=True)]
        cuts = [cut_at(s, dim, [0, *each, s[dim]]) for s, dim, each in zip(shapes, dims, inner, strict=True)]
    found = [(shape, each, QKV if shape == (32, 12) else Split()) for shape, each in zip(shapes, cuts, strict=True)]
    # and some that are even, and that lie on one rank alone
    even = ((24, 24), cut((24, 24), 0, ranks), Split())
    return [*found, even, even, ((8, 6), None, Split())]


def parameters_of(seed, ranks, iteration, group):
    layouts = [
        (on_one_rank(shape) if rectangles is None or group is None else Layout(shape, rectangles, group, "dp"), split)
        for shape, rectangles, split in lying(seed, ranks)
    ]
    return [ParamSpec(str(i), torch.float32, layout, split, iteration) for i, (layout, split) in enumerate(layouts)]


def updates_of(seed, parameters):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(each.layout.shape, generator=generator) for each in parameters]


def factors_of(engine, updates, indices):
    """This rank's part of each parameter, by number."""
    parts = [part_of(updates[i], engine._parameters[i].layout.rectangle) for i in indices]
    factors = engine.factors(indices, engine.split(indices, parts))
    return dict(zip(indices, engine.merge(indices, factors), strict=True))


def masked(parameters):
    return [i for i in range(len(parameters)) if i % 3 != 1]


def on_ranks(rank, ranks):
    found = {}
    for seed in SEEDS:
        for mode, size, iteration in (
            *((mode, 2**31, ITERATION) for mode in MODES),
            ("owner", 2**14, ITERATION),
            ("owner", 1, ITERATION),
            ("owner", 2**31, IN_BF16),
        ):
            parameters = parameters_of(seed, ranks, iteration, dist.group.WORLD)
            engine = Engine(parameters, CPU, mode, workspace=Workspace(bytes=size))
            engine.prepare()
            updates = updates_of(seed, parameters)
            results = []
            for indices in (list(range(len(parameters))), masked(parameters)):
                counters.reset()
                factors = factors_of(engine, updates, indices)
                sent = counted()
                numbers = [m for m, i in enumerate(engine._compiler.parameter_of) if i in indices]
                kept = replace(engine.plan, buckets=tuple(subset(engine.plan, numbers)))
                expected = predicted(kept, rank, engine.works)
                results.append((factors, sent, expected))
            chunks = 1 + max(bucket.chunk for bucket in engine.plan.buckets)
            found[seed, mode, size, iteration.name] = results, chunks
    return found


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.wide) for ranks in (3, 4))])
def test_factors_are_those_of_one_process(ranks):
    empty = [cuts for seed in SEEDS for _, cuts, _ in lying(seed, ranks) if cuts and any(not x.numel for x in cuts)]
    assert len(empty) >= 8
    of_ranks, chunked = run_ranks(on_ranks, ranks), set()
    for seed, mode, size, name in of_ranks[0]:
        iteration = IN_BF16 if name == IN_BF16.name else ITERATION
        parameters = parameters_of(seed, ranks, iteration, None)
        engine = Engine(parameters, CPU)
        engine.prepare()
        updates, layouts = updates_of(seed, parameters), [each for _, each, _ in lying(seed, ranks)]
        whole = factors_of(engine, updates, range(len(parameters)))
        for rank, found in enumerate(of_ranks):
            results, chunks = found[seed, mode, size, name]
            chunked.add((size, chunks > 1))
            for factors, sent, expected in results:
                assert sent == expected, (seed, mode, size, rank)
                if mode == "owner":
                    assert set(sent) == {"all_to_all"}
                for i, factor in factors.items():
                    own = whole[i] if layouts[i] is None else part_of(whole[i], layouts[i][rank])
                    assert (factor.shape, factor.is_contiguous()) == (own.shape, True)
                    bound = 2e-2 if iteration is IN_BF16 else 1e-5
                    assert own.numel() == 0 or (factor - own).norm() <= bound * whole[i].norm(), (seed, mode, size, i)
    assert {(2**31, False), (1, True)} <= chunked
