"""Show that a change of code keeps the bits: record every optimizer before it and after it, and compare.

::

    PYTHONPATH=BEFORE python benchmarks/bits.py record before.pt    # BEFORE: a checkout of the commit before
    PYTHONPATH=. python benchmarks/bits.py record now.pt
    python benchmarks/bits.py compare before.pt now.pt

A record has for each case, which is an optimizer in a layout, dtype and precision, and for each of its ranks: the
weights after each of ten steps, the state dict at the end, and the collectives in their order. ``--beta`` gives another
momentum: every case has to differ then.
"""

import argparse
import inspect
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import megatron_eopt as eopt
from megatron_eopt.parallel.collectives import counters

STEPS = 10
RANKS = {"one process": 1, "TP=2": 2, "TP=4": 4, "DP=2": 2, "FSDP2": 2}
SHARDED, ALONE, UNCUT_OR_TP = ("TP=2", "TP=4", "FSDP2"), ("one process",), ("one process", "TP=2", "TP=4", "DP=2")
# shape, the dimension that tensor parallelism cuts, and further attributes
SHAPES: dict[str, tuple[tuple[int, ...], int | None, dict[str, Any]]] = {
    "tall": ((24, 16), 0, {}),
    "wide": ((16, 40), 1, {}),
    "qkv": ((32, 12), 0, {"qkv_split_shapes": [8, 4, 4]}),
    "odd": ((33, 12), None, {}),
    "tall_too": ((24, 16), 0, {}),
    "A": ((40, 4), 0, {}),
    "B": ((23, 4), None, {}),
    "vector": ((17,), None, {}),
}
MATRICES = ("tall", "wide", "qkv", "odd", "tall_too")
COLLECTIVES = (
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier broadcast "
    "broadcast_object_list gather new_group recv reduce reduce_scatter reduce_scatter_tensor scatter send".split()
)
VARIANTS = [(dtype, precision) for dtype in (torch.float32, torch.bfloat16) for precision in ("highest", "medium")]


@dataclass(frozen=True)
class Case:
    """An optimizer with its settings."""

    cls: str
    settings: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[str, ...] = tuple(RANKS)
    names: tuple[str, ...] = MATRICES  # of its parameters
    second: dict[str, Any] = field(default_factory=dict)  # settings of the second group
    late: bool = False  # a parameter gets its first gradient in the fifth step


ADAPTIVE, MUON, ALL = "TensorParallelAdaptiveMuon", "TensorParallelMuon", (*MATRICES, "vector")
FUNCTIONS = {"orthogonalize_fn": torch.sign, "scale_factor_fn": lambda rows, cols: 0.2}
NO_DEFAULTS = {"split_qkv": False, "use_nesterov": True, "weight_decay": 0.1, "use_decoupled_weight_decay": True}
OWN_OF_GROUP = {"momentum": 0.8, "weight_decay": 0.2, "nesterov": False}
TWO_CHUNKS = {"workspace": 2**13}
CASES = {
    "muon": Case(MUON),
    **{f"muon {m}": Case(MUON, {"tp_mode": m}, SHARDED) for m in ("duplicated", "owner", "gram", "distributed")},
    "muon blockwise": Case(MUON, {"tp_mode": "blockwise"}, ("TP=2",)),
    "muon whole qkv": Case(MUON, {"split_qkv": False}),
    "muon groups": Case(MUON, {"momentum_warmup": 4}, second=OWN_OF_GROUP),
    "muon chunks": Case(MUON, TWO_CHUNKS),
    "muon bf16 momentum": Case(MUON, {"momentum_dtype": torch.bfloat16, **TWO_CHUNKS}),
    "muon offload": Case(MUON, {"offload_fraction": 0.5, **TWO_CHUNKS}, UNCUT_OR_TP),
    "muon late": Case(MUON, {"nesterov": False, "momentum_warmup": 4}, late=True),
    "muon coefficients": Case(
        MUON, {"coefficient_type": "polar_express", "num_ns_steps": 7, "scale_mode": "shape_scaling"}
    ),
    **{
        f"muon {m} decay": Case(MUON, {"weight_decay": 0.1, "weight_decay_method": m})
        for m in ("l2", "independent", "palm")
    },
    **{f"adaptive {m}": Case(ADAPTIVE, {"moment2_method": m}) for m in ("adamuon", "normuon", "namo")},
    "adaptive chunks": Case(ADAPTIVE, {"moment2_method": "normuon", **TWO_CHUNKS}, late=True),
    "adaptive not aligned": Case(ADAPTIVE, {"align_rms": False, "offload_fraction": 0.5}, UNCUT_OR_TP),
    "spectron": Case("Spectron", {"rank": 3}),
    "spectron pairs": Case("Spectron", {"rank": 3}, names=(*MATRICES, "A", "B"), late=True),
    "soap previous": Case("SOAP", {"precondition_frequency": 2}, names=ALL),
    "soap current": Case("SOAP", {"basis_of": "current", "basis_method": "eigh", "max_dim": 30}, names=ALL),
    "soap kl": Case(
        "SOAP", {"use_kl_shampoo": True, "precondition_frequency": 3, "nesterov": True}, names=ALL, late=True
    ),
    "lion": Case("Lion", {"weight_decay": 0.1}, names=ALL, late=True),
    "lion l2": Case("Lion", {"weight_decay": 0.1, "weight_decay_method": "l2"}, names=ALL),
    "signum": Case("Signum", {"weight_decay": 0.1}, names=ALL),
    "schedule_free": Case("ScheduleFreeAdamW", {"warmup_steps": 2, "weight_decay": 0.1}, names=ALL, late=True),
    "schedule_free schedulefree": Case("ScheduleFreeAdamW", {"variant": "schedulefree", "r": 1.0}, names=ALL),
    "scion": Case("Scion"),
    "scion unconstrained": Case("Scion", {"constrained": False, "momentum_warmup": 4, **TWO_CHUNKS}),
    "polargrad": Case("PolarGrad"),
    "polargrad chunks": Case("PolarGrad", {"nesterov": True, **TWO_CHUNKS}, late=True),
    "hyperball": Case("MuonHyperball"),
    "hyperball chunks": Case("MuonHyperball", {"momentum_warmup": 4, **TWO_CHUNKS}, late=True),
    "mars": Case("MarsMuon"),
    "mars chunks": Case("MarsMuon", {"gamma": 0.5, **TWO_CHUNKS}, late=True),
    "with_adamw": Case("Muon", {"weight_decay": 0.1}, names=ALL, second={"ns_steps": 3}),
    "distributed_muon": Case("DistributedMuon", {"collective_state_dict": True}, ("one process", "DP=2")),
    "users functions": Case("OrthogonalizedOptimizer", {**FUNCTIONS, **NO_DEFAULTS}, ALONE),
    "users orthogonalize": Case("Own", {"momentum_dtype": torch.bfloat16}),
}


class Own(eopt.TensorParallelMuon):
    """A user's own."""

    def orthogonalize(self, p: Tensor, grad: Tensor, **group_settings: Any) -> Tensor:
        """Half of Muon's."""
        return 0.5 * super().orthogonalize(p, grad, **group_settings)


def build(
    case: Case, parameters: dict[str, nn.Parameter], precision: str, beta: float, groups: Any, layout: str
) -> Any:
    """The optimizer of a case, with two groups."""
    cls: Any = Own if case.cls == "Own" else getattr(eopt, case.cls)
    written = eopt.TensorParallelMuon if case.cls == "Muon" else cls.__init__  # Muon's **muon_settings are those
    takes = {**inspect.signature(written).parameters, **inspect.signature(cls).parameters}
    usual: dict[str, Any] = {
        **{"momentum": beta, "momentum_beta": beta, "betas": (beta, 0.98), "fp32_matmul_prec": precision},
        **{"split_qkv": True, "is_qkv_fn": lambda p: hasattr(p, "qkv_split_shapes"), "qkv_split_shapes": (1, 1, 1)},
        **{"tp_mode": "auto", "pg_collection": groups, "share_over_dp": layout == "DP=2"},
        **({"data_parallel_group": dist.group.WORLD} if layout == "DP=2" else {}),
    }
    settings = {name: value for name, value in usual.items() if name in takes} | {"lr": 0.02} | case.settings
    matrices = [p for name, p in parameters.items() if name in MATRICES]
    rest = [p for name, p in parameters.items() if name not in MATRICES]
    second = matrices[3:] if "A" in parameters or case.cls == "Muon" else [*matrices[3:], *rest]
    both = [{"params": matrices[:3]}, {"params": second, "lr": 0.03, **case.second}]
    if "A" in parameters:
        both.append(eopt.factor_pairs([rest]))
    return cls(both, rest, **settings) if case.cls == "Muon" else cls(both, **settings)


def make_parameters(names: tuple[str, ...], dtype: torch.dtype, layout: str) -> dict[str, nn.Parameter]:
    """The parameters of this rank."""
    model = nn.Module()
    for index, name in enumerate(names):
        weight = draw(name, index).to(dtype)
        model.register_parameter(name, nn.Parameter(cut(weight, name, layout)))
    if layout == "FSDP2":
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS[layout],)))
    for name, p in model.named_parameters():
        _, dim, attributes = SHAPES[name]
        of_shard = {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": 1}
        for key, value in (attributes | (of_shard if layout in ("TP=2", "TP=4") and dim is not None else {})).items():
            setattr(p, key, value)
    return dict(model.named_parameters())


def draw(name: str, seed: int) -> Tensor:
    """Random numbers in the shape of a parameter."""
    return torch.randn(SHAPES[name][0], generator=torch.Generator().manual_seed(seed))


def cut(x: Tensor, name: str, layout: str) -> Tensor:
    """This rank's shard under tensor parallelism."""
    dim = SHAPES[name][1]
    if dim is None or layout not in ("TP=2", "TP=4"):
        return x
    return x.chunk(RANKS[layout], dim)[dist.get_rank()].contiguous()


def set_gradients(parameters: dict[str, nn.Parameter], step: int, layout: str, late: bool) -> None:
    """Those of a step: some are missing, and one is not finite."""
    for index, (name, p) in enumerate(parameters.items()):
        gradient = draw(name, 1000 + 100 * step + index)
        if step == 5 and name == "tall":
            gradient[3, 2] = torch.inf
        is_missing = step == 7 or (step == 3 and name == "wide") or (late and step < 4 and name in ("odd", "A"))
        gradient = cut(gradient, name, layout).to(p.dtype)
        if isinstance(p, DTensor):
            gradient = distribute_tensor(gradient, p.device_mesh, [Shard(0)], src_data_rank=None)
        p.grad = None if is_missing else gradient


class Log(logging.Handler):
    """Keeps the messages of this process, in place of printing them, and its collectives with sizes and ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[str] = []
        self.messages: list[str] = []
        for name in COLLECTIVES:
            setattr(dist, name, partial(self.call, name, getattr(dist, name)))
        logging.getLogger("megatron_eopt").addHandler(self)
        logging.getLogger("megatron_eopt").propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.messages.append(record.getMessage())

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note a collective and start it."""
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        noted = ", ".join(f"{key} {size(x)}" for key, x in sorted(given.items()) if key != "async_op")
        self.collectives.append(f"{name} {noted}")
        return function(*args, **kwargs)


def run(case: Case, variant: tuple[torch.dtype, str], beta: float, layout: str, groups: Any, log: Log) -> Any:
    """What a rank records of a case; the last two steps are those of another optimizer that has loaded the state."""
    dtype, precision = variant
    parameters = make_parameters(case.names, dtype, layout)
    make = partial(build, case, parameters, precision, beta, groups, layout)
    log.collectives, log.messages = [], []
    optimizer, weights = make(), []
    counters.reset()
    for step in range(STEPS):
        log.collectives.append(f"step {step}")
        set_gradients(parameters, step, layout, case.late)
        if step == STEPS - 2:
            state = optimizer.state_dict()
            optimizer = make()
            optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
        weights.append({name: plain(p) for name, p in parameters.items()})
    stacked = {name: torch.stack([of_step[name] for of_step in weights]) for name in parameters}
    counted = {"calls": dict(counters.calls), "bytes": dict(counters.bytes)}
    return {
        "weights": stacked,
        "state": plain(optimizer.state_dict()),
        "counters": counted,
        "collectives": log.collectives,
        "messages": log.messages,
    }


def plain(value: Any) -> Any:
    """A copy of tensors and plain values, with the shards of DTensors."""
    if isinstance(value, Tensor):
        return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if isinstance(value, int | float | str | None) else str(value)


def size(x: Any) -> str:
    """What is noted of an argument of a collective."""
    if isinstance(x, Tensor):
        return f"{x.numel()} {x.dtype}"
    if isinstance(x, dist.ProcessGroup):
        return f"{dist.get_process_group_ranks(x)}"
    is_plain = isinstance(x, int | str | None) or (isinstance(x, list) and all(type(each) is int for each in x))
    return str(x) if is_plain else type(x).__name__


def on_rank(rank: int, layout: str, beta: float, folder: Path) -> None:
    """Run all cases of a layout and save what is recorded."""
    torch.set_num_threads(1)
    groups: Any = None
    if layout != "one process":
        store = dist.FileStore(str(folder / f"{layout} store"), RANKS[layout])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS[layout], timeout=timedelta(seconds=60))
        world = dist.group.WORLD
        alone = [dist.new_group([each]) for each in range(RANKS[layout])][rank]
        tp = world if layout.startswith("TP") else alone
        groups = SimpleNamespace(tp=tp, expt_tp=tp, dp_cp=world if layout == "DP=2" else alone)
    log, found = Log(), {}
    for name, case in CASES.items():
        if layout in case.layouts:
            for dtype, precision in VARIANTS[:: 3 if layout == "TP=4" else 1]:  # four ranks take long
                found[f"{layout}, {name}, {dtype}, {precision}"] = run(
                    case, (dtype, precision), beta, layout, None if layout == "FSDP2" else groups, log
                )
    torch.save(found, folder / f"{layout} {rank}.pt")
    if groups:
        dist.barrier()
        dist.destroy_process_group()


def record(beta: float) -> dict[str, Any]:
    """All cases of all layouts, with what each rank recorded."""
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for layout, ranks in RANKS.items():
            began = time.monotonic()
            mp.start_processes(on_rank, (layout, beta, folder), nprocs=ranks, start_method="spawn")
            for rank in range(ranks):
                for case, found in torch.load(folder / f"{layout} {rank}.pt").items():
                    cases.setdefault(case, {})[f"rank {rank}"] = found
            print(f"{layout}: {time.monotonic() - began:.0f} s", flush=True)
    return cases


def differences(a: Any, b: Any, place: str = "") -> Iterator[str]:
    """Where two values differ, in bits."""
    if type(a) is not type(b):
        yield f"{place}: {type(a).__name__} | {type(b).__name__}"
    elif isinstance(a, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            if key in a and key in b:
                yield from differences(a[key], b[key], f"{place}/{key}")
            else:
                yield f"{place}/{key}: only in the {'first' if key in a else 'second'}"
    elif isinstance(a, list):
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from differences(x, y, f"{place}/{index}")
        if len(a) != len(b):
            yield f"{place}: {len(a)} | {len(b)} values"
    elif isinstance(a, Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{place}: {a.dtype} {[*a.shape]} | {b.dtype} {[*b.shape]}"
        elif not torch.equal(bits(a), bits(b)):
            at = (bits(a) != bits(b)).any(1).nonzero()
            entry = tuple(int(i) for i in torch.unravel_index(at[0, 0], a.shape))
            values = f"{a[entry].item()!r} | {b[entry].item()!r}"
            yield f"{place}: {len(at)} of {a.numel()} entries, first {[*entry]}: {values}"
    elif a != b and not (a != a and b != b):
        yield f"{place}: {a!r} | {b!r}"


def bits(x: Tensor) -> Tensor:
    """The bytes of each entry."""
    return x.contiguous().view(-1, 1).view(torch.uint8)


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The first difference of each case."""
    firsts = (next(differences(a.get(case), b.get(case), case), None) for case in {**a, **b})
    return [first for first in firsts if first is not None]


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file")
    recording.add_argument("--beta", type=float, default=0.95)
    comparing = commands.add_parser("compare")
    comparing.add_argument("files", nargs=2)
    options = parser.parse_args()
    if options.command == "record":
        print(f"recording {Path(eopt.__file__).parent}")
        cases = record(options.beta)
        torch.save(cases, options.file)
        print(f"{len(cases)} cases")
        return 0
    a, b = (torch.load(file) for file in options.files)
    found = compare(a, b)
    print(*found, f"{len({**a, **b})} cases, {len(found)} differ", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
