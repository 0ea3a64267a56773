"""Tensors that are asked to be on a GPU are on the CPU, and nothing is compiled."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

from megatron_eopt.redirect import Redirection, answer, becomes, named_as

_CPU = torch.device("cpu")
# What makes a tensor and takes `device=`, besides the functions that `with torch.device` knows.
_LIKE = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_ELEMENTS = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")


def _is_cuda(device: Any) -> bool:
    """Whether ``device`` names a GPU: an index, ``"cuda"``, ``"cuda:1"`` or a torch.device of that type."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = _CPU
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return kwargs


def _factory(real: Callable[..., Any]) -> Callable[..., Any]:
    return named_as(real, lambda *args, **kwargs: real(*args, **(_on_cpu(kwargs) if kwargs else kwargs)))


def _to(real: Callable[..., Any]) -> Callable[..., Any]:
    """For ``Tensor.to`` and ``Module.to``, whose first argument may be a device, a dtype or a tensor."""

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        return real(self, *args, **(_on_cpu(kwargs) if kwargs else kwargs))

    return named_as(real, to)


def _stays(real: Callable[..., Any]) -> Callable[..., Any]:
    return named_as(real, lambda self, *args, **kwargs: self)


def _type(real: Callable[..., Any]) -> Callable[..., Any]:
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = real(self)
            return name if "cuda" in name else name.replace("torch.", "torch.cuda.", 1)
        return real(self, dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype, *args, **kwargs)

    return named_as(real, type_)


def _device_context(real: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, device: Any) -> None:
        real(self, _CPU if _is_cuda(device) else device)

    return named_as(real, init)


def _load(real: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return real(f, _CPU if _is_cuda(map_location) else map_location, *args, **kwargs)

    return named_as(real, load)


def _compile(real: Callable[..., Any]) -> Callable[..., Any]:
    def compile_(model: Any = None, **kwargs: Any) -> Any:
        # called as a decorator with arguments, torch.compile gets no model
        return (lambda decorated: decorated) if model is None else model

    return named_as(real, compile_)


def redirections() -> list[Redirection]:
    """Factories, moves and names of tensors; compilers, which return what they were given."""
    # Before any is replaced: `with torch.device("meta")` knows its factories by identity.
    known = torch.utils._device._device_constructors()
    names = sorted(getattr(each, "__name__", "") for each in known)
    factories = [name for name in names if getattr(torch, name, None) in known] + [f"{name}_like" for name in _LIKE]
    makes = "device='cuda' or a device's index means the CPU, and there is nothing to pin memory for"
    moves = "a tensor that is asked to go to the GPU stays where it is"
    compiles = "compiling takes longer than a run on a CPU, and compiled code skips the redirections"
    found = [
        *[Redirection(torch, name, _factory, makes) for name in factories],
        *[Redirection(torch.Tensor, name, _factory, makes) for name in _METHODS],
        Redirection(torch.Tensor, "to", _to, moves),
        Redirection(torch.Tensor, "cuda", _stays, moves),
        Redirection(torch.nn.Module, "to", _to, moves),
        Redirection(torch.nn.Module, "cuda", _stays, moves),
        Redirection(torch.Tensor, "pin_memory", _stays, "there is no GPU to pin memory for"),
        Redirection(torch.Tensor, "record_stream", answer(), "no stream uses it behind the host's back"),
        Redirection(torch, "load", _load, "map_location='cuda' means the CPU"),
        Redirection(
            torch.utils._device.DeviceContext,
            "__init__",
            _device_context,
            "`with torch.device('cuda')` and torch.set_default_device('cuda') mean the CPU",
        ),
        Redirection(
            torch.Tensor, "type", _type, "Megatron tells parameters apart by names like 'torch.cuda.FloatTensor'"
        ),
        Redirection(torch, "compile", _compile, compiles),
        Redirection(torch.jit, "script", lambda real: named_as(real, lambda obj, *args, **kwargs: obj), compiles),
    ]
    same = "the classes of GPU tensors are those of CPU tensors"
    for name in (f"{element}Tensor" for element in _ELEMENTS):
        found.append(Redirection(torch.cuda, name, becomes(getattr(torch, name)), same, follow=False))
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and hasattr(dynamo, "_stance"):  # else nothing was compiled yet, and nothing will be
        eager = "functions that were compiled before run as they are written"
        found.append(Redirection(dynamo, "_stance", becomes(dynamo.DynamoStance(stance="force_eager")), eager))
    return found
