"""Plans: what they promise for any matrices, the scheme of each kind, parts of buckets, and comparison of plans."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.parallel.agreement import described_plan, differences
from megatron_eopt.parallel.cost import bucket_traffic, cube_flops, plan_cost, whole_flops
from megatron_eopt.parallel.plan import REPLICATED_ROWS, SHARED_PARTS, SMALL_ENTRIES, make_plan
from megatron_eopt.parallel.plan_records import Bucket, Matrix
from megatron_eopt.parallel.rectangles import Rectangle, cut_at, cut_dimension, whole
from megatron_eopt.parallel.workspace import DEFAULT_WORKSPACE, chunk_bytes
from tests.parallel.plans import MODES, STANDARD, STANDARDS, WORK, WORKS, matrices, modes, quarters, some, works

OWNED = ("owner", "gram_split", "share")
IDLE = ("local", "blockwise")


def summary(plan):
    """Scheme and number of each kind of matrix, whatever they are called."""
    found = Counter()
    for bucket in plan.buckets:
        found.update((replace(plan.matrices[i], name=""), bucket.scheme) for i in bucket.matrices)
    return found


def schemes(plan):
    return [(bucket.scheme, len(bucket.matrices)) for bucket in plan.buckets]


@given(matrices(), modes, works)
def test_what_a_plan_promises_for_any_matrices(given_matrices, mode, work):
    plan = make_plan(given_matrices, mode, work)
    assert plan.matrices == tuple(given_matrices)
    assert sorted(i for bucket in plan.buckets for i in bucket.matrices) == list(range(len(given_matrices)))
    order = [(bucket.chunk, bucket.scheme in IDLE) for bucket in plan.buckets]
    assert order == sorted(order)  # what exchanges comes first
    for bucket in plan.buckets:
        assert_one_kind(plan, bucket, mode)
        assert_scheme_serves(plan, bucket, mode, work)
    assert_balanced(plan, work)


def assert_one_kind(plan, bucket, mode):
    first = plan.one_of(bucket)
    assert list(bucket.matrices) == sorted(bucket.matrices)
    stays = first.holder is not None and mode in ("duplicated", "distributed", "gram")
    together = stays or (mode in ("auto", "owner") and first.uneven)
    kinds = {replace(plan.matrices[i], name="") for i in bucket.matrices}
    assert len({replace(kind, rectangles=()) if together else kind for kind in kinds}) == 1
    assert len(kinds) == 1 or bucket.scheme in ("owner", "local")
    in_place = bucket.scheme == "local" and first.sharded
    if in_place:
        assert mode == "auto" or stays or 0 in first.shape
        assert list(bucket.compute_ranks) == [plan.matrices[i].holder for i in bucket.matrices if 0 not in first.shape]
    else:
        assert len(bucket.compute_ranks) == (len(bucket.matrices) if bucket.scheme in OWNED else 0)
    assert set(bucket.compute_ranks) <= set(range(first.ranks))


def assert_scheme_serves(plan, bucket, mode, work):
    first = plan.one_of(bucket)
    cut = cut_dimension(first.shape, first.rectangles)
    along_long_side = cut is not None and first.shape[cut] == max(first.shape)
    if first.ranks == 1 or 0 in first.shape:
        assert bucket.scheme == "local"
    elif all(rectangle == whole(first.shape) for rectangle in first.rectangles):
        assert bucket.scheme == ("share" if first.group == "dp" else "local")
    elif bucket.scheme.startswith("gram"):
        assert mode in ("gram", "auto")
        assert work[first.iteration].settings.restarts is not None
        assert along_long_side
    elif bucket.scheme == "local":
        assert all(plan.matrices[i].holder is not None for i in bucket.matrices)
        assert mode not in ("owner", "blockwise")
    elif mode != "auto":
        assert first.holder is None or mode in ("owner", "blockwise")
        assert bucket.scheme in (mode, "owner")
        assert bucket.scheme == mode or mode == "gram" or not along_long_side
        assert bucket.scheme != "distributed" or along_long_side


def assert_balanced(plan, work):
    """Two ranks differ by one matrix at most, of each bucket and in all."""
    load, largest, uneven = {}, Counter(), set()
    for bucket in plan.buckets:
        first = plan.one_of(bucket)
        if bucket.compute_ranks and bucket.scheme == "local":
            uneven.add(first.group)  # as its matrices lie
        elif bucket.compute_ranks:
            counts = [bucket.compute_ranks.count(rank) for rank in range(first.ranks)]
            assert max(counts) - min(counts) <= 1
            # what shards cost besides is uneven as they are
            flops = (cube_flops if bucket.scheme == "gram_split" else whole_flops)(first.shape, work[first.iteration])
            largest[first.group] = max(largest[first.group], flops)
            ranks = load.setdefault(first.group, [0.0] * first.ranks)
            load[first.group] = [before + count * flops for before, count in zip(ranks, counts, strict=True)]
    for group, ranks in load.items():
        assert group in uneven or max(ranks) - min(ranks) <= largest[group] * (1 + 1e-9)


@given(matrices(), modes, works, st.randoms())
def test_a_plan_depends_on_nothing_else(given_matrices, mode, work, random):
    plan = make_plan(given_matrices, mode, work)
    again = make_plan(iter(given_matrices), mode, work)
    assert again == plan
    assert described_plan(again) == described_plan(plan)
    shuffled = list(given_matrices)
    random.shuffle(shuffled)
    other = make_plan(shuffled, mode, work)
    assert summary(other) == summary(plan)
    if any(bucket.chunk for bucket in (*plan.buckets, *other.buckets)):
        return  # which are filled in the order of the parameters: those held otherwise by ranks leave other room
    assert [bucket.scheme for bucket in other.buckets] == [bucket.scheme for bucket in plan.buckets]
    assert plan_cost(other, work) == plan_cost(plan, work)


@given(matrices(), modes, works, st.sampled_from(["tp", "expt_tp", "dp"]))
def test_a_group_sees_the_same_plan_whatever_else_a_rank_has(given_matrices, mode, work, label):
    plan = make_plan(given_matrices, mode, work)
    alone = make_plan([m for m in given_matrices if m.group == label], mode, work)
    assert described_plan(plan, label) == described_plan(alone, label)


LONG, SHORT, SQUARE = ((4096, 16384), 1), ((16384, 4096), 1), ((4096, 4096), 0)
BOTH = [Matrix("m", shape, quarters(shape)) for shape in ((40, 90), (4096, 9216))]


CUT = Matrix("cut", SQUARE[0], cut_at(SQUARE[0], 0, [0, 1000, 2000, 3000, 4096]))


def stack(count, ranks, first):
    """Square matrices, of which each rank has those from its first on."""
    rows, cols = SQUARE[0]
    found = []
    for number in range(count):
        holder = max(rank for rank in range(ranks) if first[rank] <= number)
        edges = [0] * (holder + 1) + [rows] * (ranks - holder)
        found.append(Matrix(f"expert {number}", (rows, cols), cut_at((rows, cols), 0, edges)))
    return found


SMALL = SMALL_ENTRIES // 128


@pytest.mark.parametrize(
    ("mode", "given_matrices", "work", "expected"),
    [
        ("gram", some(3, *LONG), WORKS, [("gram_split", 3)]),
        ("gram", some(4, (1024, 8192), 1), WORKS, [("gram_replicated", 4)]),
        ("gram", some(3, *SHORT), WORKS, [("owner", 3)]),
        ("gram", some(3, *LONG), STANDARDS, [("owner", 3)]),
        ("gram", some(1, (REPLICATED_ROWS + 1, 8192), 1), WORKS, [("gram_split", 1)]),
        ("distributed", some(3, *SHORT), WORKS, [("owner", 3)]),
        ("distributed", some(3, *LONG), WORKS, [("distributed", 3)]),
        ("auto", some(8, *LONG), WORKS, [("owner", 8)]),
        ("auto", some(9, *LONG), WORKS, [("owner", 8), ("gram_split", 1)]),
        ("auto", some(1, (1024, 8192), 1), WORKS, [("gram_replicated", 1)]),
        ("auto", some(1, *SQUARE), WORKS, [("gram_split", 1)]),
        ("auto", some(1, (128, SMALL), 0), STANDARDS, [("duplicated", 1)]),
        ("auto", some(1, (128, SMALL + 4), 0), STANDARDS, [("owner", 1)]),
        ("auto", some(3, (64, 64), None, group="dp"), WORKS, [("share", 3)]),
        ("auto", some(3, (64, 64), None, group="fsdp"), WORKS, [("local", 3)]),
        # four kinds that the ranks share evenly, and so none is shared out; three that they do not
        ("auto", [m for width in (1, 2, 3, 4) for m in some(1, (4096, 16384 + width), 0)], WORKS, [("owner", 1)] * 4),
        # cut along both dimensions, small and large
        ("auto", BOTH[:1], WORKS, [("duplicated", 1)]),
        *((mode, BOTH[1:], WORKS, [("owner", 1)]) for mode in ("auto", "gram", "distributed")),
        *((mode, BOTH[1:], WORKS, [(mode, 1)]) for mode in ("blockwise", "duplicated")),
        # whole on one rank each: evenly, all on the first, and beside others of the shape, which are cut
        ("auto", stack(8, 4, range(0, 8, 2)), WORKS, [("local", 8)]),
        ("owner", stack(8, 4, range(0, 8, 2)), WORKS, [("owner", 8)]),
        ("auto", stack(8, 4, (0, 8, 8, 8)), WORKS, [("owner", 8)]),
        ("auto", [*stack(4, 4, range(4)), CUT], WORKS, [("local", 4), ("gram_split", 1)]),
        ("auto", [], WORKS, []),
    ],
)
def test_schemes(mode, given_matrices, work, expected):
    assert sorted(schemes(make_plan(given_matrices, mode, work))) == sorted(expected)


@pytest.mark.parametrize("mode", MODES)
def test_shards_in_copies_go_whole_to_all_ranks_of_all_copies(mode):
    twice = [replace(each, rectangles=each.rectangles * 2) for each in some(9, (1024, 4096), ranks=2)]
    plan = make_plan(twice, mode, WORKS)
    assert schemes(plan) == [("owner", 9)]
    assert Counter(plan.buckets[0].compute_ranks) == {0: 3, 1: 2, 2: 2, 3: 2}
    half = 1024 * 4096 * 4 // 2
    assert chunk_bytes(plan, DEFAULT_WORKSPACE) == [
        9 * half + 3 * 2 * 2 * half
    ]  # of three all shards of both copies go
    for rank in range(4):
        # half of each matrix that its copy has to compute but this rank does not; back to its replica, and the other
        # half to both of the others
        owned, near = (3, 5) if rank == 0 else (2, 5 if rank == 1 else 4)
        traffic = bucket_traffic(plan, plan.buckets[0], rank, WORKS)
        assert traffic == {"all_to_all": (2, ((near - owned) + owned * 3) * half)}
    odd = [replace(each, rectangles=each.rectangles[:3]) for each in twice[:1]]
    with pytest.raises(ValueError, match="do not tile"):
        make_plan(odd, mode, WORKS)


def test_each_iteration_has_buckets_of_its_own():
    both = [replace(m, iteration="ab"[i % 2]) for i, m in enumerate(some(4, *LONG))]
    plan = make_plan(both, "gram", {"a": WORK, "b": STANDARD})
    assert sorted((bucket.matrices, bucket.scheme) for bucket in plan.buckets) == [
        ((0, 2), "gram_split"),
        ((1, 3), "owner"),  # whose iteration has no Gram form
    ]
    with pytest.raises(KeyError, match="'b'"):
        make_plan(both, "gram", {"a": WORK})


@pytest.mark.parametrize(
    "rectangles",
    [
        (),
        (Rectangle(0, 4, 0, 4), Rectangle(0, 4, 3, 6)),
        (Rectangle(0, 4, 4, 2), Rectangle(0, 4, 0, 6)),
    ],
)
def test_pieces_that_do_not_tile_are_refused(rectangles):
    with pytest.raises(ValueError, match=r"the shards of 'bad' do not tile its shape \(4, 6\)"):
        make_plan([Matrix("bad", (4, 6), rectangles)], "auto", WORKS)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="unknown tp_mode 'exact': expected one of blockwise, duplicated"):
        make_plan([], "exact", WORKS)


def changed(plan, place, **what):
    found = list(plan.matrices)
    found[place] = replace(found[place], **what)
    return replace(plan, matrices=tuple(found))


def test_the_first_difference_is_named():
    plan = make_plan([*some(4, *LONG), *some(4, *SQUARE)], "owner", WORKS)
    name = plan.matrices[1].name
    first, second = plan.buckets
    compute_ranks = replace(first, compute_ranks=(1, 0, *first.compute_ranks[2:]))
    fewer = make_plan(plan.matrices[:7], "owner", WORKS)
    at, last = plan.matrices[0].name, plan.matrices[7].name
    others = {
        f"the whole shape, by its shard, of {name!r} is (4096, 16384) on rank 0 and (3, 4)": changed(
            plan, 1, shape=(3, 4)
        ),
        f"the layout of {name!r} is": changed(plan, 1, rectangles=(whole((4096, 16384)),)),
        f"the itemsize of {name!r} is 4 on rank 0 and 2": changed(plan, 1, itemsize=2),
        f"matrix 1 is {name!r} on rank 0 and 'x'": changed(plan, 1, name="x"),
        f"the compute rank of {at!r} is 0 on rank 0 and 1": replace(plan, buckets=(compute_ranks, second)),
        f"the scheme of {at!r} is 'owner' on rank 0 and 'duplicated'": replace(
            plan, buckets=(Bucket(first.matrices, "duplicated"), second)
        ),
        f"bucket 0 is [{at!r}": replace(plan, buckets=(second, first)),
        f"matrix 7 is {last!r} on rank 0 and 'missing'": fewer,
    }
    for message, other in others.items():
        assert differences(described_plan(plan), described_plan(other))[0].startswith(message)


def test_shared_matrices_leave_in_parts():
    plan = make_plan(some(32, (64, 64), None, group="dp"), "auto", WORKS)
    assert [(bucket.scheme, len(bucket.matrices)) for bucket in plan.buckets] == [("share", 32 // SHARED_PARTS)] * 4
