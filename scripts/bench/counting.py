"""Operations counted: how many reach a device, and how much memory they have in use at a time. No GPU is needed."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_eopt.kernels import choice
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


def moved(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    name = func.overloadpacket.__name__
    read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if name in ("copy_", "_foreach_copy_"):
        read = read[len(read) // 2 :]  # what is copied over is not read
    changed = args[0] if name.startswith("_foreach") and result is None else result  # of several in place
    written = [x for x in tree_leaves(changed) if isinstance(x, torch.Tensor)]
    return read, written


def bytes_of_kernel(kernel: Any, x: Any, other: torch.Tensor) -> int:
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
def counted_kernels(launched: Callable[[Any, Any, torch.Tensor], object], sent: Callable[[], object]) -> Iterator[None]:
    """Let steps take their kernels on CUDA tensors without numbers, to count them in place of running them.

    ``launched`` gets the kernel, the launch and the tensor of updates or factors; ``sent`` is called for each table.
    """

    def launch(kernel: Any, x: Any, *given: Any) -> None:
        launched(kernel, x, given["flag" in kernel.arg_names])  # which comes first

    def on_device(table: torch.Tensor, device: torch.device) -> Any:
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
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
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
