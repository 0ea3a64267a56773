"""A user's pretrain script that brings an optimizer of its own: run by test_overrides.py."""

import functools
import runpy
from pathlib import Path

import torch

from megatron_eopt import EmergingOptimizerEntry, register_optimizer


class SignMomentum(torch.optim.Optimizer):
    """Descends along the sign of its momentum."""

    def __init__(self, params, lr, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    def init_state(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("mean", torch.zeros_like(p))

    @torch.no_grad()
    def step(self, closure=None):
        self.init_state()
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p]["mean"].lerp_(p.grad, 1 - group["decay"])
                p.add_(mean.sign(), alpha=-0.1 * group["lr"])


class Shy(SignMomentum):
    """One that cannot be built without parameters, and of whose arguments not every one is a setting of its groups."""

    def __init__(self, params, lr, decay=0.9, gentle=True):
        self.device, self.gentle = params[0]["params"][0].device, gentle
        super().__init__(params, lr, decay)


class Counting(SignMomentum):
    """One that keeps a number of its own for each parameter."""

    def init_state(self):
        super().init_state()
        for state in self.state.values():
            state.setdefault("seen", torch.zeros(()))


made_by = {"sign_momentum": functools.partial(SignMomentum), "shy": Shy, "counting": Counting}
for name, optimizer in made_by.items():
    register_optimizer(
        name, EmergingOptimizerEntry(optimizer, config_to_kwargs=lambda config, chunks, groups: {"lr": config.lr})
    )
runpy.run_path(str(Path(__file__).with_name("pretrain.py")), run_name="__main__")
