"""Tensors that are asked to be on a GPU are on the CPU."""

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

from megatron_eopt.cpu.answers import CPU, answer, becomes, is_cuda, named_as
from megatron_eopt.redirect import Redirection

# What makes a tensor and takes `device=`.
_FACTORIES = (
    "arange",
    "asarray",
    "as_tensor",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "range",
    "scalar_tensor",
    "sparse_coo_tensor",
    "sparse_compressed_tensor",
    "sparse_csr_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_ELEMENTS = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    if is_cuda(kwargs.get("device")):
        kwargs["device"] = CPU
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return kwargs


def _factory(real: Callable[..., Any]) -> Callable[..., Any]:
    return named_as(real, lambda *args, **kwargs: real(*args, **(_on_cpu(kwargs) if kwargs else kwargs)))


def _to(real: Callable[..., Any]) -> Callable[..., Any]:
    """For ``Tensor.to`` and ``Module.to``, whose first argument may be a device, a dtype or a tensor."""

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and is_cuda(args[0]):
            args = (CPU, *args[1:])
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
        real(self, CPU if is_cuda(device) else device)

    return named_as(real, init)


def _load(real: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return real(f, CPU if is_cuda(map_location) else map_location, *args, **kwargs)

    return named_as(real, load)


def redirections() -> list[Redirection]:
    """Factories, moves and names of tensors."""
    # `with torch.device("meta")` knows the factories by identity: let it collect the originals first
    torch.utils._device._device_constructors()
    makes = "device='cuda' or a device's index means the CPU, and there is nothing to pin memory for"
    moves = "a tensor that is asked to go to the GPU stays where it is"
    found = [Redirection(owner=torch, name=name, make=_factory, reason=makes) for name in _FACTORIES]
    found += [Redirection(owner=torch.Tensor, name=name, make=_factory, reason=makes) for name in _METHODS]
    found += [
        Redirection(owner=torch.Tensor, name="to", make=_to, reason=moves),
        Redirection(owner=torch.Tensor, name="cuda", make=_stays, reason=moves),
        Redirection(owner=torch.Tensor, name="pin_memory", make=_stays, reason="there is no GPU to pin memory for"),
        Redirection(
            owner=torch.Tensor, name="record_stream", make=answer(), reason="no stream uses it behind the host's back"
        ),
        Redirection(owner=torch.nn.Module, name="to", make=_to, reason=moves),
        Redirection(owner=torch.nn.Module, name="cuda", make=_stays, reason=moves),
        Redirection(owner=torch, name="load", make=_load, reason="map_location='cuda' means the CPU"),
        Redirection(
            owner=torch.utils._device.DeviceContext,
            name="__init__",
            make=_device_context,
            reason="`with torch.device('cuda')` and torch.set_default_device('cuda') mean the CPU",
        ),
        Redirection(
            owner=torch.Tensor,
            name="type",
            make=_type,
            reason="Megatron tells parameters apart by names like 'torch.cuda.FloatTensor'",
        ),
    ]
    for element in _ELEMENTS:
        found.append(
            Redirection(
                owner=torch.cuda,
                name=f"{element}Tensor",
                make=becomes(getattr(torch, f"{element}Tensor")),
                reason="the classes of GPU tensors are those of CPU tensors",
                follow=False,
            )
        )
    return found
