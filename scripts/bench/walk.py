"""The walk of a gradient through one step: which files of the package it enters, how often, how deep.

``make walk`` prints it, on one process and on two ranks.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from timing import on_ranks

import megatron_eopt
from megatron_eopt.family import OPTIMIZERS

PACKAGE = Path(megatron_eopt.__file__).parent


@dataclass
class Walk:
    """What one step enters.

    Attributes:
        files: names of the files of the package, in the order in which they are first entered.
        calls: of functions of the package.
        stays: how often the walk goes from one file to another.
        depth: of functions of the package on the stack.
    """

    files: list[str] = field(default_factory=list)
    calls: int = 0
    stays: int = 0
    depth: int = 0


def walk(run: Callable[[], Any]) -> Walk:
    """What a function enters."""
    found, stack = Walk(), [""]
    last = ""

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal last
        file = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not file.is_relative_to(PACKAGE):
            return
        # a comprehension or a generator expression is a line of its function, not a stop of its own
        if frame.f_code.co_name.startswith("<"):
            return
        if event == "return":
            stack.pop()
            return
        name = str(file.relative_to(PACKAGE))
        stack.append(name)
        found.calls += 1
        found.depth = max(found.depth, len(stack) - 1)
        found.stays += name != last
        last = name
        if name not in found.files:
            found.files.append(name)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def one_step(make: Callable[..., torch.optim.Optimizer], sharded: bool = False, **settings: Any) -> Walk:
    """The walk of the second step of an optimizer with two matrices, 128 x 64.

    Args:
        make: the optimizer's class, or what builds it.
        sharded: whether the matrices are cut along their rows over all ranks.
        **settings: of the optimizer.
    """
    ranks = dist.get_world_size() if sharded else 1
    params = [torch.nn.Parameter(torch.randn(128 // ranks, 64)) for _ in range(2)]
    if sharded:
        settings["pg_collection"] = SimpleNamespace(tp=dist.group.WORLD, expt_tp=None)
        for p in params:
            p.tensor_model_parallel, p.partition_dim = True, 0  # type: ignore[attr-defined]
    optimizer = make(params, **settings)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    return walk(optimizer.step)


def of_all(rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """The walk of every optimizer on one of so many tensor-parallel ranks."""
    return {name: asdict(one_step(row.cls, sharded=ranks > 1)) for name, row in OPTIMIZERS.items()}


def line(name: str, found: Walk) -> str:
    """A row of the table."""
    return f"{name:<24}{len(found.files):>7}{found.calls:>8}{found.depth:>7}{found.stays:>7}"


def main() -> None:
    """Print the walks of all optimizers, and the files of Muon's."""
    print(f"{'one process':<24}{'files':>7}{'calls':>8}{'depth':>7}{'stays':>7}")
    alone = {name: Walk(**found) for name, found in of_all().items()}
    for name, found in alone.items():
        print(line(name, found))
    print("\ntwo ranks, TP=2")
    both = {name: Walk(**found) for name, found in on_ranks(of_all, 2).items()}
    for name, found in both.items():
        print(line(name, found))
    files = alone["muon"].files
    print("\nmuon:", ", ".join(files))
    print("with TP=2 also:", ", ".join(sorted({*both["muon"].files} - {*files})))


if __name__ == "__main__":
    main()
