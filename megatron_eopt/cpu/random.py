"""torch.cuda's random numbers come from the CPU's generator."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_eopt.cpu.answers import becomes, call
from megatron_eopt.cpu.device import local_ranks
from megatron_eopt.redirect import Redirection


def redirections() -> list[Redirection]:
    """Seeds and states of torch.cuda's generators are those of ``torch.default_generator``.

    So one generator serves what on GPUs are two: a draw for the GPU moves the numbers that the CPU draws next.
    """

    def seed(value: int) -> None:
        # not torch.manual_seed, which calls torch.cuda.manual_seed_all
        torch.default_generator.manual_seed(int(value))

    def seed_all(value: int) -> None:
        seed(value)

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        torch.default_generator.set_state(new_state)

    reason = "the CPU's generator makes the numbers, so it is the one whose state is kept"
    calls: dict[str, Callable[..., Any]] = {
        "manual_seed": seed,
        "manual_seed_all": seed_all,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
    }
    found = [Redirection(owner=torch.cuda, name=name, make=call(new), reason=reason) for name, new in calls.items()]
    generators = (torch.default_generator,) * local_ranks()
    found.append(Redirection(owner=torch.cuda, name="default_generators", make=becomes(generators), reason=reason))
    return found
