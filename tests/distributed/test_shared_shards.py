"""Muon at TP=2 and DP=2: what tensor parallelism cuts is shared over data parallelism, too; steps as on one rank."""

from dataclasses import replace

from tests.distributed.layouts import CASES, PROGRAMS, Grid, assert_as_one, found, trained
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import is_cut
from tests.parallel.plans import predicted

# sums of fp64 are priced as those of fp32
GRID, MUON = Grid(2), replace(PROGRAMS["muon in fp32"], without=("of another dtype",))
MODES, OTHERS = ("owner", "auto", "distributed"), ("dion", "hold, normuon")


def on_a_grid(rank, ranks):
    results, exchanged = {}, {}
    for mode in MODES:
        optimizer, parameters, sent = trained(MUON, GRID, rank, tp_mode=mode)
        results[mode] = found(optimizer, parameters, GRID, rank)
        sent.pop("agree")
        exchanged[mode] = sent, by_the_plan(optimizer.prepare())
        if mode == "owner":
            plan = optimizer.prepare().plan
            owned = sum(b.compute_ranks.count(rank) for b in plan.buckets if plan.one_of(b).ranks == ranks)
    # what is summed over sides, and norms, count one of several copies
    for key in OTHERS:
        results[key] = found(*trained(PROGRAMS[key], GRID, rank, tp_mode="owner")[:2], GRID, rank)
    return results, exchanged, owned


def by_the_plan(engine):
    """Collective -> calls and bytes of a step."""
    found = {}
    for label, group in engine.groups.items():
        buckets = tuple(b for b in engine.plan.buckets if engine.plan.one_of(b).group == label)
        plan = type(engine.plan)(engine.plan.matrices, buckets)
        for name, figures in predicted(plan, group.rank(), engine.works).items():
            found[name] = tuple(map(sum, zip(found.get(name, (0, 0)), figures, strict=True)))
    return found


def test_shards_are_shared_over_data_parallel_ranks():
    ranks, alone = run_ranks(on_a_grid, 4), trained(MUON)
    for mode in MODES:
        assert_as_one(MUON, GRID, [of_rank[0][mode] for of_rank in ranks], alone, mode)
    for key in OTHERS:
        assert_as_one(PROGRAMS[key], GRID, [of_rank[0][key] for of_rank in ranks], trained(PROGRAMS[key]), key)
    for _, exchanged, _ in ranks:
        for sent, expected in exchanged.values():
            assert sent == expected
    # within tensor parallelism each rank would compute half of what is cut
    optimizer, parameters, _ = alone
    cut = [p for name, p in parameters.items() if is_cut(CASES[name][1]) and "expert_tp" not in CASES[name][1]]
    owned = [of_rank[-1] for of_rank in ranks]
    assert sum(owned) == sum(len(optimizer.matrix_layouts(p)) for p in cut)
    assert max(owned) <= sum(owned) / 3
