"""Measure a step of one process, and of several ranks, beside public peers on the CPU: part of ``make bench``.

The peers are Megatron-Core's Muon on emerging-optimizers, ``torch.optim.Muon`` and Muon of microsoft/dion. One process
has whole matrices, with products in bf16, of SOAP in fp32. Several ranks get the 28 matrices of four layers, cut by
Megatron's attributes or as DTensors. All take turns. Ranks are processes with one thread each, over gloo. Besides times
their table has how far an update is from that of one rank, over its length, and what the first rank counts: matrix
products, their operations, collectives, temporaries and state.

dion is not on PyPI: ``--dion FOLDER`` takes a checkout of it.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from counting import Products
from emerging_optimizers import orthogonalized_optimizers, soap
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon as MegatronsMuon
from models import ALONE, FOUR_LAYERS, Sharded
from pages import markdown
from timing import Load, Times, in_turns, machine, on_ranks, parser_of, write
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

from megatron_eopt import SOAP, TensorParallelAdaptiveMuon, TensorParallelMuon

PRECISIONS = {"medium": "bf16", "highest": "fp32"}
COMPARED = FOUR_LAYERS[: len(FOUR_LAYERS) // 4]  # with one rank: of the first layer
COLUMNS = ("ms", "by the fastest exact", "off one rank", "products", "GFLOP", "collectives", "MiB", "state B")
EXACT = 1e-4  # an update that is closer is that of one rank up to rounding, in fp32
ROUNDED = 3e-2  # the same in bf16


@dataclass(frozen=True)
class Contestant:
    """What builds an optimizer of this rank's shards; ``of`` is a mesh for DTensors, else Megatron's groups."""

    build: Callable[[list[Parameter], Any], torch.optim.Optimizer]
    dtensors: bool = False


def of_megatron(cls: Any, precision: str, mode: str, **settings: Any) -> Contestant:
    """An optimizer with Megatron's arguments, ours or theirs."""
    common: dict[str, Any] = {"lr": 1e-3, "momentum": 0.95, "fp32_matmul_prec": precision, "tp_mode": mode, **settings}
    return Contestant(lambda params, of: cls(params, pg_collection=of, **common))


def everyone(precision: str) -> dict[str, Contestant]:
    """Contestants by name; those without a choice of precision multiply in bf16."""
    found = {}
    for mode in ("auto", "duplicated", "distributed", "owner", "gram", "blockwise"):
        found[f"ours, {mode}"] = of_megatron(TensorParallelMuon, precision, mode)
    found["ours, auto, fast"] = of_megatron(TensorParallelMuon, precision, "auto", coefficient_type="cubic5")
    settings: dict[str, Any] = {"lr": 1e-3, "momentum": 0.95, "fp32_matmul_prec": precision, "tp_mode": "auto"}
    found["ours, auto, FSDP2"] = Contestant(lambda params, of: TensorParallelMuon(params, **settings), dtensors=True)
    for mode in ("duplicated", "distributed", "blockwise"):
        found[f"Megatron, {mode}"] = of_megatron(MegatronsMuon, precision, mode)
    if precision == "medium":
        found["torch"] = Contestant(
            lambda params, of: torch.optim.Muon(params, lr=1e-3, adjust_lr_fn="match_rms_adamw"), dtensors=True
        )
        if find_spec("dion"):
            found["dion"] = Contestant(dions, dtensors=True)
    return found


def dions(params: list[Parameter], mesh: Any) -> Any:
    """Its Muon with the polynomial of the others."""
    from dion import Muon

    return Muon(params, mesh, lr=1e-3, nesterov=True, adjust_lr="rms_norm", use_polar_express=False)


def drawn(shapes: Sharded) -> list[tuple[Tensor, Tensor, int]]:
    """Each matrix with its gradient, and the dimension that is cut."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for rows, cols, dim in shapes:
        matrix, gradient = (torch.randn(rows, cols, generator=generator) for _ in range(2))
        found.append((matrix, gradient, dim))
    return found


def shards(shapes: Sharded, rank: int, ranks: int) -> list[Parameter]:
    """This rank's parameters with gradients and Megatron's attributes."""
    found = []
    for matrix, gradient, dim in drawn(shapes):
        parameter = Parameter(matrix.chunk(ranks, dim)[rank].contiguous())
        parameter.grad = gradient.chunk(ranks, dim)[rank].contiguous()
        if ranks > 1:
            parameter.tensor_model_parallel, parameter.partition_dim = True, dim  # type: ignore[attr-defined]
        found.append(parameter)
    return found


def dtensors(shapes: Sharded, mesh: Any) -> list[Parameter]:
    """The same as DTensors."""
    found = []
    for matrix, gradient, dim in drawn(shapes):
        found.append(Parameter(distribute_tensor(matrix, mesh, [Shard(dim)])))
        found[-1].grad = distribute_tensor(gradient, mesh, [Shard(dim)])
    return found


def off_one_rank(one: Contestant, groups: Any, mesh: Any, rank: int, ranks: int) -> float:
    """How far an update is from that of one rank, over its length: the largest of the matrices."""
    parameters = dtensors(COMPARED, mesh) if one.dtensors else shards(COMPARED, rank, ranks)
    one.build(parameters, mesh if one.dtensors else groups).step()
    alone = shards(COMPARED, 0, 1)
    one.build(alone, None).step()
    most = 0.0
    for p, expected, (start, _, dim) in zip(parameters, alone, drawn(COMPARED), strict=True):
        difference = (whole(p.detach(), dim, ranks) - expected).norm() / (expected - start).norm()
        most = max(most, difference.item())
    return most


def whole(x: Tensor, dim: int, ranks: int) -> Tensor:
    """All entries of a matrix of which this rank has a shard."""
    if isinstance(x, DTensor):
        return x.full_tensor()
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(parts, x)
    return torch.cat(parts, dim)


def measured(rank: int, ranks: int, precision: str, rounds: int) -> dict[str, Any]:
    """Rounds of each contestant, its distance from one rank, and the counts of this rank."""
    everyone_ = everyone(precision)
    world = dist.group.WORLD
    groups = SimpleNamespace(tp=world, expt_tp=world, gtp_remat=None, expt_gtp_remat=None)
    mesh = init_device_mesh("cpu", (ranks,))
    optimizers = {}
    for name, one in everyone_.items():
        parameters = dtensors(FOUR_LAYERS, mesh) if one.dtensors else shards(FOUR_LAYERS, rank, ranks)
        optimizers[name] = one.build(parameters, mesh if one.dtensors else groups)
    times = in_turns({name: optimizer.step for name, optimizer in optimizers.items()}, rounds)
    found = {}
    torch.compiler.set_stance("force_eager")  # dion compiles for every shape
    for name, optimizer in optimizers.items():
        with Products() as counted:
            optimizer.step()
        held = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        entries = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        found[name] = {
            "seconds": times[name],
            "off one rank": off_one_rank(everyone_[name], groups, mesh, rank, ranks),
            "products": counted.products,
            "GFLOP": counted.operations / 1e9,
            "collectives": counted.collectives,
            "MiB": counted.peak / 2**20,
            "state B": sum(x.numel() * x.element_size() for x in held) / entries,
        }
    return found


def alone(rounds: int) -> dict[str, dict[str, Times]]:
    """Rounds of one process, by row and contestant, ours first."""
    normuon: dict[str, Any] = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.01, "moment2_method": "normuon"}
    of_soap: dict[str, Any] = {"lr": 1e-3, "fp32_matmul_prec": "highest"}
    of_muon: dict[str, Any] = {
        "ours": lambda params: TensorParallelMuon(params, lr=1e-3),
        "torch": lambda params: torch.optim.Muon(params, lr=1e-3),
        "emerging-optimizers": lambda params: orthogonalized_optimizers.Muon(params, lr=1e-3, nesterov=True),
    }
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in ("16 matrices", "28 shards", "120 small"):
        rows[f"muon, {name}"] = (name, of_muon)
    rows["normuon, 16 matrices"] = (
        "16 matrices",
        {
            "ours": lambda params: TensorParallelAdaptiveMuon(params, **normuon),
            "emerging-optimizers": lambda params: orthogonalized_optimizers.AdaptiveMuon(
                params, nesterov=True, **normuon
            ),
        },
    )
    rows["soap, bases anew in each step, 12 square"] = (
        "12 square",
        {
            "ours": lambda params: SOAP(params, precondition_frequency=1, **of_soap),
            "emerging-optimizers": lambda params: soap.SOAP(params, qr_fp32_matmul_prec="highest", **of_soap),
        },
    )
    found = {}
    for row, (name, contestants) in rows.items():
        optimizers = {}
        for contestant, build in contestants.items():
            shapes = [(*shape, 0) for shape in ALONE[name]]
            optimizers[contestant] = build(shards(shapes, 0, 1))
        found[row] = in_turns({contestant: each.step for contestant, each in optimizers.items()}, rounds)
    return found


def table_alone(found: dict[str, dict[str, Times]]) -> str:
    """A row of each; what the fastest peer takes, over what we take."""
    rows = []
    for row, times in found.items():
        best = min((name for name in times if name != "ours"), key=lambda name: times[name].median)
        ratio = times[best].median / times["ours"].median
        rows.append((row, times["ours"].words(".0f"), f"{best} {times[best].words('.0f')}", f"{ratio:.2f}"))
    return markdown(("one process", "ours, ms", "fastest peer, ms", "peer by ours"), rows)


def table(found: dict[str, Any], precision: str) -> str:
    """A row of each contestant; its time is compared with the fastest whose update is that of one rank."""
    allowed = EXACT if precision == "highest" else ROUNDED
    times = {name: Times(figures["seconds"]) for name, figures in found.items()}
    best = min(times[name].median for name, figures in found.items() if figures["off one rank"] < allowed)
    rows = []
    for name, figures in found.items():
        cells = [times[name].words(".0f"), f"{times[name].median / best:.2f}", f"{figures['off one rank']:.1g}"]
        cells += [f"{figures[column]:.4g}" for column in COLUMNS[3:]]
        rows.append((name, *cells))
    return markdown(("", *COLUMNS), rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--dion", type=Path, metavar="FOLDER", help="a checkout of microsoft/dion")
    arguments = parser.parse_args(argv)
    if arguments.dion:
        sys.path.insert(0, str(arguments.dion.resolve()))
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    load = Load(max(arguments.ranks), arguments.any_load)
    figures: dict[str, Any] = {"machine": machine()}
    print(f"a step; {machine()}, one thread a rank")
    of_one = alone(arguments.rounds)
    load.check()
    print(f"\n{table_alone(of_one)}", flush=True)
    figures["one process"] = of_one
    for ranks in arguments.ranks:
        for precision in arguments.precisions:
            found = on_ranks(measured, ranks, precision, arguments.rounds)
            load.check()
            print(f"\n{ranks} ranks, {PRECISIONS[precision]}\n\n{table(found, precision)}", flush=True)
            figures[f"{ranks} ranks, {PRECISIONS[precision]}"] = found
    print(f"\n{load.words}")
    write("peers", figures | {"load": load.words})


if __name__ == "__main__":
    main()
