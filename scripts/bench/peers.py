"""Measure this package beside its public peers on the CPU, in one run: part of ``make bench``.

The peers are Megatron-Core's Muon on emerging-optimizers, ``torch.optim.Muon`` and Muon of microsoft/dion. All get the
same matrices, cut over 2 and 4 ranks: by Megatron's attributes, or as DTensors for torch and dion. Ranks are processes
with one thread each, over gloo. The first table has how far updates are from those of one rank, the second one what a
step takes. ``--docs`` writes both into docs/benchmarks.md.

dion is not on PyPI: ``--dion FOLDER`` takes a checkout of it. Without one its column is empty.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pages
import torch
import torch.distributed as dist
from counting import Allocations
from newton_schulz import exact
from peers_exactness import CASES, COLUMNS, MODES, WHOLE, Figures, MegatronsMuon, beside_one, dions, ours
from quiet import Load, add_flag
from ranks import on_ranks, seconds_in_turns
from tensor_parallel import LAYERS, MATRICES, OUT, parameters, whole_matrices
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter
from torch.utils.flop_counter import flop_registry
from training import processor

from megatron_eopt import TensorParallelMuon

PAGE = pages.DOCS / "benchmarks.md"
SCALE = 0.2
PRODUCTS = {"medium": "bf16", "highest": "fp32"}


class Counted(Allocations):
    """Matrix products, their operations, collectives and allocations of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.operations = self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it, of a DTensor those on its shard."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        self.collectives += func.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor"
        count = flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_"), None))
        if func.namespace == "aten" and count is not None:
            self.products += 1
            given = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            self.operations += count(*args, **given, out_val=result)
        return result


def steps_of(rank: int, ranks: int, precision: Any) -> dict[str, torch.optim.Optimizer]:
    """Contestant -> an optimizer of the matrices of a small model, with gradients; all scales match AdamW's."""
    groups: Any = SimpleNamespace(tp=dist.group.WORLD, expt_tp=dist.group.WORLD, gtp_remat=None, expt_gtp_remat=None)
    common: dict[str, Any] = {"lr": 1e-3, "momentum": 0.95, "fp32_matmul_prec": precision, "pg_collection": groups}
    shards = partial(parameters, rank, ranks)
    found: dict[str, torch.optim.Optimizer] = {
        COLUMNS[0]: TensorParallelMuon(shards(), tp_mode="auto", **common),
        ours("blockwise"): TensorParallelMuon(shards(), tp_mode="blockwise", **common),
    }
    found |= {mode: MegatronsMuon(shards(), tp_mode=mode, **common) for mode in MODES}
    if precision == "medium":
        mesh = init_device_mesh("cpu", (ranks,))
        found["torch"] = torch.optim.Muon(dtensors(mesh), lr=1e-3, adjust_lr_fn="match_rms_adamw")
        if dion := dions():
            found["dion"] = dion.Muon(
                dtensors(mesh), mesh, lr=1e-3, nesterov=True, adjust_lr="rms_norm", use_polar_express=False
            )
    return found


def dtensors(mesh: Any) -> list[Parameter]:
    """The same shards as DTensors."""
    found = []
    for (matrix, gradient), dim in zip(whole_matrices(), [m[2] for m in MATRICES.values()] * LAYERS, strict=True):
        found.append(Parameter(distribute_tensor(matrix, mesh, [Shard(dim)])))
        found[-1].grad = distribute_tensor(gradient, mesh, [Shard(dim)])
    return found


def taken(rank: int, ranks: int, rounds: int) -> dict[str, Figures]:
    """Milliseconds of the slowest rank (median, least, most of the rounds), and counts of this rank's, by precision."""
    found: dict[str, Figures] = {}
    for precision in PRODUCTS:
        steps = steps_of(rank, ranks, precision)
        seconds = seconds_in_turns({name: optimizer.step for name, optimizer in steps.items()}, rounds)
        figures: Figures = {"ms": {}, "least": {}, "most": {}}
        for name, of_rounds in seconds.items():
            for kind, of_kind in (("ms", statistics.median), ("least", min), ("most", max)):
                figures[kind][name] = 1e3 * of_kind(of_rounds)
        with torch.compiler.set_stance("force_eager"):
            for name, optimizer in steps.items():
                with Counted() as counted:
                    optimizer.step()
                held = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
                state = sum(x.numel() * x.element_size() for x in held)
                size = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
                for row, figure in (
                    ("products", counted.products),
                    ("GFLOP", counted.operations / 1e9),
                    ("collectives", counted.collectives),
                    ("MiB", counted.peak / 2**20),
                    ("state", state / size),
                ):
                    figures.setdefault(row, {})[name] = figure
        found[precision] = figures
    return found


def errors(precision: Any) -> dict[str, float]:
    """How far an update is from that of the same polynomial in fp64, of one process: a matrix of condition 1e7."""
    u, _, v = torch.linalg.svd(torch.randn(1792, 512, generator=torch.Generator().manual_seed(0)), full_matrices=False)
    gradient = (u * torch.logspace(0, -7, 512)) @ v
    common: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0}
    for_megatron = {**common, "fp32_matmul_prec": precision, "extra_scale_factor": SCALE}
    ways: dict[str, tuple[Callable[[list[Parameter]], Any], str]] = {
        COLUMNS[0]: (lambda p: TensorParallelMuon(p, **for_megatron), "quintic"),
        "Megatron": (lambda p: MegatronsMuon(p, **for_megatron), "quintic"),
    }
    if precision == "medium":
        ways["torch"] = (lambda p: torch.optim.Muon(p, adjust_lr_fn="match_rms_adamw", **common), "simple")
        if dion := dions():
            quintic = {"adjust_lr": "rms_norm", "use_polar_express": False}
            ways["dion"] = (lambda p: dion.Muon(p, **quintic, **common), "quintic")
    found = {}
    with torch.compiler.set_stance("force_eager"):
        for name, (build, coefficients) in ways.items():
            p = Parameter(torch.zeros_like(gradient))
            p.grad = gradient
            build([p]).step()
            update = -p.detach().double() / (SCALE * max(p.shape) ** 0.5)
            expected = exact(gradient, coefficients)
            found[name] = float((update - expected).norm() / expected.norm())
    return found


def exactness_table(found: Mapping[int, Figures]) -> str:
    """How far updates are from those of one rank, at each number of ranks."""
    rows = []
    for name in CASES:
        at = [figures[name] for figures in found.values()]
        cells = {way: " / ".join(_small(figures[way]) for figures in at) for way in at[0]}
        by_default = cells | {"Megatron": cells[MODES[-1] if name == WHOLE else MODES[0]]}
        rows.append((name, *(by_default.get(column, "-") for column in COLUMNS)))
        if name == WHOLE:
            rows += [(f"the same, `{mode}`", cells[ours(mode)], cells[mode], "-", "-") for mode in MODES[1:]]
    return pages.markdown((" / ".join(f"{ranks} ranks" for ranks in found), *COLUMNS), rows)


def _small(value: float) -> str:
    return f"{value:.2g}" if value >= 0.01 else f"{value:.0e}".replace("e-0", "e-") if value else "0"


COUNTS = {
    "products": ("products", ",.0f"),
    "GFLOP": ("GFLOP", ".0f"),
    "collectives": ("collectives", ",.0f"),
    "MiB": ("temporaries, MiB", ".0f"),
}


def step_table(found: Mapping[int, Mapping[str, Figures]], fp64: Mapping[str, Mapping[str, float]]) -> str:
    """What a step takes: median, least and most of its times, beside the fastest exact one of the row, and counts."""
    rows = []

    def row(label: str, cells: Mapping[str, str]) -> None:
        rows.append((label, *(cells.get(column, "-") for column in COLUMNS)))

    for precision, name in PRODUCTS.items():
        for ranks, of_ranks in found.items():
            figures = of_ranks[precision]
            ms = figures["ms"]
            mode = min(MODES[:2], key=ms.__getitem__)
            exacts = {x: x for x in ms if x in COLUMNS} | {"Megatron": mode}
            best = min(ms[x] for x in exacts.values())
            cells = {}
            for column, x in exacts.items():
                cells[column] = f"{ms[x]:.0f} ({figures['least'][x]:.0f}-{figures['most'][x]:.0f}) {ms[x] / best:.2f}"
            row(f"ms, TP {ranks}, {name}", cells | {"Megatron": f"{cells['Megatron']} {mode}"})
            of_shards = {COLUMNS[0]: ms[ours("blockwise")], "Megatron": ms["blockwise"]}
            row(f"ms, TP {ranks}, {name}, `blockwise`", {x: f"{value:,.0f}" for x, value in of_shards.items()})
    for key, (label, form) in COUNTS.items():
        for ranks, of_ranks in found.items():
            cells = {x: format(value, form) for x, value in of_ranks["medium"][key].items()}
            row(f"{label}, TP {ranks}", cells | {"Megatron": ", ".join(cells[mode] for mode in MODES[:2])})
    state = next(iter(found.values()))["medium"]["state"]
    row("state, bytes an entry", {x: f"{value:.2f}" for x, value in (state | {"Megatron": state[MODES[0]]}).items()})
    for precision, name in PRODUCTS.items():
        row(f"error beside fp64, {name}", {x: _small(value) for x, value in fp64[precision].items()})
    return pages.markdown(("", *COLUMNS), rows)


def machine(load: Load) -> str:
    """What the figures were measured on, in words."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core", "emerging-optimizers"))
    return f"{processor()}, {os.cpu_count()} cores, one thread a rank; {versions}; {load.words}."


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5, help="how often every step is timed; 0: none is")
    parser.add_argument("--dion", type=Path, metavar="FOLDER", help="a checkout of microsoft/dion")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/benchmarks.md, too; needs dion")
    add_flag(parser)
    arguments = parser.parse_args(argv)
    if arguments.dion:
        sys.path.insert(0, str(arguments.dion.resolve()))
    if arguments.docs and not dions():
        parser.error("docs/benchmarks.md has a column of dion, and dion is not installed: pass --dion FOLDER")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    load = Load(max(arguments.ranks), arguments.any_load or not arguments.rounds)
    tables = {"exactness": exactness_table({ranks: on_ranks(beside_one, ranks) for ranks in arguments.ranks})}
    print(f"how far updates are from those of one rank\n{tables['exactness']}\n", flush=True)
    if arguments.rounds:
        found = {ranks: on_ranks(taken, ranks, arguments.rounds) for ranks in arguments.ranks}
        load.check()
        fp64 = {precision: errors(precision) for precision in PRODUCTS}
        tables["steps"] = f"{step_table(found, fp64)}\n\nMeasured on: {machine(load)}"
        print(tables["steps"])
        OUT.mkdir(exist_ok=True)
        (OUT / "peers.json").write_text(json.dumps({"steps": found, "errors": fp64}, indent=2))
    if arguments.docs:
        for mark, lines in tables.items():
            pages.put(PAGE, mark, lines)


if __name__ == "__main__":
    main()
