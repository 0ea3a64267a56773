"""Count what one step costs beside its arithmetic: operations, host time, memory and bytes. A part of ``make bench``.

- Operations of a step for 320 matrices in five shapes: views and allocations left out, a multi-tensor call counts once.
- Host time of a step of Muon for 600 matrices: what computes is replaced by its recorded outputs.
- The most bytes of temporaries at a time of layers of llama3-70b at TP=8, of the step that a GPU makes, on tensors
  without numbers, and the bytes that a rank sends.
"""

import json
import statistics
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from allocations import Allocations
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_eopt import (
    SOAP,
    MuonHyperball,
    PolarGrad,
    Scion,
    Spectron,
    TensorParallelAdaptiveMuon,
    TensorParallelMuon,
)
from megatron_eopt.optimizers.muon import muon
from megatron_eopt.parallel.cost import plan_cost, step_bytes
from megatron_eopt.parallel.engine import Engine

OUT = Path(__file__).resolve().parent.parent / "bench-out"
SHAPES = ((64, 64), (96, 64), (64, 96), (128, 64), (64, 128))
RANKS = 8
# rows, columns and the dimension that is cut, of a layer of llama3-70b
LAYER = {"qkv": (10240, 8192, 0), "proj": (8192, 8192, 1), "fc1": (57344, 8192, 0), "fc2": (8192, 28672, 1)}
MODES = ("duplicated", "owner", "auto", "gram", "distributed")

_NO_KERNEL = (
    "unbind split_with_sizes empty empty_like new_empty empty_strided new_empty_strided lift_fresh promote_types "
    "_local_scalar_dense _record_function_enter_new _record_function_exit _unsafe_view reshape"
).split()


def launches(func: Any) -> bool:
    """Whether an operation computes: not a view, nor memory, nor a question of the host."""
    return not func.is_view and func.overloadpacket.__name__ not in _NO_KERNEL and "split" not in func.name()


class Operations(TorchDispatchMode):
    """Counts the operations inside that compute, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it."""
        self.counts[func.overloadpacket.__name__] += launches(func)
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        """How many there were."""
        return sum(self.counts.values())


class Replay(TorchDispatchMode):
    """Records what operations computed in one step, and then gives that in place of computing."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[tuple[Any, Any]] = []
        self.next: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation that is a view or makes memory; record any other one, or replay it."""
        if not launches(func):
            return func(*args, **(kwargs or {}))
        if self.next is None:
            self.recorded.append((func, func(*args, **(kwargs or {}))))
            return self.recorded[-1][1]
        expected, result = self.recorded[self.next]
        assert func is expected, f"the step made another operation: {func} in place of {expected}"
        self.next += 1
        return result


def matrices(shapes: Any) -> list[torch.nn.Parameter]:
    """Parameters with gradients."""
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


OPTIMIZERS: dict[str, Any] = {
    "muon": TensorParallelMuon,
    **{name: partial(TensorParallelAdaptiveMuon, moment2_method=name) for name in ("adamuon", "normuon", "namo")},
    "muon_hyperball": MuonHyperball,
    "polargrad": PolarGrad,
    "scion": Scion,
    "spectron": lambda parameters, **settings: Spectron(parameters, rank=16),
    "soap": lambda parameters, **settings: SOAP(parameters),
}


def operations(name: str) -> Operations:
    """Those of the fourth step, with plain products."""
    optimizer = OPTIMIZERS[name](matrices(SHAPES * 64), symmetric_products="torch")
    for _ in range(3):
        optimizer.step()
    with Operations() as counted:
        optimizer.step()
    return counted


def host_milliseconds(count: int = 600, rounds: int = 21) -> float:
    """Of the process in one step of Muon for so many matrices."""
    optimizer = TensorParallelMuon(matrices([(64, 64)] * count))
    for _ in range(2):
        optimizer.step()
    replay, taken = Replay(), []
    with replay:
        optimizer.step()
        for _ in range(rounds):
            replay.next, start = 0, time.thread_time()
            optimizer.step()
            taken.append(time.thread_time() - start)
    return statistics.median(taken) * 1e3


def counted_step(
    group: Any, mode: Any, layers: int, workspace: int = 2**31, optimizer: Any = TensorParallelMuon
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
        optimizer = optimizer(parameters, pg_collection=groups, tp_mode=mode, workspace=workspace)
        optimizer.init_state()
        optimizer._engine = optimizer.proposed()
        accepted: Tensor = torch.empty(len(parameters), dtype=torch.bool)
        batches = optimizer._batches(accepted, masked=True)
        with torch.no_grad(), Allocations() as allocated:
            muon(batches, optimizer.engine, optimizer)
    assert allocated.bytes == 0, "all temporaries are given back"
    return optimizer.engine, allocated.peak


def main() -> None:
    """Print the figures, and write them as JSON."""
    torch.manual_seed(0)
    figures: dict[str, Any] = {"operations": {name: operations(name).total for name in OPTIMIZERS}}
    print("operations of a step for 320 matrices in five shapes")
    for name, count in figures["operations"].items():
        print(f"  {name:24}{count:8,}")
    figures["host milliseconds"] = host_milliseconds()
    print(f"\nhost time of a step of Muon for 600 matrices: {figures['host milliseconds']:.2f} ms")
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
