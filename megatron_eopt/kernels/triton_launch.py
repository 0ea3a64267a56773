"""Launches of a Triton kernel for arguments like earlier ones.

Triton looks at every argument in every launch, to find what it compiled for such ones: 25 us of the host for a product
(triton 3.9), and 6.5 where that is known. A step of Muon has 58 products for a GPT of 124M and 350 for 1.3B, and on an
H200 the host takes as long as the device. Compiled kernels are started as in triton's tutorial on fused softmax.
"""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

logger = logging.getLogger(__name__)

_ALIGNED = 16  # bytes: by this Triton tells addresses apart
_OTHERWISE = (AttributeError, TypeError, ValueError)  # of a release whose compiled kernels take other arguments


class Call(NamedTuple):
    """What follows from how tensors lie."""

    programs: int
    integers: Sequence[int]
    constants: Mapping[str, object]
    options: Mapping[str, object]


class Launcher:
    """Launches a kernel whose parameters are tensors, floats, integers and constants, in this order.

    ``call`` finds integers and constants from tensors, whose numbers it does not read, and ``settings``; it is called
    once for those that lie alike. Among ``floats`` may be integers that the kernel does not specialize. What is known
    is started as releases 3.3 to 3.9 of triton do; where another one takes other arguments, all launches are its own.
    """

    starts_known = True

    def __init__(self, kernel: Any, call: Callable[..., Call]) -> None:
        self._kernel = kernel
        self._call = call
        self._known: dict[Hashable, tuple[Any, Sequence[object]]] = {}

    def __call__(self, tensors: Sequence[Tensor], floats: Sequence[float], *settings: Hashable) -> None:
        """Launch on the device of the tensors."""
        first = tensors[0]
        lies: list[Hashable] = [settings, first.get_device()]
        addresses = 0
        for x in tensors:
            addresses |= x.data_ptr()
            lies += x.dtype, x.shape, x.stride()
        key = tuple(lies)
        aligned = addresses % _ALIGNED == 0
        # triton launches on the current device, whatever device the tensors are on
        with torch.cuda.device_of(first):
            if aligned and Launcher.starts_known and key in self._known:
                start, following = self._known[key]
                try:
                    start(*tensors, *floats, *following)
                    return
                except _OTHERWISE as error:  # of arguments: nothing was started
                    _stop(error)
            programs, integers, constants, options = self._call(tensors, *settings)
            compiled = self._kernel[(programs,)](*tensors, *floats, *integers, **constants, **options)
            if aligned and Launcher.starts_known and compiled is not None:  # the interpreter compiles nothing
                ordered = [constants[name] for name in self._kernel.arg_names if name in constants]
                try:
                    self._known[key] = compiled[(programs, 1, 1)], (*integers, *ordered)
                except _OTHERWISE as error:
                    _stop(error)


def _stop(error: Exception) -> None:
    """Let triton make all launches itself."""
    Launcher.starts_known = False
    logger.warning(
        f"triton {triton.__version__} starts compiled kernels otherwise than 3.3 to 3.9 ({type(error).__name__}: "
        f"{error}): it looks each of them up again, which takes the host longer and changes no number"
    )
