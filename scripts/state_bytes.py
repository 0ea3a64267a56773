"""Bytes of parameters, gradients and state that the busiest data-parallel rank holds, for the docs.

Nothing is measured. What is whole on every rank, and what is shared, was read in Megatron-Core 0.19; which part of the
shared the busiest rank has follows from the planner's deal, or from how rows are cut.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import NamedTuple

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.cost import Work
from megatron_eopt.parallel.deal import Item, deal, snake_order
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.parallel.rectangles import Rectangle

sys.path.append(str(Path(__file__).parent / "bench"))
from models import LLAMAS, matrices_of

MODEL, TENSOR, DATA = "llama3-8b", 8, (16, 64)
NEWTON_SCHULZ = NewtonSchulz()
WORK = Work(NEWTON_SCHULZ)
BF16, FP32 = 2, 4  # bytes of an entry


class Way(NamedTuple):
    """How data-parallel ranks hold a run in bf16, in bytes an entry; the momentum is beside ``shared``."""

    flags: str
    whole: int  # on every rank
    shared: int  # on the rank that has the entry
    share: Callable[[str, int, int], float]  # of the entries, on the busiest rank: of a model, stages and ranks
    offloads: bool = False


@cache
def parameters(name: str, pipeline: int) -> list[tuple[Matrix, ...]]:
    """The parameters with matrices of a pipeline stage."""
    model = LLAMAS[name]
    return matrices_of(replace(model, num_layers=model.num_layers // pipeline), TENSOR)


def shards(name: str, pipeline: int) -> list[list[Rectangle]]:
    """What a tensor-parallel rank has of each parameter with matrices: of its logical ones."""
    return [[matrix.rectangles[0] for matrix in parameter] for parameter in parameters(name, pipeline)]


def entries(name: str, pipeline: int) -> list[int]:
    """How many of each parameter a tensor-parallel rank has."""
    return [sum(rectangle.numel for rectangle in each) for each in shards(name, pipeline)]


@cache
def dealt(name: str, pipeline: int, data: int) -> float:
    """The share where whole parameters are dealt to ``data`` ranks."""
    counts = entries(name, pipeline)
    items = [Item(*each) for each in zip(parameters(name, pipeline), counts, strict=True)]
    held = [0] * data
    for rank, count in zip(deal(items, snake_order(counts, data), data, {"": WORK}).ranks, counts, strict=True):
        held[rank] += count
    return max(held) / sum(held)


def by_rows(name: str, pipeline: int, data: int) -> float:
    """The share where each parameter is cut into chunks of equally many rows, but for the last."""
    held = sum(
        ceil(sum(each.shape[0] for each in parameter) / data) * parameter[0].shape[1]
        for parameter in shards(name, pipeline)
    )
    return held / sum(entries(name, pipeline))


def evenly(name: str, pipeline: int, data: int) -> float:
    """The share where flat buffers are cut."""
    return 1 / data


def everything(name: str, pipeline: int, data: int) -> float:
    """The share where nothing is shared out."""
    return 1


MAIN = COPY = FP32  # of the parameter; of the gradient, in a step
WAYS = (
    Way("none", BF16 + FP32, MAIN, everything, True),
    Way("`--use-distributed-optimizer`", BF16 + FP32, MAIN, dealt, True),
    Way("`--use-megatron-fsdp`, `optim`", BF16 + BF16, COPY + MAIN, evenly),
    Way("`--use-megatron-fsdp`, `optim_grads`", BF16, BF16 + COPY + MAIN, evenly),
    Way("`--use-megatron-fsdp`, `optim_grads_params`", 0, BF16 + BF16 + COPY + MAIN, evenly),
    Way("`--use-torch-fsdp2`", 0, BF16 + COPY + MAIN, by_rows),
)


def held(way: Way, name: str, data: int, momentum: float, offloaded: bool = False) -> tuple[float, float]:
    """Bytes a parameter on the busiest rank: on its device, and in host memory, where scales of blocks never are."""
    share = way.share(name, 1, data)
    host = int(momentum) * share if offloaded else 0
    return way.whole + (way.shared + momentum) * share - host, host


def bytes_rows() -> list[list[str]]:
    """Bytes a parameter of each way, for momenta of each dtype, on the device and in host memory."""
    rows = []
    for way in WAYS:
        for offloaded in (False, True)[: 1 + way.offloads]:
            for momentum, dtype in ((FP32, "fp32"), (BF16, "bf16")):
                cells = [
                    " + ".join(f"{each:.3g}" for each in held(way, MODEL, data, momentum, offloaded)[: 1 + offloaded])
                    for data in DATA
                ]
                rows.append([way.flags, f"{dtype}, {'host' if offloaded else 'device'}", *cells])
    return rows
