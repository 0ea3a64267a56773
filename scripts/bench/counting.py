"""The one way to count: operations, launches of a GPU, bytes that are moved, and memory in use. No GPU is needed."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from models import declared
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.kernels import choice, triton_kernel, triton_norms
from megatron_eopt.settings.execution import gathered
from megatron_eopt.step.momenta import step_form, step_kernels
from megatron_eopt.step.nonfinite import NonFinite

_FREE = frozenset(
    "split split_with_sizes unbind reshape _unsafe_view _reshape_alias lift_fresh empty empty_like new_empty "
    "empty_strided new_empty_strided promote_types _record_function_enter_new _record_function_exit".split()
)
HOST_READ = "_local_scalar_dense"
"""The operation that reads a value on the host."""


def launches(func: Any) -> bool:
    """Whether an operation reaches a device, or reads from it: not a view, nor memory that is not written to."""
    return not func.is_view and func.overloadpacket.__name__ not in _FREE


def moved(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    name = func.overloadpacket.__name__
    read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if name in ("copy_", "_foreach_copy_"):
        read = read[len(read) // 2 :]  # what is copied over is not read
    changed = args[0] if name.startswith("_foreach") and result is None else result  # of several in place
    written = [x for x in tree_leaves(changed) if isinstance(x, Tensor)]
    return read, written


def bytes_of_kernel(kernel: Any, x: Any, other: Tensor) -> int:
    """What one launch of a step's kernels reads and writes, beside tables and norms."""
    size = {}
    for key in ("PARAMETER", "GRADIENT", "MOMENTUM", "PREVIOUS"):
        if x.constants.get(key) is not None:
            size[key] = x.constants[key].primitive_bitwidth // 8
    of_entry: int = other.itemsize
    if kernel.__name__ == "corrections_kernel":  # of which the other has no entries
        of_entry = size["GRADIENT"] + size["PREVIOUS"]
    elif kernel.__name__ == "momentum_kernel":
        of_gradient = size["GRADIENT"] + x.constants["L2"] * size["PARAMETER"]
        if x.constants["AVERAGED"]:
            of_entry += size["MOMENTUM"] + x.constants["NESTEROV"] * of_gradient
        else:  # the momentum is read and written, and so is the gradient of the last step
            of_entry += 2 * size["MOMENTUM"] + 2 * size.get("PREVIOUS", 0) + of_gradient
    elif kernel.__name__ == "products_kernel":
        of_entry += size["PARAMETER"]
    elif kernel.__name__ == "moment_kernel":  # so is the moment, in fp32
        of_entry += 8
    elif kernel.__name__ == "subtract_kernel":  # and so is the weight
        of_entry += 2 * size["PARAMETER"] + 4 * x.constants["DIVIDED"]
    return of_entry * sum(piece.rows * piece.cols for piece in x.pieces)


@contextmanager
def counted_kernels(launched: Callable[[Any, Any, Tensor], object], sent: Callable[[], object]) -> Iterator[None]:
    """Let steps take their kernels on CUDA tensors without numbers, to count them in place of running them.

    ``launched`` gets the kernel, the launch and the tensor of updates or factors; ``sent`` is called for each table.
    """

    def launch(kernel: Any, x: Any, *given: Any) -> None:
        launched(kernel, x, given["flag" in kernel.arg_names])  # which comes first

    def on_device(table: Tensor, device: torch.device) -> Any:
        sent()
        return SimpleNamespace(numel=table.numel)

    stubs = (
        (step_kernels, "launch", launch),
        (step_kernels, "address", lambda x: 512 * id(x)),
        (step_kernels, "storage", lambda x: x.untyped_storage()._cdata),
        (step_kernels, "on_device", on_device),
        (step_form, "fast_triton", lambda device: None),
        (step_form, "triton_missing", lambda device: None),
        (choice, "fast_triton", lambda device: None),
        (choice, "triton_missing", lambda device: None),
        (NonFinite, "_report", lambda self, *args: None),
    )
    with ExitStack() as patches:
        for module, name, stub in stubs:
            patches.enter_context(patch.object(module, name, stub))
        yield


class Operations(TorchDispatchMode):
    """Counts the operations inside, by name: one on many tensors as one, and views and memory not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it."""
        if launches(func):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Replay(TorchDispatchMode):
    """Records what operations computed in one step, and then gives that in place of computing."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[tuple[Any, Any]] = []
        self.next: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation that launches nothing; record any other one, or replay it."""
        if not launches(func):
            return func(*args, **(kwargs or {}))
        if self.next is None:
            self.recorded.append((func, func(*args, **(kwargs or {}))))
            return self.recorded[-1][1]
        expected, result = self.recorded[self.next]
        assert func is expected, f"the step made another operation: {func} in place of {expected}"
        self.next += 1
        return result


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside, until they are gone; views cost nothing.

    Also for fake tensors, which have no numbers: so a step of any size is counted on any machine. What a kernel takes
    for itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what it made."""
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if id(storage) not in self._known and id(storage) not in given:
                    self._known.add(id(storage))
                    self.bytes += storage.nbytes()
                    weakref.finalize(storage, self._gone, id(storage), storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


class Products(Allocations):
    """Counts also matrix products, their operations, and collectives; of DTensors those on their shards."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.operations = self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it."""
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


STEPS = 4  # of an optimizer, of which the last one is counted
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
        parameters = [declared(torch.nn.Parameter(torch.empty(shape, device="cuda"))) for shape in shapes]
        for p in parameters:
            p.grad = torch.empty_like(p)
        optimizer = row.cls(parameters, **gathered(row.cls, settings))
        modes.enter_context(counted)
        for _ in range(STEPS):
            counted.kernels.clear()
            counted.bytes.clear()
            optimizer.step()
    return counted
