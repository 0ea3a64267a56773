"""Count what a whole step launches on a GPU, and the bytes it moves. No GPU is needed.

A step runs on CUDA tensors without numbers, with the kernels that a GPU would take left out. A multi-tensor call counts
as the kernels that torch makes of it, by its limits of tensors and blocks, and as one a tensor where tensors are not
alike. Bytes are those of each operation's tensors, read and written once; what a library's call takes inside is unseen.
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from counting import HOST_READ, bytes_of_kernel, counted_kernels, launches, moved
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.kernels import triton_kernel, triton_norms
from megatron_eopt.settings.execution import gathered

LAYER: tuple[tuple[int, ...], ...] = ((2304, 768), (768, 768), (3072, 768), (768, 3072))  # of a GPT of 124M
SETS: dict[str, Sequence[tuple[int, ...]]] = {
    "124M": LAYER * 12,
    "1.3B": [(6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192)] * 24,
    "small": [(512, 512)] * 400 + [(512, 2048)] * 200,
    "experts": [(768, 2048)] * 768,
}
STEPS = 4  # the last one is counted

METHODS = ("adamuon", "normuon", "namo")
# the name of the row, and its settings
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "muon": ("muon", {}),
    **{method: ("adaptive_muon", {"moment2_method": method}) for method in METHODS},
    **{name: (name, {}) for name in OPTIMIZERS if name not in ("muon", "adaptive_muon")},
    "spectron": ("spectron", {"rank": 16}),
    "soap": ("soap", {"precondition_frequency": 1}),
}

_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # of one multi-tensor kernel, by the number of lists
_BLOCK = 65536  # entries
_BLOCKS = 320


def multi_tensor_launches(lists: Sequence[Sequence[Tensor]], casts: bool) -> int:
    """Kernels of one multi-tensor call, which may cast."""
    first = lists[0]
    for tensors in lists:
        for x, y in zip(first, tensors, strict=True):
            if (x.dtype != y.dtype and not casts) or x.shape != y.shape or x.stride() != y.stride():
                return len(first)
    blocks = sum(-(-x.numel() // _BLOCK) for x in first)
    return max(-(-len(first) // _TENSORS[len(lists)]), -(-blocks // _BLOCKS))


class Launches(TorchDispatchMode):
    """Counts kernels by name, and the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def count(self, name: str, tensors: Sequence[Tensor], launched: int = 1) -> None:
        """Count an operation."""
        self.kernels[name] += launched
        self.bytes[name] += sum(x.numel() * x.itemsize for x in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it."""
        name = func.overloadpacket.__name__
        if name == HOST_READ and args[0].device.type == "cuda":
            self.kernels["wait of the host"] += 1
            return 1.0 if args[0].dtype.is_floating_point else 1
        result = func(*args, **(kwargs or {}))
        if launches(func) and name not in (HOST_READ, "device"):
            read, written = moved(func, args, kwargs, result)
            launched = 1
            if name.startswith("_foreach"):
                lists = [x for x in args if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
                if name == "_foreach_norm":
                    launched = 1 + multi_tensor_launches(lists, casts=True)  # sums of blocks, and of these
                else:
                    if result is not None:
                        lists.append(written)
                    launched = multi_tensor_launches(lists, casts=name == "_foreach_copy_")
            self.count(name, [*read, *written], launched)
        return result


@contextmanager
def without_kernels(counted: Launches) -> Iterator[None]:
    """Count the kernels of Triton in place of running them."""

    def launched(kernel: Any, x: Any, other: Tensor) -> None:
        counted.kernels[kernel.__name__] += 1
        counted.bytes[kernel.__name__] += bytes_of_kernel(kernel, x, other)

    def symmetric_product(a: Tensor, b: Tensor, c: Any = None, *, out: Any = None, **settings: Any) -> Tensor:
        result: Tensor = a.new_empty(*a.shape[:-1], a.size(-2)) if out is None else out
        read = [a] if a is b else [a, b]
        counted.count("symmetric_product", [*read, *([] if c is None else [c]), result])
        return result

    def normalized(x: Tensor, dtype: torch.dtype, *, into: Tensor | None, **settings: Any) -> Tensor:
        result = torch.empty(x.shape, dtype=dtype, device=x.device) if into is None else into
        counted.count("normalized", [x, x, result], 3)
        return result

    with ExitStack() as patches:
        patches.enter_context(counted_kernels(launched, lambda: counted.count("table", [])))
        patches.enter_context(patch.object(triton_kernel, "symmetric_product", symmetric_product))
        patches.enter_context(patch.object(triton_norms, "normalized", normalized))
        yield


def launches_of_step(name: str, shapes: Sequence[tuple[int, ...]], **settings: Any) -> Launches:
    """What the fourth step of an optimizer launches, of a row of the family."""
    counted = Launches()
    row = OPTIMIZERS[name]
    settings = {"lr": 0.01, **settings}
    if row.takes("fp32_matmul_prec"):
        settings.setdefault("fp32_matmul_prec", "medium")
    if row.takes("symmetric_products"):
        settings.setdefault("symmetric_products", "triton")
    with ExitStack() as modes:
        modes.enter_context(without_kernels(counted))
        modes.enter_context(FakeTensorMode())
        parameters = [torch.nn.Parameter(torch.empty(shape, device="cuda")) for shape in shapes]
        for p in parameters:
            p.grad = torch.empty_like(p)
        optimizer = row.cls(parameters, **gathered(row.cls, settings))
        modes.enter_context(counted)
        for _ in range(STEPS):
            counted.kernels.clear()
            counted.bytes.clear()
            optimizer.step()
    return counted


def main() -> None:
    """Print a table of launches and bytes, or what one optimizer launches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--set", choices=SETS, default="124M", help="the matrices")
    parser.add_argument("--kernels", action="store_true", help="also list kernels by name")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(CASES))
    if unknown:
        parser.error(f"unknown {', '.join(unknown)}: choose from {', '.join(CASES)}")
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    shapes = SETS[args.set]
    entries = sum(rows * cols for rows, cols in shapes)
    print(f"{args.set}: {len(shapes)} matrices, {entries / 1e6:.0f} M entries")
    print(f"{'':32}{'launches':>10}{'bytes an entry':>16}")
    for label in args.names or CASES:
        name, settings = CASES[label]
        counted = launches_of_step(name, shapes, **settings)
        total = sum(counted.bytes.values()) / entries
        print(f"{label:32}{counted.kernels.total():10,}{total:16.1f}", flush=True)
        if args.kernels:
            for kernel, count in counted.kernels.most_common():
                print(f"    {kernel:32}{count:6,}{counted.bytes[kernel] / entries:16.1f}")


if __name__ == "__main__":
    main()
