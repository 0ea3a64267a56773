"""What the tests of plans are made of: matrices that lie in all possible ways, and iterations."""

from math import prod

from hypothesis import strategies as st

from megatron_eopt.kernels.products import Products
from megatron_eopt.orthogonalize import get_coefficients
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.cost import Work, bucket_traffic
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.parallel.rectangles import Rectangle, cut, cut_at, whole

QUINTIC = get_coefficients("quintic", 5)


class Halves(Products):
    """Kernels that compute half of a symmetric product."""

    def share(self, rows):
        return 0.5


def work_of(coefficient_type="quintic", products=None):
    """An iteration in fp32; coefficients that are not named have no Gram form."""
    settings = {"coefficient_type": coefficient_type, "fp32_matmul_prec": "highest"}
    return Work(NewtonSchulz(steps=5, products=products or Halves(), **settings))


WORK = work_of()
STANDARD = work_of(QUINTIC)


class Alike(dict):
    """The same iteration of all matrices, whatever it is called."""

    def __missing__(self, name):
        return self[""]


WORKS = Alike({"": WORK})
STANDARDS = Alike({"": STANDARD})
MODES = ("blockwise", "duplicated", "distributed", "owner", "gram", "auto")
# Large matrices by whose cost schemes differ, small ones that have to be cheap to plan, and odd ones.
SHAPES = [(4096, 16384), (16384, 4096), (4096, 4096), (1024, 4096), (64, 64), (48, 30), (7, 3), (0, 8)]


def matrix(name, shape=(4096, 16384), dim=1, ranks=4, group="tp", itemsize=4):
    """A matrix that is cut into equal parts along a dimension, or whole on all ranks."""
    rectangles = (whole(shape),) * ranks if dim is None else cut(shape, dim, ranks)
    return Matrix(name, shape, rectangles, group, itemsize)


def some(count, *args, **settings):
    return [matrix(f"{args}{settings}{i}", *args, **settings) for i in range(count)]


def quarters(shape):
    """Both dimensions cut, over four ranks."""
    (rows, cols), (top, left) = shape, (shape[0] // 2, shape[1] // 3)
    return tuple(Rectangle(*r, *c) for r in ((0, top), (top, rows)) for c in ((0, left), (left, cols)))


@st.composite
def rectangles(draw, shape, ranks):
    how = draw(st.sampled_from(["one", "whole", "rows", "columns", *(["both"] if ranks == 4 else [])]))
    if how == "one":
        return (whole(shape),)
    if how == "whole":
        return (whole(shape),) * ranks
    if how == "both":
        return quarters(shape)
    dim = 0 if how == "rows" else 1
    inner = draw(st.lists(st.integers(0, shape[dim]), min_size=ranks - 1, max_size=ranks - 1).map(sorted))
    even = [shape[dim] * rank // ranks for rank in range(1, ranks)]
    return cut_at(shape, dim, [0, *draw(st.sampled_from([even, inner])), shape[dim]])


iterations = st.sampled_from(["a", "b"])


def flat(shapes, ranks):
    """Shards of matrices that lie back to back in a buffer, which is cut into equal parts at whole rows of each."""
    part, start, found = -(-sum(map(prod, shapes)) // ranks), 0, []
    for rows, cols in shapes:
        edges = [min(max((rank * part - start) // cols, 0), rows) for rank in range(1, ranks)]
        found.append(cut_at((rows, cols), 0, [0, *edges, rows]))
        start += rows * cols
    return found


@st.composite
def matrices(draw):
    """Up to six kinds of matrices of up to seven each, in any order, of two iterations; each group has its own size.

    The matrices of a kind have one layout, or each its own.
    """
    sizes = {label: draw(st.integers(2, 5)) for label in ("tp", "expt_tp", "dp")}
    kinds = []
    for _ in range(draw(st.integers(1, 6))):
        shape, group = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(sorted(sizes)))
        count, layouts = draw(st.integers(1, 7)), rectangles(shape, sizes[group])
        lying = (
            draw(st.lists(layouts, min_size=count, max_size=count)) if draw(st.booleans()) else [draw(layouts)] * count
        )
        rest = group, draw(st.sampled_from([2, 4])), draw(iterations)
        kinds += [(shape, each, *rest) for each in lying]
    return [Matrix(f"m{i}", *kind) for i, kind in enumerate(draw(st.permutations(kinds)))]


ONCE = work_of("cubic5", Products())
works = st.sampled_from([WORKS, STANDARDS, Alike({"": ONCE}), {"a": WORK, "b": STANDARD}, {"a": ONCE, "b": WORK}])
modes = st.sampled_from(MODES)


def bucket_bytes(plan, bucket, rank, work):
    """Collective -> bytes that a rank sends."""
    return {name: sent for name, (_, sent) in bucket_traffic(plan, bucket, rank, work).items()}


def predicted(plan, rank, work):
    """Collective -> calls and bytes of all buckets of a plan."""
    found = {}
    for bucket in plan.buckets:
        for name, figures in bucket_traffic(plan, bucket, rank, work).items():
            found[name] = tuple(map(sum, zip(found.get(name, (0, 0)), figures, strict=True)))
    return found
