"""Time one optimizer step on several ranks against emerging-optimizers, in one run: part of ``make bench``.

The matrices are those of a model of four layers with grouped queries (hidden 512, ffn 1792), cut as Megatron cuts them:
28 in all. The peer orthogonalizes them one after another; ours takes a whole step of the optimizer, with momentum,
decay and the update of the parameters. Everyone takes turns; the time of a round is that of the slowest rank. Ranks are
processes with one thread each, over gloo; with more ranks than cores they share them, which is said.

The same matrices are also cut as Megatron-FSDP cuts them, one behind the other in equal parts of whole rows, and as
torch's FSDP2 does, each by its rows: DTensors, with whatever the plan makes of their layouts.
"""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz_tp
from quiet import Load, add_flag
from ranks import on_ranks, seconds_in_turns
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron_eopt import TensorParallelMuon
from megatron_eopt.parallel.collectives import counters

OUT = Path(__file__).resolve().parents[2] / "bench-out"
LAYERS = 4
# rows, columns, and the dimension that is cut
MATRICES = {
    "q": (512, 512, 0),
    "k": (128, 512, 0),
    "v": (128, 512, 0),
    "o": (512, 512, 1),
    "gate": (1792, 512, 0),
    "up": (1792, 512, 0),
    "down": (512, 1792, 1),
}
OURS: dict[str, tuple[Any, str]] = {
    "ours, duplicated": ("duplicated", "quintic"),
    "ours, distributed": ("distributed", "quintic"),
    "ours, owner": ("owner", "quintic"),
    "ours, gram": ("gram", "quintic"),
    "ours, owner, fast": ("owner", "cubic5"),
    "ours, auto": ("auto", "quintic"),
    "ours, auto, fast": ("auto", "cubic5"),
    "ours, blockwise (not exact)": ("blockwise", "quintic"),
}


def parameters(rank: int, ranks: int) -> list[torch.nn.Parameter]:
    """This rank's shards, with gradients and Megatron's attributes."""
    found, cuts = [], [dim for _ in range(LAYERS) for *_, dim in MATRICES.values()]
    for (matrix, gradient), dim in zip(whole_matrices(), cuts, strict=True):
        parameter = torch.nn.Parameter(matrix.chunk(ranks, dim)[rank].contiguous())
        parameter.grad = gradient.chunk(ranks, dim)[rank].contiguous()
        parameter.tensor_model_parallel, parameter.partition_dim = True, dim  # type: ignore[attr-defined]
        found.append(parameter)
    return found


def whole_matrices() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each matrix of the model with its gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = [shape for _ in range(LAYERS) for *shape, _ in MATRICES.values()]
    return [(torch.randn(*shape, generator=generator), torch.randn(*shape, generator=generator)) for shape in shapes]


def under_megatron_fsdp(rank: int, ranks: int) -> list[torch.nn.Parameter]:
    """This rank's DTensors, with gradients, of one flat buffer that is cut into equal parts at whole rows."""
    mesh, matrices = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)), whole_matrices()
    size, start, found = sum(matrix.numel() for matrix, _ in matrices) / ranks, 0, []
    for matrix, gradient in matrices:
        rows, cols = matrix.shape
        top, bottom = (min(max(round((size * each - start) / cols), 0), rows) for each in (rank, rank + 1))
        shards = (
            DTensor.from_local(x[top:bottom].contiguous(), mesh, [Shard(0)], shape=x.shape, stride=x.stride())
            for x in (matrix, gradient)
        )
        parameter = torch.nn.Parameter(next(shards))
        chunk = ChunkStorageMetadata(torch.Size((top, 0)), torch.Size((bottom - top, cols)))
        parameter._local_tensor.__create_chunk_list__ = lambda chunk=chunk: [chunk]  # type: ignore[attr-defined]
        parameter.grad = next(shards)
        found.append(parameter)
        start += matrix.numel()
    return found


def under_fsdp2(rank: int, ranks: int) -> list[torch.nn.Parameter]:
    """DTensors, with gradients, whose rows are cut evenly."""
    mesh, found = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)), []
    for matrix, gradient in whole_matrices():
        parameter = torch.nn.Parameter(distribute_tensor(matrix, mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        found.append(parameter)
    return found


def contestants(rank: int, ranks: int) -> dict[str, Callable[[], Any]]:
    """Name -> one step."""
    groups: Any = SimpleNamespace(tp=dist.group.WORLD, expt_tp=dist.group.WORLD)
    shards: list[tuple[Any, int]] = [(p.grad, p.partition_dim) for p in parameters(rank, ranks)]  # type: ignore[attr-defined]

    def peer(tp_mode: Any) -> Callable[[], Any]:
        group: Any = dist.group.WORLD
        return lambda: [newton_schulz_tp(x, 5, "quintic", group, dim, tp_mode) for x, dim in shards]

    steps = {f"emerging-optimizers, {tp_mode}": peer(tp_mode) for tp_mode in ("duplicated", "distributed")}
    sharded = {"ours, auto, Megatron-FSDP": under_megatron_fsdp, "ours, auto, FSDP2": under_fsdp2}
    all_ours = OURS | dict.fromkeys(sharded, ("auto", "quintic"))
    for name, (tp_mode, coefficient_type) in all_ours.items():
        optimizer = TensorParallelMuon(
            sharded.get(name, parameters)(rank, ranks),
            fp32_matmul_prec="highest",
            coefficient_type=coefficient_type,
            tp_mode=tp_mode,
            pg_collection=groups,
        )
        steps[name] = optimizer.step
    return steps


def measure(rank: int, ranks: int, rounds: int) -> dict[str, Any]:
    """Seconds of a step of each, and what one step of this rank sends."""
    steps = contestants(rank, ranks)
    seconds, traffic = seconds_in_turns(steps, rounds), {}
    for name, step in steps.items():
        counters.reset()
        step()
        traffic[name] = (dict(counters.calls), dict(counters.bytes))
    return {"seconds": seconds, "traffic": traffic}


def run(ranks: int, rounds: int, anyway: bool = False) -> dict[str, Any]:
    """The figures at one number of ranks."""
    load = Load(ranks, anyway)
    figures: dict[str, Any] = on_ranks(measure, ranks, rounds)
    load.check()
    taken = figures["seconds"]
    seconds = {name: statistics.median(of_rounds) for name, of_rounds in taken.items()}
    cores = os.cpu_count() or 1
    shared = f", which share {cores} cores" if ranks > cores else ""
    print(f"\none step, 28 matrices, {ranks} ranks with one thread each{shared}; fp32, quintic unless said")
    print(load.words)
    print(f"  {'':32}{'seconds':>10}{'least':>8}{'most':>8}{'times as fast':>16}   collectives")
    best = min(value for name, value in seconds.items() if name.startswith("emerging"))
    for name, value in seconds.items():
        calls = ", ".join(f"{count} {kind}" for kind, count in figures["traffic"][name][0].items()) or "-"
        of_rounds = f"{value:10.3f}{min(taken[name]):8.3f}{max(taken[name]):8.3f}"
        print(f"  {name:32}{of_rounds}{best / value:16.2f}   {calls if name.startswith('ours') else '(not counted)'}")
    return {"ranks": ranks, "load": load.words, **figures}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7, help="how often every step is timed")
    add_flag(parser)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    figures = [run(ranks, arguments.rounds, arguments.any_load) for ranks in arguments.ranks]
    OUT.mkdir(exist_ok=True)
    path = OUT / "tensor_parallel.json"
    machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
    path.write_text(json.dumps({"machine": machine, "figures": figures}, indent=2))
    print(f"\nWritten: {path}")


if __name__ == "__main__":
    main()
