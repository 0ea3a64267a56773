"""Simulate one rank of thousands on a CPU, and print what does not depend on a GPU. ``make scale``, some minutes.

- CPU seconds of a plan for 32 layers of Llama 3 8B whose parameters are cut over all ranks, as by FSDP.
- Host time of a step's exchange of one matrix with a shard on every rank, without arithmetic.
- What ranks say to each other at start: collectives, and bytes that a rank sends in them.
- CPU seconds of ``plan -- FLAGS`` for a model like DeepSeek-V3, of which nothing is built.

Of times that grow with the ranks, an exponent says how fast: 1 is in proportion.
"""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from pages import markdown
from timing import CPU, of_host
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel import agreement, collectives
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.cost import Work
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.plan_records import Matrix, Plan
from megatron_eopt.parallel.rectangles import Rectangle, Shape, cut_at
from megatron_eopt.parallel.schemes import whole
from megatron_eopt.screen import figure

RANKS = (64, 256, 1024, 4096)
LAYERS = 32
LAYER = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "proj": (4096, 4096), "down": (4096, 14336)}
LAYER |= {"gate": (14336, 4096), "up": (14336, 4096)}
STEPPED: dict[str, Shape] = {"rows of equal size": (8192, 64), "of which the last are empty": (14336, 64)}
KINDS = (16, 1024)  # of ranks that say the same
STAGES, EXPERT_RANKS = 16, 64
# Sizes of DeepSeek-V3, https://arxiv.org/abs/2412.19437.
RUN = f"""--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --swiglu
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8
    --moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) --moe-token-dispatcher-type alltoall
    --expert-model-parallel-size {EXPERT_RANKS} --pipeline-model-parallel-size {STAGES}
    --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2
    --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --vocab-size 129280 --tokenizer-type NullTokenizer
    --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 4096 --train-iters 10
    --lr 2e-4 --optimizer muon --muon-preset match_adamw --bf16"""


def by_rows(shape: Shape, ranks: int) -> tuple[Rectangle, ...]:
    """Shards as FSDP cuts them: of equally many rows, of which the last ranks may have none."""
    size = -(-shape[0] // ranks)
    return cut_at(shape, 0, [min(rank * size, shape[0]) for rank in range(ranks + 1)])


def exponent(seconds: Mapping[int, float]) -> float:
    """The slope of the logarithm of times over that of the ranks."""
    ranks, times = ([math.log(each) for each in some] for some in (seconds, seconds.values()))
    return statistics.linear_regression(ranks, times).slope


def plans(ranks: int) -> tuple[float, float]:
    """CPU seconds of a plan, and of its hash."""
    work = Work(NewtonSchulz())
    names = [(f"{layer}.{name}", shape) for layer in range(LAYERS) for name, shape in LAYER.items()]
    matrices = [Matrix(name, shape, by_rows(shape, ranks), "dp", 2) for name, shape in names]
    start = time.process_time()
    plan = make_plan(matrices, "auto", {"": work})
    planned = time.process_time()
    agreement.hashed(agreement.described_plan(plan))
    return planned - start, time.process_time() - planned


def step(shape: Shape, ranks: int, rounds: int = 9) -> float:
    """Median milliseconds in which a rank sends and gets what it has of a matrix, and that of the first rank."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        layout = Layout(shape, by_rows(shape, ranks), dist.group.WORLD, "dp")
        spec = ParamSpec("weight", torch.float32, layout, iteration=NewtonSchulz())
        engine, shard = Engine([spec], CPU, "owner"), torch.randn(layout.rectangle.shape)
        with mock.patch.object(whole, "orthogonalized", lambda stack, job: stack):
            return 1e3 * of_host(lambda: engine.factors([0], [shard.clone()]), rounds, CPU).median
    finally:
        dist.destroy_process_group()


class Simulated:
    """A group whose ranks say one of so many values of equal size; this process is its first rank."""

    ReduceOp = dist.ReduceOp
    _device_types = ()

    def __init__(self, ranks: int, kinds: int) -> None:
        self._ranks, self._kinds = ranks, kinds

    def rank(self) -> int:
        """This rank."""
        return 0

    def size(self) -> int:
        """Number of ranks."""
        return self._ranks

    def all_gather_into_tensor(self, found: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
        """Hashes, of which each kind has its own, or sizes of values, which the first of each kind have."""
        for rank, row in enumerate(found.view(self._ranks, -1)):
            row.copy_(sent + rank % self._kinds if len(sent) > 1 else sent * (rank < self._kinds))

    def all_reduce(self, x: torch.Tensor, op: Any, group: Any) -> None:
        """Values, as long as this rank's."""
        x.view(self._kinds, -1)[1:] = x.view(self._kinds, -1)[0]


def said(ranks: int, kinds: int) -> tuple[int, int, float]:
    """Collectives, bytes and CPU seconds until a rank knows each value of 8 KiB once."""
    from megatron_eopt.megatron import consensus as of_megatron

    group, counters = Simulated(ranks, kinds), collectives.counters
    world = SimpleNamespace(group=SimpleNamespace(WORLD=group))
    counters.reset()
    start = time.process_time()
    with mock.patch.object(collectives, "dist", group), mock.patch.object(of_megatron, "dist", world):
        assert len(of_megatron.distinct("x" * 8192)) == kinds
    return counters.calls["agree"], counters.bytes["agree"], time.process_time() - start


def compared(ranks: int) -> tuple[int, int]:
    """Collectives and bytes in which ranks compare a plan."""
    group = Simulated(ranks, 1)
    collectives.counters.reset()
    with mock.patch.object(collectives, "dist", group):
        agreement.check_same(Plan((), ()), {"dp": group})  # type: ignore[dict-item]
    return collectives.counters.calls["agree"], collectives.counters.bytes["agree"]


def described() -> float:
    """CPU seconds of ``plan -- FLAGS``, with the import of Megatron."""
    start = time.process_time()
    from megatron_eopt.tools.plan.plan_command import planned_run

    run = planned_run(RUN.split(), STAGES * EXPERT_RANKS)
    assert len(run.stages) == STAGES
    return time.process_time() - start


def line(what: str, of_ranks: Callable[[int], float]) -> list[str]:
    """A row of the table: figures, and their exponent."""
    of_ranks(RANKS[0])  # loads what is needed, which is not counted
    found = {number: of_ranks(number) for number in RANKS}
    return [what, *map(figure, found.values()), f"{exponent(found):.2f}"]


def simulated() -> str:
    """What does not depend on a GPU, as tables."""
    head = ["ranks", *(f"{ranks:,}" for ranks in RANKS), "exponent"]
    rows = [line(f"plan of {LAYERS * len(LAYER)} matrices, CPU s", lambda ranks: sum(plans(ranks)))]
    rows += [line(f"exchange of a matrix, {name}, host ms", partial(step, shape)) for name, shape in STEPPED.items()]
    agreed = []
    for ranks in (RANKS[0], RANKS[-1]):
        calls, sent = compared(ranks)
        agreed.append([f"{ranks:,}", "their plans", str(calls), f"{sent:,}", ""])
        for kinds in filter(ranks.__ge__, KINDS):
            calls, sent, seconds = said(ranks, kinds)
            agreed.append([f"{ranks:,}", f"{kinds:,} values of 8 KiB", str(calls), f"{sent:,}", f"{seconds:.2g}"])
    told = markdown(["ranks", "compare", "collectives", "bytes of a rank", "CPU s"], agreed)
    run = f"`plan -- FLAGS` of DeepSeek-V3, {STAGES} stages of {EXPERT_RANKS} ranks: {described():.0f} CPU s."
    return f"{markdown(head, rows)}\n\n{told}\n\n{run}"


def main() -> None:
    """Print the tables."""
    warnings.simplefilter("ignore")  # Megatron's, of missing packages
    torch.set_num_threads(1)
    print(simulated())


if __name__ == "__main__":
    main()
