from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.matrices import (
    GATE_UP,
    WHOLE,
    Part,
    Split,
    concatenated,
    experts,
    heads,
    interleaved,
    per_shard,
    transposed,
)
from megatron_eopt.matrices import query_key_value as qkv
from megatron_eopt.parallel.layout import Layout, local_rows, on_one_rank, shared_out, split_layout
from megatron_eopt.parallel.rectangles import cut, cut_at, whole
from tests.matrices.models import kinds, merge_rows, split_rows
from tests.parallel.test_layout import Group

KINDS = list(kinds())


def layout_on(ranks, rank, shape, dim=0):
    return on_one_rank(shape) if ranks == 1 else Layout(shape, cut(shape, dim, ranks), Group(ranks, rank), "tp")


@pytest.mark.parametrize("name", KINDS)
@given(unit=st.integers(1, 3), cols=st.sampled_from([1, 2, 3]), ranks=st.sampled_from([1, 2, 4, 8]))
def test_shards_are_the_pieces_of_separately_stored_matrices(name, unit, cols, ranks):
    kind = kinds(unit)[name]
    cols *= 8 if kind.dim else 1
    matrices = kind.whole(cols)
    assert kind.split.names(kind.rows()) == list(kind.matrices)
    joined = [torch.full_like(x, torch.nan) for x in matrices]
    for rank, shard in enumerate(kind.store(matrices, ranks)):
        layout = layout_on(ranks, rank, (kind.rows(), cols), kind.dim)
        layouts, rows = split_layout(layout, kind.split), local_rows(layout, kind.split)
        assert [each.shape for each in layouts] == [tuple(x.shape) for x in matrices]
        assert {(each.group, each.label) for each in layouts} == {(layout.group, layout.label)}
        parts = rows.split(shard)
        assert [tuple(part.shape) for part in parts] == [each.rectangle.shape for each in layouts]
        assert torch.equal(rows.merge(parts), shard)
        assert torch.equal(rows.merge([part.clone() for part in parts]), shard)
        for part, each, x in zip(parts, layouts, joined, strict=True):
            rectangle = each.rectangle
            assert (
                x[rectangle.top : rectangle.bottom, rectangle.left : rectangle.right].isnan().all()
            )  # no other rank has it
            x[rectangle.top : rectangle.bottom, rectangle.left : rectangle.right] = part
    assert all(torch.equal(x, y) for x, y in zip(joined, matrices, strict=True))


@given(
    heads_of_group=st.integers(1, 3),
    length=st.integers(1, 3),
    count=st.integers(1, 4),
    edges=st.sets(st.integers(1, 59)),
)
def test_heads_of_any_cut(heads_of_group, length, count, edges):
    # each head lies where the rows of its part lie, wherever a shard ends
    shapes = (heads_of_group * length, length, length)
    total = count * sum(shapes)
    lines = [0, *sorted(edge for edge in edges if edge < total), total]
    x = torch.arange(total * 2).view(total, 2)
    rectangles = cut_at((total, 2), 0, lines)
    whole_parts = qkv(shapes).local(total, 0, total).split(x)
    found = {}
    for rank, rectangle in enumerate(rectangles):
        layout = Layout((total, 2), rectangles, Group(len(rectangles), rank), "tp")
        rows = local_rows(layout, qkv(shapes, per_head=True))
        parts = rows.split(x[rectangle.top : rectangle.bottom])
        assert torch.equal(rows.merge(parts), x[rectangle.top : rectangle.bottom])
        for name, part in zip(qkv(shapes, per_head=True).names(total), parts, strict=True):
            found.setdefault(name, []).append(part)
    q, k, v = ([torch.cat(parts) for name, parts in found.items() if name[0] == part] for part in "qkv")
    assert (len(q), len(k), len(v)) == (count * heads_of_group, count, count)
    assert all(torch.equal(torch.cat(x), part) for x, part in zip((q, k, v), whole_parts, strict=True))


@st.composite
def fused(draw):
    """A fused matrix of unique entries, the rows of its parts in one group, and two cuts."""
    shapes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    rows, cols = draw(st.integers(1, 6)) * sum(shapes), draw(st.integers(0, 3))
    top, bottom = sorted(draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    return torch.arange(rows * cols).view(rows, cols), shapes, top, bottom


@given(case=fused())
def test_any_rows_are_split_as_the_whole_is(case):
    x, shapes, top, bottom = case
    pattern, local = qkv(shapes).pattern(len(x)), qkv(shapes).local(len(x), top, bottom)
    expected = [
        part[start:end] for part, (start, end) in zip(split_rows(x, shapes), pattern.held(top, bottom), strict=True)
    ]
    for rows in (x[top:bottom], torch.cat([x, x], 1)[top:bottom, : x.size(1)]):
        parts = local.split(rows)
        assert [part.shape for part in parts] == [part.shape for part in expected]
        assert all(torch.equal(part, other) for part, other in zip(parts, expected, strict=True))
        assert torch.equal(local.merge(parts), x[top:bottom])
        assert torch.equal(local.merge([part.clone() for part in parts]), x[top:bottom])
    assert torch.equal(merge_rows(qkv(shapes).local(len(x), 0, len(x)).split(x), shapes), x)


@given(case=fused(), stacked=st.integers(1, 3), padding=st.integers(0, 2))
def test_stacks_and_padded_rows_are_split_too(case, stacked, padding):
    x, shapes, top, bottom = case
    stack = torch.nn.functional.pad(
        torch.stack([x[top:bottom] + i * x.numel() for i in range(stacked)]), (0, 0, 0, padding)
    )
    rows = experts(stacked, qkv(shapes)).local(len(x), top, bottom, padding=padding)
    one = qkv(shapes).local(len(x), top, bottom)
    expected = [part for matrix in stack[:, : bottom - top] for part in one.split(matrix)]
    parts = rows.split(stack)
    assert len(parts) == len(expected)
    assert all(torch.equal(part, other) for part, other in zip(parts, expected, strict=True))
    assert torch.equal(rows.merge(parts), stack)


@given(case=fused())
def test_columns_of_a_transposed_parameter_are_split_as_rows_are(case):
    x, shapes, top, bottom = case
    expected = qkv(shapes).local(len(x), top, bottom).split(x[top:bottom])
    rows, own = transposed(qkv(shapes)).local(len(x), top, bottom), x[top:bottom].t().contiguous()
    assert all(torch.equal(part, other) for part, other in zip(rows.split(own), expected, strict=True))
    assert torch.equal(rows.merge(rows.split(own)), own)
    assert rows.merge(rows.split(own)).is_contiguous()


@given(case=fused())
def test_consecutive_rows_hold_consecutive_rows_of_each_matrix(case):
    x, shapes, top, bottom = case
    held = [qkv(shapes).pattern(len(x)).held(start, end) for start, end in pairwise([0, top, bottom, len(x)])]
    for ranges, rows in zip(zip(*held, strict=True), shapes, strict=True):
        ends = [0, *(end for _, end in ranges)]
        assert [start for start, _ in ranges] == ends[:-1]
        assert ends[-1] == len(x) // sum(shapes) * rows


def test_a_shard_may_begin_and_end_within_a_group():
    # the last q row and k and v of one group, two groups, q of the next
    pattern = qkv([2, 1, 1]).pattern(16)
    assert pattern.held(1, 14) == ((1, 8), (0, 3), (0, 3))
    assert pattern.held(2, 3) == ((2, 2), (0, 1), (0, 0))


def test_groups_are_interleaved():
    # two query groups of two q rows, one k row and one v row
    rows = torch.tensor([[1.0], [2.0], [3.0], [4.0], [11.0], [12.0], [13.0], [14.0]])
    q, k, v = qkv([2, 1, 1]).local(8, 0, 8).split(rows)
    assert q.flatten().tolist() == [1, 2, 11, 12]
    assert k.flatten().tolist() == [3, 13]
    assert v.flatten().tolist() == [4, 14]


def test_rows_of_one_group_are_not_copied():
    x = torch.arange(10.0).view(5, 2)
    parts = qkv([8, 1]).local(18, 3, 8).split(x)
    assert {part.untyped_storage().data_ptr() for part in parts} == {x.untyped_storage().data_ptr()}


@pytest.mark.parametrize("name", ["linear_fc1", "experts fc1", "mamba in_proj", "qkv per head", "linear_q per head"])
def test_rows_that_lie_together_are_not_copied(name):
    kind = kinds()[name]
    (x,) = kind.store(kind.whole(4), 1)
    parts = local_rows(on_one_rank((kind.rows(), 4)), kind.split).split(x)
    assert {part.untyped_storage().data_ptr() for part in parts} == {x.untyped_storage().data_ptr()}


def test_one_matrix_is_passed_on():
    x = torch.ones(4, 2)
    rows = local_rows(on_one_rank((4, 2)), WHOLE)
    assert rows.split(x) == [x]
    assert rows.merge([x]) is x
    assert WHOLE.is_whole
    assert not experts(2).is_whole


def test_shards_of_data_parallel_ranks_are_whole():
    layout = shared_out(on_one_rank((8, 2)), Group(2, 1))
    gate, up = split_layout(layout, GATE_UP)
    assert gate == up == Layout((4, 2), (whole((4, 2)),) * 2, layout.group, "dp")


def test_a_global_tensor_is_in_the_order_of_one_rank():
    layout = layout_on(2, 0, (8, 2))
    assert [each.rectangles for each in split_layout(layout, GATE_UP)] == [cut((4, 2), 0, 2)] * 2
    gate, up = split_layout(layout, GATE_UP.in_global_order())
    assert (gate.rectangle.shape, up.rectangle.shape) == ((4, 2), (0, 2))
    assert heads("q", 2).in_global_order() == heads("q", 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Split(order="stacked"),
            "unknown order 'stacked' of rows: expected one of interleaved, per_shard, conc",
        ),
        (lambda: interleaved(q=0), "rows of q: expected a positive integer, got 0"),
        (lambda: per_shard(z=2.0), "rows of z: expected a positive integer, got 2.0"),
        (lambda: Split((Part("q", 4, each=True),)), "rows of each q: expected a positive integer, got True"),
        (lambda: experts(0), "stacked: expected a positive integer, got 0"),
        (lambda: interleaved(q=None), "interleaved rows of q need their number in one group"),
        (lambda: Split((Part("q", 5, each=2),)), "interleaved rows of q need .* a multiple of each"),
        (lambda: qkv((4, 2), per_head=True), r"q, k and v or q, gate, k and v, got 2 parts: \[4, 2\]"),
    ],
)
def test_a_wrong_declaration_is_refused_when_it_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("split", "rows", "ranks", "message"),
    [
        (interleaved(q=2, k=1), 8, 1, r"8 rows over all ranks are not a multiple of the 3 of one query group \[2, 1\]"),
        (GATE_UP, 9, 1, "9 rows over all ranks are not those declared: gate the rest, up the rest"),
        (GATE_UP, 6, 2, "gate has 3 rows, of which 2 shards cannot have equal parts"),
        (per_shard(z=4, x=4), 10, 1, "10 rows over all ranks are not those declared: z 4, x 4"),
        (concatenated(kv=4, rope=4), 6, 1, "6 rows over all ranks are not those declared: kv 4, rope 4"),
        (concatenated(kv=4, rope=None), 4, 1, "not those declared: kv 4, rope the rest"),
        (Split((Part("x", 6, each=4),), "per_shard"), 6, 1, "x has 6 rows, which are no multiple of the 4 of each"),
        (Split((Part("kv", 6, inside=(("k", 4), ("v", 4))),), "per_shard"), 6, 1, "not those .* inside it: k 4, v 4"),
    ],
)
def test_a_parameter_that_is_another_is_refused(split, rows, ranks, message):
    with pytest.raises(ValueError, match=message):
        split_layout(layout_on(ranks, 0, (rows, 4)), split)


def test_unequal_shards_cannot_have_a_part_of_every_matrix():
    layout = Layout((8, 2), cut_at((8, 2), 0, [0, 2, 8]), Group(2), "tp")
    with pytest.raises(ValueError, match=r"are equal, got \[2, 6\] rows"):
        split_layout(layout, GATE_UP)


def test_lists_are_taken_for_tuples():
    split = Split([Part("kv", 8, inside=(("k", 4), ("v", 4)))], "per_shard")
    assert split == Split((Part("kv", 8, inside=(("k", 4), ("v", 4))),), "per_shard")
    assert split.names(8) == ["k", "v"]


def test_a_stack_of_one_matrix_keeps_its_dimensions():
    rows = local_rows(on_one_rank((4, 2)), experts(1))
    x = torch.ones(1, 4, 2)
    (part,) = rows.split(x)
    assert part.shape == (4, 2)
    assert rows.merge([part]).shape == (1, 4, 2)
