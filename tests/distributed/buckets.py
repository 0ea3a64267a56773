"""Buckets of all schemes, cuts, norms and settings, with plans and matrices for them."""

import zlib
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.plan_records import Bucket, Matrix, Plan
from megatron_eopt.parallel.rectangles import Rectangle, cut_at, whole
from tests.distributed.shards import part_of

OWNED = ("owner", "gram_split", "share")
ONE_CUT = ("duplicated", "distributed", "owner", "gram_replicated", "gram_split")


@dataclass(frozen=True, kw_only=True)
class InFp16(NewtonSchulz):
    """The Gram form as it is on a GPU."""

    def compile(self, shape, dtype, device, form="auto"):
        compiled = super().compile(shape, dtype, device, form)
        return replace(compiled, dtype=torch.float16) if form == "gram" else compiled


@dataclass(frozen=True)
class Case:
    """A bucket: ``how`` its matrices are cut (dimension, ``grid``, ``whole``), their norm, and the settings."""

    scheme: str
    shape: tuple[int, int]
    how: int | str = 0
    count: int = 3
    edges: str = "even"
    norm: float = 0.0  # as drawn
    dtype: torch.dtype = torch.float32
    coefficient_type: str = "quintic"
    steps: int = 5
    precision: str = "highest"
    special: str = ""

    @property
    def settings(self):
        kind, precision = (InFp16, "highest") if self.precision == "fp16" else (NewtonSchulz, self.precision)
        return kind(
            steps=self.steps, coefficient_type=self.coefficient_type, fp32_matmul_prec=precision, max_bytes=2**16
        )


def long_side(shape):
    return int(shape[1] >= shape[0])


def wide(scheme, count=3, **more):
    return Case(scheme, (24, 96), "whole" if scheme == "share" else 1, count, **more)


CASES = [
    # tall, wide, square and in between, along either dimension where the scheme can
    *(
        Case(scheme, shape, dim, count)
        for scheme in ONE_CUT
        for shape in ((96, 36), (36, 96), (48, 48))
        for dim in (0, 1)
        for count in (1, 5)
        if not scheme.startswith("gram") or shape[dim] >= shape[1 - dim]
    ),
    # uneven shards, one of them empty
    *(
        Case(scheme, shape, long_side(shape), 4, edges)
        for scheme in ONE_CUT
        for shape in ((80, 24), (24, 80))
        for edges in ("uneven", "one")
    ),
    *(Case(scheme, (24, 80), 0, 4, "uneven") for scheme in ("duplicated", "distributed", "owner")),
    *(Case(scheme, (50, 70), "grid", 5) for scheme in ("owner", "duplicated")),
    *(Case("share", shape, "whole", count) for shape in ((96, 36), (36, 96)) for count in (1, 4, 5)),
    Case("local", (40, 64), "whole"),
    *(Case("blockwise", (40, 96), 1, edges=edges) for edges in ("even", "uneven", "one")),
    # norms, and matrices that are zero or not finite beside others that are not
    *(wide(scheme, norm=norm) for scheme in (*ONE_CUT, "share") for norm in (1e-12, 1e6)),
    *(wide(scheme, 4, special=special) for scheme in (*ONE_CUT, "share") for special in ("zero", "nan", "inf")),
    # on a CPU such are computed one by one
    *(Case(scheme, (256, 300), "whole" if scheme == "share" else 1, 2) for scheme in ("owner", "share", "duplicated")),
    # schedules with none, one and two restarts
    *(
        wide(scheme, coefficient_type=kind, steps=steps)
        for scheme in ("gram_replicated", "gram_split", "distributed")
        for kind, steps in (("cubic5", 5), ("quintic", 5), ("polar_express", 8))
    ),
    # fp16, which the Gram form takes on a GPU only
    *(
        wide(scheme, norm=norm, precision="fp16", coefficient_type=kind, dtype=dtype)
        for scheme in ("gram_replicated", "gram_split")
        for norm in (0.0, 1e-12, 1e6)
        for kind in ("cubic5", "quintic")
        for dtype in (torch.float32, torch.bfloat16)
    ),
    # other precisions and dtypes
    *(
        wide(scheme, precision=precision, dtype=dtype)
        for scheme in (*ONE_CUT, "share")
        for precision, dtype in (
            ("medium", torch.float32),
            ("high", torch.float32),
            ("medium", torch.bfloat16),
            ("highest", torch.bfloat16),
        )
    ),
]


def rectangles_of(case, ranks):
    rows, cols = case.shape
    if case.how == "whole":
        return (whole(case.shape),) * (1 if case.scheme == "local" else ranks)
    if case.how == "grid":  # blocks of different heights, and beside them the last rank's
        edges = [round(rows * part / (ranks - 1)) for part in range(ranks)]
        return (
            *(Rectangle(top, end, 0, cols // 3) for top, end in pairwise(edges)),
            Rectangle(0, rows, cols // 3, cols),
        )
    size = case.shape[case.how]
    edges = [size * part // ranks for part in range(ranks + 1)]
    if case.edges == "uneven":  # the second of three or more is empty
        edges = [0, *([size // 2 + 3] * min(2, ranks - 1)), *edges[3:-1], size]
    elif case.edges == "one":  # the others have nothing
        edges = [0] + [size] * ranks
    return cut_at(case.shape, case.how, edges)


def plan_of(cases, ranks):
    matrices, buckets = [], []
    for case in cases:
        of_bucket = tuple(range(len(matrices), len(matrices) + case.count))
        rectangles = rectangles_of(case, ranks)
        itemsize = case.settings.sent_dtype(case.dtype).itemsize
        matrices += [Matrix(f"{index}", case.shape, rectangles, "tp", itemsize) for index in of_bucket]
        # the last ranks first, so that compute ranks and their matrices are not in order
        compute_ranks = (
            tuple((ranks - 1 - index) % ranks for index in range(case.count)) if case.scheme in OWNED else ()
        )
        buckets.append(Bucket(of_bucket, case.scheme, compute_ranks))
    return Plan(tuple(matrices), tuple(buckets))


def matrices_of(case):
    generator = torch.Generator().manual_seed(zlib.crc32(repr(case).encode()))
    matrices = [torch.randn(case.shape, generator=generator) for _ in range(case.count)]
    if case.norm:
        matrices = [x * (case.norm / x.norm()) for x in matrices]
    if case.special:
        matrices[1] *= 0 if case.special == "zero" else 1
    if case.special in ("nan", "inf"):
        matrices[1][2, -1] = float(case.special)
    return [x.to(case.dtype) for x in matrices]


def scale(rows, cols):
    return rows / cols + 0.25


def own_parts(case, ranks, rank):
    rectangles = rectangles_of(case, ranks)
    return [part_of(x, rectangles[rank % len(rectangles)]) for x in matrices_of(case)]


def executed(plan, shards, groups, iterations, scale=scale):
    """What an engine makes of shards by a plan, whatever it would have planned itself.

    Args:
        plan: any; its matrices become parameters, and those of several ranks have groups.
        shards: this rank's shard of each matrix.
        groups: by label.
        iterations: by name, or one for all matrices.
        scale: of a matrix by its shape, or of a shard where the scheme takes each for a matrix.
    """
    of_matrices = [
        iterations if isinstance(iterations, NewtonSchulz) else iterations[each.iteration] for each in plan.matrices
    ]
    layouts = [
        Layout(each.shape, each.rectangles, groups[each.group] if each.ranks > 1 else None, each.group)
        for each in plan.matrices
    ]
    parameters = [
        ParamSpec(str(i), shard.dtype, layout, iteration=iteration)
        for i, (shard, layout, iteration) in enumerate(zip(shards, layouts, of_matrices, strict=True))
    ]
    engine = Engine(parameters, shards[0].device)
    named = (replace(each, iteration=own.name) for each, own in zip(plan.matrices, of_matrices, strict=True))
    engine.plan = replace(plan, matrices=tuple(named))
    for bucket in plan.buckets:
        for i in bucket.matrices if bucket.scheme == "blockwise" else ():
            shape = layouts[i].rectangle.shape
            engine.matrices[i] = (replace(plan.matrices[i], shape=shape, rectangles=(whole(shape),), group=""),)
    # that of an empty shard may divide by zero
    matrices = engine.flat(range(len(shards)))
    scales = [1.0 if 0 in matrix.shape else scale(*matrix.shape) for matrix in matrices]
    factors = engine.factors(range(len(shards)), shards)
    return [x.mul_(each) for x, each in zip(factors, scales, strict=True)]


def assert_close(actual, expected, case, largest):
    if case.dtype == torch.float32 and case.precision in ("high", "highest"):
        # with polar_express the Gram form in fp32 is itself 1e-5 from the polynomial, on one rank as on several
        bound = 3e-5 if case.coefficient_type == "polar_express" else 1e-5
        assert (actual - expected).abs().max() <= bound * largest
    else:
        assert (actual - expected).float().norm() <= 2e-2 * expected.float().norm()
