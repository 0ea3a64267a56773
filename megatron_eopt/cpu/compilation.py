"""Nothing is compiled: on a CPU run it takes longer than the training, and compiled code skips the redirections."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_eopt.cpu.answers import named_as
from megatron_eopt.redirect import Redirection


def _compile(real: Callable[..., Any]) -> Callable[..., Any]:
    def compile_(model: Any = None, **kwargs: Any) -> Any:
        # called as a decorator with arguments, torch.compile gets no model
        return (lambda decorated: decorated) if model is None else model

    return named_as(real, compile_)


def _script(real: Callable[..., Any]) -> Callable[..., Any]:
    return named_as(real, lambda obj, *args, **kwargs: obj)


def redirections() -> list[Redirection]:
    """torch.compile and torch.jit.script return what they were given; what was compiled before runs eagerly."""
    reason = "compiling takes longer than a run on a CPU, and compiled code skips the redirections"
    found = [
        Redirection(owner=torch, name="compile", make=_compile, reason=reason),
        Redirection(owner=torch.jit, name="script", make=_script, reason=reason),
    ]
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and hasattr(dynamo, "_stance"):  # else nothing was compiled yet, and nothing will be
        found.append(
            Redirection(
                owner=dynamo,
                name="_stance",
                make=lambda real: dynamo.DynamoStance(stance="force_eager"),
                reason="functions that were compiled before run as they are written",
            )
        )
    return found
