import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.parallel.plan import MAX_BYTES, SHARED_PARTS, Bucket, Matrix, in_parts
from megatron_eopt.parallel.records import cut, of_ranks, whole


def bucket_of(count, ranks, scheme, shape=(64, 16)):
    pieces = (whole(shape),) * ranks if scheme == "share" else cut(shape, 0, ranks)
    owners = tuple(i % ranks for i in range(count)) if scheme in ("owner", "gram_split", "share") else ()
    return Bucket(tuple(range(3, 3 + count)), scheme, owners), Matrix("m", shape, pieces)


@given(
    count=st.integers(1, 40),
    ranks=st.sampled_from([2, 4]),
    scheme=st.sampled_from(["owner", "gram_split", "gram_replicated", "distributed", "duplicated", "share"]),
    max_bytes=st.integers(1, 20_000),
)
def test_parts_are_the_bucket_in_whole_rounds_within_the_bound(count, ranks, scheme, max_bytes):
    bucket, matrix = bucket_of(count, ranks, scheme)
    parts = in_parts(bucket, matrix, max_bytes)
    assert sum((part.matrices for part in parts), ()) == bucket.matrices
    assert sum((part.owners for part in parts), ()) == bucket.owners
    of_one = max(piece.numel for piece in matrix.pieces) * 4
    for part in parts:
        assert part.scheme == scheme
        assert len(part.matrices) <= ranks or len(part.matrices) * of_one <= max_bytes
        if part.owners:
            of_ranks(part.owners, ranks)  # raises where they are not dealt evenly
    assert all(len(part.matrices) % ranks == 0 for part in parts[:-1])
    if scheme == "share":
        assert len(parts) >= min(-(-count // ranks), 2)


def test_shared_matrices_leave_in_parts():
    bucket, matrix = bucket_of(32, 4, "share")
    assert len(in_parts(bucket, matrix)) == SHARED_PARTS


@pytest.mark.parametrize("scheme", ["owner", "gram_replicated"])
def test_what_is_small_is_one_part(scheme):
    bucket, matrix = bucket_of(1000, 4, scheme)
    assert in_parts(bucket, matrix) == [bucket]
    large = Matrix("m", (MAX_BYTES // 32, 4), cut((MAX_BYTES // 32, 4), 0, 4))
    assert len(in_parts(bucket, large)) == 125  # eight pieces of 128 MiB each


def test_what_is_not_exchanged_is_not_cut():
    bucket, matrix = Bucket(tuple(range(9)), "local"), Matrix("m", (8, 8), (whole((8, 8)),))
    assert in_parts(bucket, matrix, 1) == [bucket]
