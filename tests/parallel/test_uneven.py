"""Plans of matrices whose shards differ from one to the next: one bucket, computed where much is held."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.parallel.chunks import subset
from megatron_eopt.parallel.cost import plan_cost
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.parallel.rectangles import cut_at
from megatron_eopt.parallel.workspace import Workspace, chunk_bytes
from tests.parallel.plans import WORKS, bucket_bytes, flat, predicted

SHAPES = [(24, 8), (6, 32), (5, 3)]


@st.composite
def uneven(draw):
    """Matrices of few shapes, cut as a flat buffer is, or each at rows of its own; none of them evenly."""
    ranks = draw(st.integers(2, 6))
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=24))
    lying = flat(shapes, ranks)
    if draw(st.booleans()):
        lying = []
        for shape in shapes:
            edges = draw(st.lists(st.integers(0, shape[0]), min_size=ranks - 1, max_size=ranks - 1).map(sorted))
            lying.append(cut_at(shape, 0, [0, *edges, shape[0]]))
    found = [Matrix(f"m{i}", *each, "dp") for i, each in enumerate(zip(shapes, lying, strict=True))]
    return [each for each in found if each.uneven]


def computed(plan):
    """The compute rank of each matrix."""
    return {i: rank for each in plan.buckets for i, rank in zip(each.matrices, each.compute_ranks, strict=True)}


@given(uneven())
def test_a_matrix_is_computed_where_much_of_it_is_held(given_matrices):
    plan = make_plan(given_matrices, "owner", WORKS)
    rank_of = computed(plan)
    for bucket in plan.buckets:
        of_bucket = [plan.matrices[i] for i in bucket.matrices]
        counts = [bucket.compute_ranks.count(rank) for rank in range(of_bucket[0].ranks)]
        assert max(counts) - min(counts) <= 1
        if len({each.held for each in of_bucket}) == 1:
            continue
        for i, matrix in zip(bucket.matrices, of_bucket, strict=True):
            here = matrix.rectangles[rank_of[i]].numel
            for rank, rectangle in enumerate(matrix.rectangles):
                if rectangle.numel > here:  # its room there went to matrices of which as much is there
                    others = [plan.matrices[j].rectangles[rank].numel for j in bucket.matrices if rank_of[j] == rank]
                    assert min(others, default=matrix.shape[0] * matrix.shape[1]) >= rectangle.numel


def test_matrices_that_are_whole_on_their_ranks_move_no_bytes():
    ranks, shape = 4, (16, 8)
    on = [2, 0, 3, 1, 1, 2]
    matrices = [
        Matrix(f"m{i}", shape, cut_at(shape, 0, [0] * (rank + 1) + [16] * (ranks - rank)), "dp")
        for i, rank in enumerate(on)
    ]
    stay = make_plan(matrices, "auto", WORKS)
    assert [(bucket.scheme, bucket.compute_ranks) for bucket in stay.buckets] == [("local", tuple(on))]
    assert [predicted(stay, rank, WORKS) for rank in range(ranks)] == [{}] * ranks
    plan = make_plan(matrices, "owner", WORKS)
    (bucket,) = plan.buckets
    counts = Counter(bucket.compute_ranks)
    assert sorted(counts.values()) == [1, 1, 2, 2]
    # the last round goes to ranks 0 and 1: one matrix of rank 2 is computed by rank 0
    assert [rank for rank, own in zip(bucket.compute_ranks, on, strict=True) if rank != own] == [0]
    assert [bucket_bytes(plan, bucket, rank, WORKS)["all_to_all"] for rank in range(4)] == [512, 0, 512, 0]
    alone = make_plan(matrices[:4], "owner", WORKS)
    assert alone.buckets[0].compute_ranks == (2, 0, 3, 1)
    assert plan_cost(alone, WORKS).bytes == 0


@given(uneven(), st.integers(1, 2**14), st.data())
def test_what_a_rank_holds_of_a_chunk_is_counted_exactly(given_matrices, size, data):
    workspace = Workspace(bytes=size, kept=8)
    plan = make_plan(given_matrices, "owner", WORKS, workspace=workspace)
    expected = Counter()
    for bucket in plan.buckets:
        of_bucket = [plan.matrices[i] for i in bucket.matrices]
        held = max(sum(column) for column in zip(*([r.numel for r in m.rectangles] for m in of_bucket), strict=True))
        (rows, cols), item = of_bucket[0].shape, of_bucket[0].itemsize
        whole = max(Counter(bucket.compute_ranks).values()) * rows * cols
        expected[bucket.chunk] += held * (item + 8) + whole * item
    assert chunk_bytes(plan, workspace) == [expected[chunk] for chunk in sorted(expected)]
    kept = data.draw(st.sets(st.sampled_from(range(len(given_matrices))))) if given_matrices else set()
    left = replace(plan, buckets=tuple(subset(plan, kept)))
    assert computed(left) == {i: computed(plan)[i] for i in kept}
