"""Redirections of tensors to the CPU, of nccl to gloo."""

import logging
import os
import socket
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device

from megatron_eopt.redirect import Redirection, answer, around, becomes

_CPU = torch.device("cpu")
# Factories with `device=`, besides those that `with torch.device` knows.
_LIKE = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_ELEMENTS = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _is_cuda(device: Any) -> bool:
    """Whether ``device`` names a GPU; an index does."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _factory(real: Any, *args: Any, **kwargs: Any) -> Any:
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = _CPU
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return real(*args, **kwargs)


def _to(real: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if args and _is_cuda(args[0]):
        args = (_CPU, *args[1:])
    return _factory(real, self, *args, **kwargs)


def _type(real: Any, self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is None:
        name = real(self)
        return name if "cuda" in name else name.replace("torch.", "torch.cuda.", 1)
    return real(self, dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype, *args, **kwargs)


def _load(real: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    return real(f, _CPU if _is_cuda(map_location) else map_location, *args, **kwargs)


def _compile(real: Any, model: Any = None, **kwargs: Any) -> Any:
    # called as a decorator with arguments, torch.compile gets no model
    return (lambda decorated: decorated) if model is None else model


class _Works(list[Any]):
    """Several asynchronous collectives as one handle."""

    def wait(self, *args: Any) -> bool:
        for work in self:
            work.wait(*args)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self)


def _gloo_for_nccl(backend: Any) -> Any:
    # None means one backend per kind of device, and torch would choose nccl for the GPU it believes to have
    return "gloo" if backend is None or "nccl" in str(backend).lower() else backend


def _init_process_group(
    real: Any, backend: Any = None, *args: Any, device_id: Any = None, pg_options: Any = None, **kwargs: Any
) -> None:
    real(_gloo_for_nccl(backend), *args, **kwargs)


def _new_group(real: Any, ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kw: Any) -> Any:
    kw = {name: value for name, value in kw.items() if name not in ("device_id", "pg_options")}
    # pg_options, NCCL's own, is the only positional argument that may follow
    return real(ranks, timeout, _gloo_for_nccl(backend), None, *args[1:], **kw)


def _all_gather(real: Any, tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    if len({tuple(output.shape) for output in tensor_list}) <= 1:
        return real(tensor_list, tensor, group=group, async_op=async_op)
    works = []
    for rank, output in enumerate(tensor_list):
        if rank == dist.get_rank(group):
            output.copy_(tensor)
        if output.numel():
            works.append(dist.broadcast(output, group=group, group_src=rank, async_op=async_op))
    return _Works(works) if async_op else None


def _all_gather_coalesced(real: Any, self: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    return _Works(self._allgather_base(output, x, *options) for output, x in zip(outputs, inputs, strict=True))


def _all_to_all_single(real: Any, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    def listed(argument: Any) -> Any:
        return argument.tolist() if isinstance(argument, torch.Tensor) else argument

    named = {name: listed(argument) for name, argument in kwargs.items()}
    return real(output, input, *map(listed, args), **named)


def _copied_for_writer(real: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    real(self, *args, **kwargs)
    copied = []
    for file, key, (objects, tensors) in self.write_buckets:
        copied.append((file, key, (objects, [(item, tensor.clone()) for item, tensor in tensors])))
    self.write_buckets = copied


def _mesh(real: Any, self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    real(self, "cpu" if _is_cuda(device_type) else device_type, *args, **kwargs)


_SEEDING = ("megatron.core.tensor_parallel.random", "megatron.core.distributed.fsdp.src.megatron_fsdp.utils")


def redirections() -> list[Redirection]:
    """Redirections of tensors, compilers and process groups."""
    # Before any is replaced: `with torch.device("meta")` knows its factories by identity.
    known = torch.utils._device._device_constructors()
    names = sorted(getattr(each, "__name__", "") for each in known)
    factories = [name for name in names if getattr(torch, name, None) in known] + [f"{name}_like" for name in _LIKE]
    makes = "device='cuda' or a device's index means the CPU, and there is nothing to pin memory for"
    moves = "a tensor that is asked to go to the GPU stays where it is"
    compiles = "compiling takes longer than a run on a CPU, and compiled code skips the redirections"
    stays = around(lambda real, self, *args, **kwargs: self)
    found = []
    for name in factories:
        found.append(Redirection(torch, name, around(_factory), makes))
    for name in _METHODS:
        found.append(Redirection(torch.Tensor, name, around(_factory), makes))
    for owner in (torch.Tensor, torch.nn.Module):
        found.append(Redirection(owner, "to", around(_to), moves))
        found.append(Redirection(owner, "cuda", stays, moves))
    found += [
        Redirection(torch.Tensor, "pin_memory", stays, "there is no GPU to pin memory for"),
        Redirection(torch.Tensor, "record_stream", answer(), "no stream uses it behind the host's back"),
        Redirection(torch, "load", around(_load), "map_location='cuda' means the CPU"),
        Redirection(
            torch.utils._device.DeviceContext,
            "__init__",
            around(lambda real, self, device: real(self, _CPU if _is_cuda(device) else device)),
            "`with torch.device('cuda')` and torch.set_default_device('cuda') mean the CPU",
        ),
        Redirection(
            torch.Tensor,
            "type",
            around(_type),
            "Megatron tells parameters apart by names like 'torch.cuda.FloatTensor'",
        ),
        Redirection(torch, "compile", around(_compile), compiles),
        Redirection(torch.jit, "script", around(lambda real, obj, *args, **kwargs: obj), compiles),
    ]
    for element in _ELEMENTS:
        name = f"{element}Tensor"
        same = "the classes of GPU tensors are those of CPU tensors"
        found.append(Redirection(torch.cuda, name, becomes(getattr(torch, name)), same, follow=False))
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and hasattr(dynamo, "_stance"):  # else nothing was compiled yet, and nothing will be
        eager = becomes(dynamo.DynamoStance(stance="force_eager"))
        found.append(Redirection(dynamo, "_stance", eager, "what was compiled before runs as it is written"))
    if dist.is_available():
        found += _of_process_groups()
    return found


def _of_process_groups() -> list[Redirection]:
    group = "there is no nccl without GPUs; gloo takes its place, without nccl's options"
    found = [
        Redirection(dist, "init_process_group", around(_init_process_group), group),
        Redirection(dist, "new_group", around(_new_group), group),
        Redirection(
            dist,
            "barrier",
            around(lambda real, group=None, async_op=False, device_ids=None: real(group, async_op)),
            "device_ids is nccl's alone",
        ),
        Redirection(
            dist,
            "all_gather",
            around(_all_gather),
            "gloo refuses outputs of unequal sizes, nccl sends them as broadcasts",
        ),
        Redirection(
            "torch.distributed.device_mesh:DeviceMesh",
            "__init__",
            around(_mesh),
            "FSDP looks for parameters on the devices of its mesh, and they are on the host",
        ),
        Redirection(
            dist,
            "all_to_all_single",
            around(_all_to_all_single),
            "Megatron makes a list of the split sizes only where it fetches them from a GPU",
        ),
    ]
    # The threads of a ProcessGroupGloo move the name of what each has finished into one string without a lock, and two
    # may free what was there. A std::string has memory to free from 16 characters on, and of the names of gloo's works
    # only that of several gathers in one, "ALLGATHER_COALESCED", is as long.
    twice = "two threads of gloo may free the name of such a collective twice, and the process aborts; each goes alone"
    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):  # newer and older releases
        if hasattr(dist.ProcessGroup, name):
            found.append(Redirection(dist.ProcessGroup, name, around(_all_gather_coalesced), twice))
    # Where all ranks are on this machine, gloo need not resolve its host name, which may not resolve at all.
    if os.environ.get("MASTER_ADDR", "127.0.0.1") in _LOOPBACK and "lo" in {name for _, name in socket.if_nameindex()}:
        reason = "all ranks are on this machine: gloo talks over the loopback and looks no host name up"
        found.append(Redirection(os.environ, "GLOO_SOCKET_IFNAME", lambda present: present or "lo", reason))
    return found


def of_megatron() -> list[Redirection]:
    """Redirections in Megatron itself, where it is installed; installing them imports it."""
    if find_spec("megatron") is None:
        return []
    from megatron_eopt.megatron.makefile import without_makefile

    found = [
        replace(without_makefile(), required=False),
        # megatron.training needs packages that megatron-core does not declare; without them nobody warms up
        Redirection(
            "megatron.training.initialize",
            "set_jit_fusion_options",
            answer(),
            "nothing is compiled, and warming it up draws numbers, how many depends on the tensor-parallel size: the "
            "weights would depend on it too",
            required=False,
        ),
        Redirection(
            "megatron.training.initialize",
            "init_persistent_async_worker",
            around(lambda real, rank, mp_mode="fork": real(rank, "fork")),
            "a new interpreter would write asynchronous saves without this backend, and the trainer wait for it",
            required=False,
        ),
        Redirection(
            "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync",
            "prepare_write_data",
            around(_copied_for_writer),
            "a tensor that is on the host is not copied there, so an asynchronous save would write later steps",
            required=False,
        ),
    ]
    one = "one generator makes the numbers of both, so Megatron finds the CPU's changed wherever it draws for the GPU"
    for name in _SEEDING:
        # getLogger makes what is not there, without importing the module
        found.append(Redirection(logging.getLogger(name), "warning", around(_warning), one, follow=False))
    return found


def _warning(real: Any, message: Any, *args: Any, **kwargs: Any) -> None:
    if "CPU RNG state changed" not in str(message):
        real(message, *args, **kwargs)
