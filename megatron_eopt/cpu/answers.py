"""Replacements that only answer: the shared pieces of the redirections."""

import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")


def answer(value: Callable[[], Any] | None = None) -> Callable[[Any], Any]:
    """A ``make`` whose replacement ignores its arguments and returns ``value()``, or None.

    Each call makes a new function: torch._dynamo refuses one function object under two names.
    """

    def make(original: Any) -> Any:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return None if value is None else value()

        return named_as(original, replacement)

    return make


def becomes(replacement: Any) -> Callable[[Any], Any]:
    """A ``make`` that puts ``replacement`` there as it is; a class, above all, which must not be wrapped."""
    return lambda original: replacement


def named_as(original: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """``replacement`` under the name and documentation of ``original``, so that tracebacks and pickle find it."""
    return functools.wraps(original)(replacement) if callable(original) else replacement


def call(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """A ``make`` that puts the function ``replacement`` there, under the original's name."""
    return lambda original: named_as(original, replacement)


def is_cuda(device: Any) -> bool:
    """True where ``device`` names a GPU: an index, ``"cuda"``, ``"cuda:1"`` or a torch.device of that type."""
    if device is None:
        return False
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)
