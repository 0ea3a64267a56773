"""What torch.cuda answers when the host is the device."""

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import data

from megatron_eopt.redirect import Redirection, answer, around, becomes

# Before this Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor parallelism.
_CAPABILITY = (10, 0)
_NOTHING_HELD = (
    "memory_allocated",
    "max_memory_allocated",
    "device_memory_used",
    "memory_reserved",
    "max_memory_reserved",
)


class _Stream:
    """A stream or event whose work is always done."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exception: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return 0.0  # milliseconds

    def record_event(self, event: Any = None) -> Any:
        return _Event() if event is None else event

    def _done(self, *args: Any, **kwargs: Any) -> None: ...

    synchronize = wait_stream = wait_event = record = wait = _done


class _Event(_Stream): ...


class _ExternalStream(_Stream): ...


class _DeviceGuard(contextlib.nullcontext[None]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class _DrawnByLoaders:
    """A state of random numbers for loaders of data.

    On GPUs they have one of their own: that of the CPU. Of tensor-parallel ranks the first alone may read data, and all
    have to drop the same. A resume draws for its loaders, too, before it drops what the straight run drops.
    """

    _state: torch.Tensor | None = None  # that of the generator when first needed

    def seed(self) -> None:
        """Begin again from what the generator was seeded with."""
        self._state = None

    def draw(self, real: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces what starts a loader, and what takes a batch of it."""
        generator = torch.default_generator
        of_model = generator.get_state()
        if self._state is not None:
            generator.set_state(self._state)
        try:
            return real(loader, *args, **kwargs)
        finally:
            self._state = generator.get_state()
            generator.set_state(of_model)


def redirections() -> list[Redirection]:
    """Redirections of torch.cuda, torch.accelerator and loaders of data, with a current device."""
    chosen = 0
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes

    def set_device(real: Any, device: Any) -> None:
        nonlocal chosen
        index = device if isinstance(device, int) else torch.device(device).index
        chosen = chosen if index is None or index < 0 else index

    stream = _Stream()
    major, minor = _CAPABILITY
    properties = SimpleNamespace(
        name="cpu", total_memory=host_memory, major=major, minor=minor, multi_processor_count=os.cpu_count() or 1
    )
    index = "one device per local rank, as with GPUs; the index means nothing else"
    finished = "the host has done the work when the call returns"
    empty = "no GPU holds anything; its memory is the host's"
    # One generator serves what on GPUs are two: a draw for the GPU moves the numbers that the CPU draws next.
    generator = torch.default_generator
    kept = "the CPU's generator makes the numbers, so it is the one whose state is kept"
    loaders = _DrawnByLoaders()

    def seed(real: Any, value: int) -> None:
        generator.manual_seed(int(value))  # not torch.manual_seed, which calls torch.cuda.manual_seed_all

    def seed_all(real: Any, value: int) -> None:
        seed(real, value)
        loaders.seed()

    def set_rng_state(real: Any, new_state: torch.Tensor, device: Any = "cuda") -> None:
        generator.set_state(new_state)

    of_cuda: dict[str, dict[str, Callable[[Any], Any]]] = {  # reason -> name and make
        "Megatron trains only where a GPU is; the host stands in for it": {
            "is_available": answer(lambda: True),
            "is_initialized": answer(lambda: True),
            "get_device_name": answer(lambda: "cpu"),
        },
        "there is no driver to start": {"init": answer(), "_lazy_init": answer()},
        "what waits for the driver to start can run at once": {
            "_lazy_call": around(lambda real, waiting, **kwargs: waiting()),
        },
        index: {
            "device_count": answer(_local_ranks),
            "current_device": answer(lambda: chosen),
            "set_device": around(set_device),
        },
        "from here on no CUDA_DEVICE_MAX_CONNECTIONS=1 is asked for": {
            "get_device_capability": answer(lambda: _CAPABILITY),
            "get_device_properties": answer(lambda: properties),
        },
        "the CPU computes in bfloat16": {"is_bf16_supported": answer(lambda: True)},
        "there are no CUDA graphs": {"is_current_stream_capturing": answer(lambda: False)},
        finished: {
            "synchronize": answer(),
            "set_stream": answer(),
            "stream": answer(_DeviceGuard),
            "current_stream": answer(lambda: stream),
            "default_stream": answer(lambda: stream),
            "Stream": becomes(_Stream),
            "Event": becomes(_Event),
            "ExternalStream": becomes(_ExternalStream),
            "device": becomes(_DeviceGuard),
        },
        empty: {
            "memory_stats": answer(Counter),  # any statistic asked of it is 0
            "mem_get_info": answer(lambda: (host_memory, host_memory)),
        },
        kept: {
            "manual_seed": around(seed),
            "manual_seed_all": around(seed_all),
            "get_rng_state": around(lambda real, device="cuda": generator.get_state()),
            "set_rng_state": around(set_rng_state),
            "default_generators": becomes((generator,) * _local_ranks()),
        },
    }
    found = []
    for reason, makes in of_cuda.items():
        for name, make in makes.items():
            found.append(Redirection(torch.cuda, name, make, reason))
    for name in _NOTHING_HELD:
        found.append(Redirection(torch.cuda, name, answer(lambda: 0), empty))
    for name in ("reset_peak_memory_stats", "empty_cache", "ipc_collect"):
        found.append(Redirection(torch.cuda, name, answer(), empty))
    for name in ("range_push", "range_pop", "mark"):
        found.append(Redirection(torch.cuda.nvtx, name, answer(), "there is no NVTX to mark"))
    apart = "what loaders of data draw must not move the numbers of the model, such as those of dropout"
    for owner, name in ((data.DataLoader, "__iter__"), (data.dataloader._BaseDataLoaderIter, "__next__")):
        found.append(Redirection(owner, name, around(loaders.draw), apart))
    unasked = "torch.optim and DataLoader would go on to ask the driver; torch.cuda.is_available said yes"
    found.append(Redirection(torch.accelerator, "is_available", answer(lambda: False), unasked))
    return found


def _local_ranks() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
