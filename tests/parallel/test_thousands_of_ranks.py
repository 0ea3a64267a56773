"""Plans for thousands of ranks: how often what is large is looked at."""

import pytest

from megatron_eopt.parallel import cost
from megatron_eopt.parallel.cost import Work
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.parallel.rectangles import Rectangle, cut_at

WORK = Work(schedule=((3.4, -4.7, 2.0),) * 5, restarts=(2,))
HIDDEN, FFN = 4096, 14336
# the matrices of each parameter, one above the other, and their columns
APART = {"q": ([4096], HIDDEN), "k": ([1024], HIDDEN), "v": ([1024], HIDDEN), "o": ([4096], HIDDEN)}
APART |= {"gate": ([FFN], HIDDEN), "up": ([FFN], HIDDEN), "down": ([4096], FFN)}
FUSED = {"qkv": ([4096, 1024, 1024], HIDDEN), "o": ([4096], HIDDEN), "fc1": ([FFN, FFN], HIDDEN), "fc2": ([4096], FFN)}


def matrices(parameters, ranks, layers=32):
    """Those of layers of Llama 3 8B, each parameter cut along its rows as torch's FSDP does."""
    for layer in range(layers):
        for name, (heights, columns) in parameters.items():
            size = -(-sum(heights) // ranks)
            shards = cut_at((sum(heights), columns), 0, [min(rank * size, sum(heights)) for rank in range(ranks + 1)])
            first = 0
            for number, height in enumerate(heights):
                edges = [[min(max(row - first, 0), height) for row in (shard.top, shard.bottom)] for shard in shards]
                held = tuple(Rectangle(*edge, 0, columns) for edge in edges)
                yield Matrix(f"{layer}.{name}{number if len(heights) > 1 else ''}", (height, columns), held, "dp", 2)
                first += height


@pytest.mark.parametrize("parameters", [APART, FUSED], ids=["apart", "fused"])
@pytest.mark.parametrize("ranks", [64, pytest.param(4096, marks=pytest.mark.wide)])
def test_a_bucket_is_priced_once_whatever_the_number_of_ranks(monkeypatch, parameters, ranks):
    priced, price = [], cost._rank_costs
    monkeypatch.setattr(
        cost, "_rank_costs", lambda plan, bucket, *more: priced.append(bucket) or price(plan, bucket, *more)
    )
    make_plan(list(matrices(parameters, ranks, layers=4)), "auto", {"": WORK})
    assert len(priced) == len(set(priced)) < 40
