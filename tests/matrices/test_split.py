from dataclasses import replace

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
from megatron_eopt.parallel.layout import Layout, local_rows, of_stack, on_one_rank, shared_out, split_layout
from megatron_eopt.parallel.rectangles import cut, cut_at, whole
from tests.distributed.shards import part_of
from tests.matrices.models import kinds
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
            here = part_of(x, rectangle)
            assert here.isnan().all()  # no other rank has it
            here.copy_(part)
    assert all(torch.equal(x, y) for x, y in zip(joined, matrices, strict=True))


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data(), unit=st.integers(1, 3), turned=st.booleans())
def test_any_rows_are_split_as_the_whole_is(name, data, unit, turned):
    """Wherever a shard begins and ends, in stacks and transposed parameters."""
    kind = kinds(unit)[name]
    rows, layers, upright = kind.rows(), kind.split.stacked, replace(kind.split, transposed=False)
    top, bottom = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    split = transposed(upright) if turned else upright
    x = torch.arange(2 * (layers or 1) * rows).view(*([layers] if layers else []), rows, 2)
    shard = x[..., top:bottom, :].contiguous()
    expected = [part[torch.isin(part, shard).all(1)] for part in upright.local(rows, 0, rows).split(x)]
    local = split.local(rows, top, bottom)
    stored = shard.mT.contiguous() if turned else shard
    parts = local.split(stored)
    assert all(map(torch.equal, parts, expected))
    assert len(parts) == len(expected)
    for several in (parts, [part.clone() for part in parts]):
        merged = local.merge(several)
        assert torch.equal(merged, stored)
        assert not turned or merged.is_contiguous()


@pytest.mark.parametrize("name", [name for name, kind in kinds().items() if kind.split.stacked])
@given(data=st.data(), unit=st.integers(1, 3), ranks=st.integers(1, 4))
def test_ranks_that_share_out_a_stack_have_whole_matrices_of_it(name, data, unit, ranks):
    """Some perhaps have none."""
    kind = kinds(unit)[name]
    matrices = kind.whole(4)
    (stack,) = kind.store(matrices, 1)
    count = len(stack)
    inner = sorted(data.draw(st.lists(st.integers(0, count), min_size=ranks - 1, max_size=ranks - 1)))
    flat = (count, stack[0].numel())
    cuts = cut_at(flat, 0, [0, *inner, count])
    times_held = [0] * len(matrices)
    for rank, (top, bottom, *_) in enumerate(cuts):
        layout = of_stack(Layout(flat, cuts, Group(ranks, rank), "fsdp"), tuple(stack.shape[1:]))
        layout = layout.transposed if kind.split.transposed else layout
        layouts, rows = split_layout(layout, kind.split), local_rows(layout, kind.split)
        parts = rows.split(stack[top:bottom])
        for number, (part, each, matrix) in enumerate(zip(parts, layouts, matrices, strict=True)):
            assert each.shape == tuple(matrix.shape)
            assert torch.equal(part, part_of(matrix, each.rectangle))
            assert part.numel() in (0, matrix.numel())
            times_held[number] += part.numel() > 0
        assert torch.equal(rows.merge(parts), stack[top:bottom])
        assert torch.equal(rows.merge([part.clone() for part in parts]), stack[top:bottom])
    assert times_held == [1] * len(matrices)


@pytest.mark.parametrize("name", ["linear_fc1", "experts fc1", "mamba in_proj", "qkv per head", "one query group"])
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
            "unknown order .stacked. of rows: expected one of interleaved",
        ),
        (lambda: interleaved(q=0), "rows of q: expected a positive integer, got 0"),
        (lambda: per_shard(z=2.0), "rows of z: expected a positive integer, got 2.0"),
        (lambda: Split((Part("q", 4, each=True),)), "rows of each q: expected a positive integer, got True"),
        (lambda: experts(0), "stacked: expected a positive integer, got 0"),
        (lambda: interleaved(q=None), "interleaved rows of q need their number in one group"),
        (lambda: Split((Part("q", 5, each=2),)), "interleaved rows of q need .* a multiple of each"),
        (lambda: qkv((4, 2), per_head=True), "argument 2 is shorter"),
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
        (Split((Part("x", 6, each=4),), "per_shard"), 6, 1, "x has 6 rows, which are not those .*: x 0 4"),
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
