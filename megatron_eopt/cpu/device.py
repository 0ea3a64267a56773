"""What torch.cuda answers about devices, streams and memory when the host is the device."""

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_eopt.cpu.answers import answer, becomes, call
from megatron_eopt.redirect import Redirection

# Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor parallelism on architectures before this one. It asks
# nothing else of it that a CPU run can reach.
_CAPABILITY = (10, 0)


class Stream:
    """Stands in for torch.cuda.Stream and torch.cuda.Event: what was asked of it has already happened."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: Any) -> None: ...

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds between two events: none, for nothing runs behind the host's back."""
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        """The event given, or a new one."""
        return Event() if event is None else event

    def _done(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to wait for."""

    synchronize = wait_stream = wait_event = record = wait = _done


class Event(Stream):
    """Stands in for torch.cuda.Event."""


class ExternalStream(Stream):
    """Stands in for torch.cuda.ExternalStream."""


class DeviceGuard(contextlib.nullcontext[None]):
    """Stands in for the context managers torch.cuda.device and torch.cuda.stream: there is one device, one stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


@dataclass(frozen=True)
class Properties:
    """Stands in for what torch.cuda.get_device_properties returns."""

    name: str
    total_memory: int
    major: int
    minor: int
    multi_processor_count: int


def host_memory() -> int:
    """Bytes of memory this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def local_ranks() -> int:
    """How many ranks torchrun started on this machine: each believes to have a GPU of its own."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _properties() -> Properties:
    return Properties("cpu", host_memory(), *_CAPABILITY, os.cpu_count() or 1)


def _run(waiting: Callable[[], Any], **kwargs: Any) -> None:
    waiting()


def redirections() -> list[Redirection]:
    """torch.cuda's and torch.accelerator's answers; the index that set_device chose lives as long as they do."""
    chosen = 0

    def set_device(device: Any) -> None:
        nonlocal chosen
        index = device if isinstance(device, int) else torch.device(device).index
        chosen = chosen if index is None or index < 0 else index

    stream = Stream()
    exists = "Megatron trains only where a GPU is; the host stands in for it"
    index = "one device per local rank, as with GPUs; the index means nothing else"
    finished = "the host has done the work when the call returns"
    memory = "no GPU holds anything; its memory is the host's"
    table: list[tuple[str, Callable[[], Any] | None, str]] = [
        ("is_available", lambda: True, exists),
        ("is_initialized", lambda: True, exists),
        ("init", None, "there is no driver to start"),
        ("_lazy_init", None, "there is no driver to start"),
        ("device_count", local_ranks, index),
        ("current_device", lambda: chosen, index),
        ("get_device_name", lambda: "cpu", exists),
        ("get_device_capability", lambda: _CAPABILITY, "from here on no CUDA_DEVICE_MAX_CONNECTIONS=1 is asked for"),
        ("get_device_properties", _properties, "from here on no CUDA_DEVICE_MAX_CONNECTIONS=1 is asked for"),
        ("is_bf16_supported", lambda: True, "the CPU computes in bfloat16"),
        ("is_current_stream_capturing", lambda: False, "there are no CUDA graphs"),
        ("synchronize", None, finished),
        ("current_stream", lambda: stream, finished),
        ("default_stream", lambda: stream, finished),
        ("set_stream", None, finished),
        ("memory_allocated", lambda: 0, memory),
        ("max_memory_allocated", lambda: 0, memory),
        ("memory_reserved", lambda: 0, memory),
        ("max_memory_reserved", lambda: 0, memory),
        ("device_memory_used", lambda: 0, memory),
        ("memory_stats", Counter, memory),  # any statistic asked of it is 0
        ("mem_get_info", lambda: (host_memory(), host_memory()), memory),
        ("reset_peak_memory_stats", None, memory),
        ("empty_cache", None, memory),
        ("ipc_collect", None, memory),
    ]
    found = [Redirection(owner=torch.cuda, name=name, make=answer(value), reason=why) for name, value, why in table]
    at_once = "what waits for the driver to start can run at once"
    found += [
        Redirection(owner=torch.cuda, name="set_device", make=call(set_device), reason=index),
        Redirection(owner=torch.cuda, name="_lazy_call", make=call(_run), reason=at_once),
        Redirection(owner=torch.cuda, name="stream", make=answer(DeviceGuard), reason=finished),
    ]
    classes = {"Stream": Stream, "Event": Event, "ExternalStream": ExternalStream, "device": DeviceGuard}
    for name, stand_in in classes.items():
        found.append(Redirection(owner=torch.cuda, name=name, make=becomes(stand_in), reason=finished))
    for name in ("range_push", "range_pop", "mark"):
        found.append(Redirection(owner=torch.cuda.nvtx, name=name, make=answer(), reason="there is no NVTX to mark"))
    found.append(
        Redirection(
            owner=torch.accelerator,
            name="is_available",
            make=answer(lambda: False),
            reason="torch.optim and DataLoader would go on to ask the driver; torch.cuda.is_available said yes",
        )
    )
    return found
