"""torch.distributed over gloo where Megatron asks for nccl."""

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_eopt.redirect import Redirection, named_as

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Works:
    """Several asynchronous collectives as one handle."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = list(works)

    def wait(self, *args: Any) -> bool:
        """Wait for all of them; like a work of torch's, True when done."""
        for work in self._works:
            work.wait(*args)
        return True

    def is_completed(self) -> bool:
        """True when all of them are done."""
        return all(work.is_completed() for work in self._works)


def _gloo_for_nccl(backend: Any) -> Any:
    # None means one backend per kind of device, and torch would choose nccl for the GPU it believes to have
    return "gloo" if backend is None or "nccl" in str(backend).lower() else backend


def _init_process_group(real: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        real(_gloo_for_nccl(backend), *args, **kwargs)

    return named_as(real, init_process_group)


def _new_group(real: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        # pg_options, NCCL's own, is the only positional argument that may follow
        return real(ranks, timeout, _gloo_for_nccl(backend), None, *args[1:], **kwargs)

    return named_as(real, new_group)


def _all_gather(real: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({tuple(output.shape) for output in tensor_list}) <= 1:
            return real(tensor_list, tensor, group=group, async_op=async_op)
        works = []
        for rank, output in enumerate(tensor_list):
            if rank == dist.get_rank(group):
                output.copy_(tensor)
            if output.numel():
                works.append(dist.broadcast(output, group=group, group_src=rank, async_op=async_op))
        return Works(works) if async_op else None

    return named_as(real, all_gather)


def _all_to_all_single(real: Callable[..., Any]) -> Callable[..., Any]:
    def sizes(split: Any) -> Any:
        return split.tolist() if isinstance(split, torch.Tensor) else split

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return real(output, input, sizes(output_split_sizes), sizes(input_split_sizes), *args, **kwargs)

    return named_as(real, all_to_all_single)


def _barrier(real: Callable[..., Any]) -> Callable[..., Any]:
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, **kwargs: Any) -> Any:
        return real(group=group, async_op=async_op, **kwargs)

    return named_as(real, barrier)


def redirections() -> list[Redirection]:
    """Process groups and the collectives that gloo takes otherwise than nccl."""
    if not dist.is_available():
        return []
    group = "there is no nccl without GPUs; gloo takes its place, without nccl's options"
    unequal = "gloo refuses outputs of unequal sizes, nccl sends them as broadcasts"
    sizes = "Megatron makes a list of the split sizes only where it fetches them from a GPU"
    found = [
        Redirection(dist, "init_process_group", _init_process_group, group),
        Redirection(dist, "new_group", _new_group, group),
        Redirection(dist, "barrier", _barrier, "device_ids is nccl's alone"),
        Redirection(dist, "all_gather", _all_gather, unequal),
        Redirection(dist, "all_to_all_single", _all_to_all_single, sizes),
    ]
    # Where all ranks are on this machine, gloo need not resolve its host name, which may not resolve at all.
    if os.environ.get("MASTER_ADDR", "127.0.0.1") in _LOOPBACK and "lo" in {name for _, name in socket.if_nameindex()}:
        reason = "all ranks are on this machine: gloo talks over the loopback and looks no host name up"
        found.append(Redirection(os.environ, "GLOO_SOCKET_IFNAME", lambda present: present or "lo", reason))
    return found
