"""Count what one step costs beside its arithmetic: operations, host time, memory and bytes. A part of ``make bench``.

- Operations of a step for 320 matrices in five shapes: views and allocations left out, a multi-tensor call counts once.
- The share of a step that it takes to measure it, as ``--optimizer-metrics-interval`` asks for.
- Host time of a step of Muon for 600 matrices: what computes is replaced by its recorded outputs.
- The most bytes of temporaries at a time of layers of llama3-70b at TP=8, of the step that a GPU makes, on tensors
  without numbers, and the bytes that a rank sends.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from counting import HOST_READ, Allocations, Operations, Replay
from quiet import Load, add_flag, spread
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_eopt
from megatron_eopt import Execution, TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.parallel.cost import plan_cost, step_bytes
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.settings.execution import gathered

OUT = Path(__file__).resolve().parents[2] / "bench-out"
SHAPES = ((64, 64), (96, 64), (64, 96), (128, 64), (64, 128))
RANKS = 8
# rows, columns and the dimension that is cut, of a layer of llama3-70b
LAYER = {"qkv": (10240, 8192, 0), "proj": (8192, 8192, 1), "fc1": (57344, 8192, 0), "fc2": (8192, 28672, 1)}
MODES = ("duplicated", "owner", "auto", "gram", "distributed")


def matrices(shapes: Any) -> list[torch.nn.Parameter]:
    """Parameters with gradients."""
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


# the name of the row, and the settings
_BUILT: dict[str, tuple[str, dict[str, Any]]] = {
    "muon": ("muon", {}),
    **{method: ("adaptive_muon", {"moment2_method": method}) for method in ("adamuon", "normuon", "namo")},
    **{name: (name, {}) for name in ("muon_hyperball", "polargrad", "mars_muon", "scion", "soap", "lion")},
    "spectron": ("spectron", {"rank": 16}),
}
CASES: dict[str, Callable[..., Any]] = {
    name: partial(OPTIMIZERS[row].cls, **settings) for name, (row, settings) in _BUILT.items()
}


def operations(name: str) -> int:
    """How many reach a device in the fourth step, with plain products."""
    takes_products = OPTIMIZERS[_BUILT[name][0]].takes("symmetric_products")
    products = {"symmetric_products": "torch"} if takes_products else {}
    optimizer = CASES[name](matrices(SHAPES * 64), **gathered(OPTIMIZERS[_BUILT[name][0]].cls, products))
    for _ in range(3):
        optimizer.step()
    with Operations() as counted:
        optimizer.step()
    return counted.counts.total() - counted.counts[HOST_READ]


def host_milliseconds(count: int = 600, rounds: int = 21) -> list[float]:
    """Of the process in one step of Muon for so many matrices, in each round."""
    optimizer = TensorParallelMuon(matrices([(64, 64)] * count))
    for _ in range(2):
        optimizer.step()
    replay, taken = Replay(), []
    with replay:
        optimizer.step()
        for _ in range(rounds):
            replay.next, start = 0, time.thread_time()
            optimizer.step()
            taken.append((time.thread_time() - start) * 1e3)
    return taken


def counted_step(
    group: Any, mode: Any, layers: int, execution: Execution = Execution(), optimizer: Any = TensorParallelMuon
) -> tuple[Engine, int]:
    """The engine of layers at TP=8, and the most bytes that the step of a GPU has in use at a time."""
    with FakeTensorMode():
        parameters = []
        for layer in range(layers):
            for name, (rows, cols, dim) in LAYER.items():
                parameter = torch.nn.Parameter(torch.empty(rows, cols).chunk(RANKS, dim)[0].contiguous())
                parameter.tensor_model_parallel, parameter.partition_dim = True, dim  # type: ignore[attr-defined]
                parameter.grad = torch.empty_like(parameter)
                parameters.append((f"{layer}.{name}", parameter))
        groups: Any = SimpleNamespace(tp=group, expt_tp=None)
        optimizer = optimizer(parameters, pg_collection=groups, tp_mode=mode, execution=execution)
        optimizer.init_state()
        engine, session = optimizer.proposed(), optimizer._session
        session.engine = engine
        session.settled = optimizer._settled(engine)
        session.stepping = [True] * len(parameters)
        inputs = optimizer._inputs(torch.empty((), dtype=torch.bool))
        with torch.no_grad(), Allocations() as allocated:
            optimizer._run(inputs)
    assert allocated.bytes == 0, "all temporaries are given back"
    return optimizer.engine, allocated.peak


def measured_share(rounds: int = 15) -> list[float]:
    """Which part of a step it takes to measure it, in each round.

    Of Muon, for the matrices of three layers of hidden size 512.
    """
    shapes = ((1024, 512), (512, 512), (2816, 512), (512, 1408)) * 3
    plain, watched = (TensorParallelMuon(matrices(shapes), fp32_matmul_prec="high") for _ in range(2))
    megatron_eopt.watch(watched, lambda step, metrics: None, 1)
    taken: dict[TensorParallelMuon, list[float]] = {plain: [], watched: []}
    for _ in range(rounds + 2):
        for optimizer, seconds in taken.items():
            start = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
    of_plain, of_watched = taken.values()
    return [one / other - 1 for one, other in zip(of_watched[2:], of_plain[2:], strict=True)]


def main() -> None:
    """Print the figures, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flag(parser)
    load = Load(torch.get_num_threads(), parser.parse_args().any_load)
    torch.manual_seed(0)
    figures: dict[str, Any] = {"operations": {name: operations(name) for name in CASES}}
    print("operations of a step for 320 matrices in five shapes")
    for name, count in figures["operations"].items():
        print(f"  {name:24}{count:8,}")
    figures["host milliseconds"] = host_milliseconds()
    shares = figures["share of a step to measure it"] = measured_share()
    load.check()
    figures["load"] = load.words
    print(f"\nhost time of a step of Muon for 600 matrices: {spread(figures['host milliseconds'], '.2f')} ms")
    tenth = statistics.median(shares) / 10
    print(f"to measure a step of Muon: {spread(shares, '.1%')} of it; {tenth:.2%} with --log-interval 10")
    print(f"median of the rounds, least and most; {load.words}")
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    print("\none step of four layers of llama3-70b, TP=8, workspace 2 GiB")
    print(f"  {'':16}{'MiB counted':>16}{'MiB at most':>16}{'MB sent':>12}{'collectives':>14}")
    figures["memory"] = {}
    for mode in MODES:
        engine, peak = counted_step(dist.group.WORLD, mode, 4)
        cost = plan_cost(engine.plan, engine.works)
        bound = step_bytes(engine.plan, engine.works, engine.workspace)
        print(f"  {mode:16}{peak / 2**20:16,.0f}{bound / 2**20:16,.0f}{cost.bytes / 1e6:12,.0f}{cost.collectives:14,}")
        figures["memory"][mode] = {"counted": peak, "at most": bound, "sent": cost.bytes, "calls": cost.collectives}
    dist.destroy_process_group()
    OUT.mkdir(exist_ok=True)
    path = OUT / "step.json"
    path.write_text(json.dumps(figures, indent=2))
    print(f"\nWritten: {path}")


if __name__ == "__main__":
    main()
