"""Memory that operations allocate, counted: how much was in use at a time, without a GPU and without numbers."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
