"""The parts of ``make gpu`` on ranks: collectives over NCCL, and several processes that share one GPU."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from gpu_optimizers import muon_of
from gpu_verdicts import Run, in_a_row, world
from torch import Tensor

from megatron_eopt import Execution
from megatron_eopt.parallel import collectives

# None is what users of FSDP2 have who name no backend
BACKENDS = {"cuda": ("nccl", None, "cuda:nccl", "cpu:gloo,cuda:nccl"), "cpu": ("gloo", None, "cpu:gloo")}


def nccl(run: Run) -> None:
    """Every collective over NCCL with one rank, and a step of Muon, in groups made in four ways."""
    for backend in BACKENDS[run.device.type]:
        name = f"groups made with {backend or 'no name'}"
        with run.check(name), world(backend):
            for collective, exchange in exchanges().items():
                with run.check(f"{name}: {collective}"):
                    x = torch.arange(8, device=run.device).float()
                    run.judge(f"{name}: {collective}", torch.equal(exchange(x).to(x), x), "what was sent")
            if backend == BACKENDS[run.device.type][0]:
                tell_times(run)
            groups = SimpleNamespace(tp=dist.group.WORLD, expt_tp=None)
            run_on = Execution(data_parallel_group=dist.group.WORLD)
            shared: dict[str, Any] = {"pg_collection": groups, "execution": run_on}
            both = [muon_of([(64, 32), (32, 64)], run.device, **settings) for settings in ({}, shared)]
            for optimizer in both:
                optimizer.step()
            same = all(map(torch.equal, *(optimizer.param_groups[0]["params"] for optimizer in both)))
            run.judge(f"{name}: step", same, "that without groups")


def tell_times(run: Run) -> None:
    """How long every collective takes with one rank, which sends nothing: what calls and copies cost."""
    entries = 2**8 if run.tiny else 2**24
    x = torch.ones(entries, device=run.device)
    for name, exchange in exchanges().items():
        if "of the CPU" not in name:
            seconds = in_a_row(partial(exchange, x), 2 if run.tiny else 20, run.device)
            run.tell(f"one rank: {name}", seconds * 1e3, "ms", f"{entries * 4 / 2**20:.4g} MiB in fp32")


def exchanges() -> dict[str, Callable[[Tensor], Any]]:
    """Every collective of the package, as a function that gives back what it gets where there is one rank."""
    group: Any = dist.group.WORLD
    return {
        "all_to_all": lambda x: collectives.all_to_all(x, [x.numel()], [x.numel()], group).wait(),
        "all_gather": lambda x: collectives.all_gather(x, group).wait()[0],
        "all_reduce": lambda x: collectives.all_reduce(x.clone(), group).wait(),
        "all_reduce in bf16": lambda x: collectives.all_reduce(x.bfloat16(), group).wait(),
        "reduce_scatter": lambda x: collectives.reduce_scatter(x.clone(), group).wait(),
        "reduce": lambda x: collectives.reduce(x.clone(), 0, group).wait(),
        "broadcast": lambda x: collectives.broadcast(x.clone(), 0, group).wait(),
        "lowest": lambda x: collectives.lowest(x, group),
        "lowest, of the CPU": lambda x: collectives.lowest(x.cpu().int(), group),
    }


def schemes(run: Run) -> None:
    """Every scheme on two and on four processes that share the GPU, over gloo, against one process."""
    buckets, run_ranks = _tests("buckets"), _tests("ranks").run_ranks
    of_schemes: dict[str, list[Any]] = {scheme: [] for scheme in dict.fromkeys(case.scheme for case in buckets.CASES)}
    for case in buckets.CASES:
        if not run.tiny or len(of_schemes[case.scheme]) < 2:
            of_schemes[case.scheme].append(case)
    cases = list(chain.from_iterable(of_schemes.values()))
    for ranks in (2,) if run.tiny else (2, 4):
        with run.check(f"{ranks} processes"):
            # these start once for all schemes: a start takes seconds on a GPU that others use too
            results = run_ranks(of_rank, ranks, cases, str(run.device))
            made = dict(zip(cases, zip(*results, strict=True), strict=True))
            for scheme, of_scheme in of_schemes.items():
                name = f"{scheme} on {ranks} processes"
                with run.check(name):
                    for case in of_scheme:
                        compare(case, ranks, made[case], run.device)
                    run.judge(name, True, "as one process", reason=f"{len(of_scheme)} cases")


def _tests(name: str) -> Any:
    return import_module(f"tests.distributed.{name}")


def of_rank(rank: int, ranks: int, cases: list[Any], device: str) -> list[list[Tensor]]:
    """What a rank makes of its shards of each case."""
    buckets, found = _tests("buckets"), []
    for case in cases:
        shards = [shard.to(device) for shard in buckets.own_parts(case, ranks, rank)]
        made = buckets.executed(buckets.plan_of([case], ranks), shards, {"tp": dist.group.WORLD}, case.settings)
        found.append([each.cpu() for each in made])
    return found


def compare(case: Any, ranks: int, of_ranks: tuple[list[Tensor], ...], device: torch.device) -> None:
    """Raise an ``AssertionError`` unless each rank has its shards of what one process computes on the same device."""
    buckets = _tests("buckets")
    rectangles = buckets.rectangles_of(case, ranks)
    # TF32 on a GPU, and fp32 on a CPU: what the tests allow half precision
    allowed = replace(case, precision="medium") if device.type == "cuda" and case.precision == "high" else case
    for number, x in enumerate(buckets.matrices_of(case)):
        for rectangle, made in zip(rectangles * (ranks // len(rectangles)), of_ranks, strict=True):
            if number == 1 and case.special in ("nan", "inf"):
                assert made[number].isnan().all(), f"{case}: no numbers were expected"
            elif rectangle.numel:
                own = buckets.part_of(x, rectangle).contiguous() if case.scheme == "blockwise" else x
                whole = case.settings(own.to(device)).cpu() * buckets.scale(*own.shape)
                expected = whole if case.scheme == "blockwise" else buckets.part_of(whole, rectangle)
                buckets.assert_close(made[number], expected, allowed, whole.abs().max())
