"""What torch.cuda answers when the host is the device."""

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron_eopt.redirect import Redirection, answer, around, becomes

# Before this Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor parallelism.
_CAPABILITY = (10, 0)


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


def redirections() -> list[Redirection]:
    """Redirections of torch.cuda and torch.accelerator, with a current device."""
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
    answers: dict[str, dict[str, Callable[[], Any] | None]] = {
        "Megatron trains only where a GPU is; the host stands in for it": {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "get_device_name": lambda: "cpu",
        },
        "there is no driver to start": {"init": None, "_lazy_init": None},
        index: {"device_count": _local_ranks, "current_device": lambda: chosen},
        "from here on no CUDA_DEVICE_MAX_CONNECTIONS=1 is asked for": {
            "get_device_capability": lambda: _CAPABILITY,
            "get_device_properties": lambda: properties,
        },
        "the CPU computes in bfloat16": {"is_bf16_supported": lambda: True},
        "there are no CUDA graphs": {"is_current_stream_capturing": lambda: False},
        finished: {
            "synchronize": None,
            "set_stream": None,
            "stream": _DeviceGuard,
            "current_stream": lambda: stream,
            "default_stream": lambda: stream,
        },
        "no GPU holds anything; its memory is the host's": {
            **dict.fromkeys(("memory_allocated", "max_memory_allocated", "device_memory_used"), lambda: 0),
            **dict.fromkeys(("memory_reserved", "max_memory_reserved"), lambda: 0),
            "memory_stats": Counter,  # any statistic asked of it is 0
            "mem_get_info": lambda: (host_memory, host_memory),
            **dict.fromkeys(("reset_peak_memory_stats", "empty_cache", "ipc_collect")),
        },
    }
    # One generator serves what on GPUs are two: a draw for the GPU moves the numbers that the CPU draws next.
    generator = torch.default_generator
    kept = "the CPU's generator makes the numbers, so it is the one whose state is kept"

    def seed(real: Any, value: int) -> None:
        generator.manual_seed(int(value))  # not torch.manual_seed, which calls torch.cuda.manual_seed_all

    def set_rng_state(real: Any, new_state: torch.Tensor, device: Any = "cuda") -> None:
        generator.set_state(new_state)

    random_numbers = {
        "manual_seed": around(seed),
        "manual_seed_all": around(seed),
        "get_rng_state": around(lambda real, device="cuda": generator.get_state()),
        "set_rng_state": around(set_rng_state),
        "default_generators": becomes((generator,) * _local_ranks()),
    }
    classes = {"Stream": _Stream, "Event": _Event, "ExternalStream": _ExternalStream, "device": _DeviceGuard}
    at_once = "what waits for the driver to start can run at once"
    unasked = "torch.optim and DataLoader would go on to ask the driver; torch.cuda.is_available said yes"
    marks = ("range_push", "range_pop", "mark")
    nvtx = "there is no NVTX to mark"
    return [
        *[Redirection(torch.cuda, name, answer(value), why) for why in answers for name, value in answers[why].items()],
        *[Redirection(torch.cuda, name, becomes(stand_in), finished) for name, stand_in in classes.items()],
        Redirection(torch.cuda, "set_device", around(set_device), index),
        Redirection(torch.cuda, "_lazy_call", around(lambda real, waiting, **kwargs: waiting()), at_once),
        *[Redirection(torch.cuda.nvtx, name, answer(), nvtx) for name in marks],
        Redirection(torch.accelerator, "is_available", answer(lambda: False), unasked),
        *[Redirection(torch.cuda, name, make, kept) for name, make in random_numbers.items()],
    ]


def _local_ranks() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
