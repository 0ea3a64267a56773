"""Show that a change of code keeps the bits: record every optimizer before it and after it, and compare.

::

    PYTHONPATH=BEFORE python scripts/bench/bits.py record before.pt    # BEFORE: a checkout of the commit before
    PYTHONPATH=. python scripts/bench/bits.py record now.pt
    python scripts/bench/bits.py compare before.pt now.pt

A record has for each case, which is an optimizer in a layout, dtype and precision, and for each of its ranks: the
weights after each of ten steps, the state dict at the end, the collectives in their order, and the messages.
"""

import argparse
import inspect
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bits_cases import CASES, RANKS, VARIANTS, Case, build, join, make_parameters, set_gradients
from torch import Tensor
from torch.distributed.tensor import DTensor

import megatron_eopt as eopt
from megatron_eopt.parallel.collectives import counters

STEPS = 10
COLLECTIVES = (
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier broadcast "
    "broadcast_object_list gather new_group recv reduce reduce_scatter reduce_scatter_tensor scatter send".split()
)


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


def run(case: Case, dtype: torch.dtype, precision: str, beta: float, layout: str, groups: Any, log: Log) -> Any:
    """What a rank records of a case; the last two steps are those of another optimizer that has loaded the state."""
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
    return {
        "weights": {name: torch.stack([of_step[name] for of_step in weights]) for name in parameters},
        "state": plain(optimizer.state_dict()),
        "counters": {"calls": dict(counters.calls), "bytes": dict(counters.bytes)},
        **{"collectives": log.collectives, "messages": log.messages},
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
    are_counts = isinstance(x, list) and set(map(type, x)) == {int}
    return str(x) if are_counts or isinstance(x, int | str | dist.ReduceOp.RedOpType | None) else type(x).__name__


def on_rank(rank: int, layout: str, beta: float, folder: Path) -> None:
    """Run all cases of a layout and save what is recorded."""
    torch.set_num_threads(1)
    groups, log, found = join(rank, layout, folder), Log(), {}
    for name, case in CASES.items():
        if layout in case.layouts:
            for dtype, precision in VARIANTS[:: 3 if layout in ("TP=4", "FSDP2") else 1]:  # which take long
                taken = run(case, dtype, precision, beta, layout, groups, log)
                found[f"{layout}, {name}, {dtype}, {precision}"] = taken
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
            mp.start_processes(on_rank, (layout, beta, folder), nprocs=ranks, start_method="spawn")
            for rank in range(ranks):
                for case, found in torch.load(folder / f"{layout} {rank}.pt").items():
                    cases.setdefault(case, {})[f"rank {rank}"] = found
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
    return x.contiguous().view(x.numel(), 1).view(torch.uint8)


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The first difference of each case."""
    firsts = (next(differences(a.get(case), b.get(case), case), None) for case in {**a, **b})
    return [first for first in firsts if first is not None]


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("files", nargs="+", help="one to record, two to compare")
    parser.add_argument("--beta", type=float, default=0.95, help="momentum; with another one every case has to differ")
    options = parser.parse_args()
    if len(options.files) != (1 if options.command == "record" else 2):
        parser.error("record takes one file, compare takes two")
    if options.command == "record":
        print(f"recording {Path(eopt.__file__).parent}", flush=True)
        cases = record(options.beta)
        torch.save(cases, options.files[0])
        print(f"{len(cases)} cases")
        return 0
    a, b = (torch.load(file) for file in options.files)
    found = compare(a, b)
    print(*found, f"{len({**a, **b})} cases, {len(found)} differ", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
