"""Kernels of Triton that are bound for a GPU, and noted in place of launched."""

from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel


class Compiled(CompiledKernel):
    """Stands for what Triton compiled for a key, and notes what it is started with."""

    module = None

    def __init__(self, kernel, key, started):
        self.kernel, self.key, self.started = kernel, key, started
        self.function = self.packed_metadata = None

    def _init_handles(self):
        pass

    def launch_metadata(self, *given):
        return None

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        self.started.append((self.kernel, self.key, (x, y, z), stream, arguments))


def binding(monkeypatch):
    """Notes what is ``started``, and the kernels that Triton ``searched`` for what it had compiled."""
    noted = SimpleNamespace(started=[], searched=[])

    def compiled(kernel, key, *given):
        noted.searched.append(kernel.__name__)
        return Compiled(kernel.__name__, key, noted.started)

    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 7,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(triton.JITFunction, "_do_compile", compiled)
    return noted


def without_memory(started):
    """What was started, tensors by shapes and dtypes."""
    return [
        (*first, [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in arguments])
        for *first, arguments in started
    ]
