"""Count what one step costs beside its arithmetic: operations, host time, memory and bytes. A part of ``make bench``.

- Operations of a step for 320 matrices in five shapes: views and allocations left out, a multi-tensor call counts once.
- Host time of a step of Muon for 600 matrices: what computes is replaced by its recorded outputs.
- The share of a step that it takes to measure it, as ``--optimizer-metrics-interval`` asks for.
- The most bytes of temporaries at a time of layers of llama3-70b at TP=8, of the step that a GPU makes, on tensors
  without numbers, and the bytes that a rank sends.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import models
import torch
import torch.distributed as dist
from counting import HOST_READ, Allocations, Operations, Replay
from timing import Load, Times, in_turns, parser_of, write
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_eopt
from megatron_eopt import Execution, TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.parallel.cost import plan_cost, step_bytes
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.rectangles import Shape
from megatron_eopt.settings.execution import gathered

SHAPES: list[Shape] = [(64, 64), (96, 64), (64, 96), (128, 64), (64, 128)]
MEASURED: list[Shape] = [(1024, 512), (512, 512), (2816, 512), (512, 1408)] * 3  # of three layers
RANKS = 8
MODES = ("duplicated", "owner", "auto", "gram", "distributed")
CASES: dict[str, Callable[..., Any]] = {
    label: partial(OPTIMIZERS[row].cls, **settings) for label, (row, settings) in models.CASES.items()
}


def matrices(shapes: Iterable[Shape]) -> list[torch.nn.Parameter]:
    """Parameters with gradients."""
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def operations(label: str) -> int:
    """How many reach a device in the fourth step, with plain products."""
    row = OPTIMIZERS[models.CASES[label][0]]
    products = {"symmetric_products": "torch"} if row.takes("symmetric_products") else {}
    optimizer = CASES[label](matrices(SHAPES * 64), **gathered(row.cls, products))
    for _ in range(3):
        optimizer.step()
    with Operations() as counted:
        optimizer.step()
    return counted.counts.total() - counted.counts[HOST_READ]


def host_times(count: int = 600, rounds: int = 21) -> Times:
    """Of the process in one step of Muon for so many matrices, in each round."""
    optimizer = TensorParallelMuon(matrices([(64, 64)] * count))
    for _ in range(2):
        optimizer.step()
    replay, times = Replay(), Times()
    with replay:
        optimizer.step()
        for _ in range(rounds):
            replay.next, start = 0, time.thread_time()
            optimizer.step()
            times.append(time.thread_time() - start)
    return times


def measured_share(rounds: int = 15) -> Times:
    """Which part of a step of Muon it takes to measure it, in each round."""
    plain, watched = (TensorParallelMuon(matrices(MEASURED), fp32_matmul_prec="high") for _ in range(2))
    megatron_eopt.watch(watched, lambda step, metrics: None, 1)
    times = in_turns({"plain": plain.step, "watched": watched.step}, rounds)
    return Times(one / other - 1 for one, other in zip(times["watched"], times["plain"], strict=True))


def counted_step(
    group: Any, mode: Any, layers: int, execution: Execution = Execution(), optimizer: Any = TensorParallelMuon
) -> tuple[Engine, int]:
    """The engine of layers at TP=8, and the most bytes that the step of a GPU has in use at a time."""
    with FakeTensorMode():
        parameters = []
        for number, (rows, cols, dim) in enumerate(models.LAYER_OF_70B * layers):
            parameter = torch.nn.Parameter(torch.empty(rows, cols).chunk(RANKS, dim)[0].contiguous())
            parameter.tensor_model_parallel, parameter.partition_dim = True, dim  # type: ignore[attr-defined]
            parameter.grad = torch.empty_like(parameter)
            parameters.append((f"{number}", parameter))
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


def main() -> None:
    """Print the figures, and write them as JSON."""
    arguments = parser_of(__doc__, rounds=15).parse_args()
    load = Load(torch.get_num_threads(), arguments.any_load)
    torch.manual_seed(0)
    figures: dict[str, Any] = {"operations": {}, "memory": {}}
    print("operations of a step for 320 matrices in five shapes")
    for name in CASES:
        figures["operations"][name] = operations(name)
        print(f"  {name:24}{figures['operations'][name]:8,}", flush=True)
    figures["host seconds"] = host = host_times(rounds=arguments.rounds)
    figures["share of a step to measure it"] = shares = measured_share(arguments.rounds)
    load.check()
    figures["load"] = load.words
    print(f"\nhost time of a step of Muon for 600 matrices: {host.words('.2f')} ms")
    tenth = shares.median / 10
    print(f"to measure a step of Muon: {shares.words('.1f', 100)} % of it; {tenth:.2%} with --log-interval 10")
    print(f"median of the rounds, least and most; {load.words}")
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    print("\none step of four layers of llama3-70b, TP=8, workspace 2 GiB")
    print(f"  {'':16}{'MiB counted':>16}{'MiB at most':>16}{'MB sent':>12}{'collectives':>14}")
    for mode in MODES:
        engine, peak = counted_step(dist.group.WORLD, mode, 4)
        cost = plan_cost(engine.plan, engine.works)
        bound = step_bytes(engine.plan, engine.works, engine.workspace)
        print(f"  {mode:16}{peak / 2**20:16,.0f}{bound / 2**20:16,.0f}{cost.bytes / 1e6:12,.0f}{cost.collectives:14,}")
        figures["memory"][mode] = {"counted": peak, "at most": bound, "sent": cost.bytes, "calls": cost.collectives}
    dist.destroy_process_group()
    write("step", figures)


if __name__ == "__main__":
    main()
