"""The state of torch's Adam in Megatron's distributed optimizer."""

from typing import Any

import torch
from torch.optim import Adam, AdamW

from megatron_eopt.checkpoints.states import StateDict
from megatron_eopt.step.parameters import parameters_in

_STEP = "step"


def let_adam_be_saved(optimizer: Any) -> None:
    """Let Megatron's distributed optimizer save and load the state of torch's Adam, of ranges of its buffers.

    Transformer Engine's and Apex's Adam count steps in their groups; torch's counts them beside each parameter, from
    its first step on, and nowhere on a rank whose shards of buffers are padding alone. Megatron asserts that there is
    such a count when it saves and before it loads. It saves the count with the groups, loads one tensor for all
    parameters, which each would raise, and writes the count from before the load over it. So there is none while it
    loads what is no count.
    """
    adam = optimizer.optimizer
    if not isinstance(adam, Adam | AdamW):
        return
    for parameter in parameters_in(adam.param_groups):
        adam.state[parameter] = {
            _STEP: torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    adam.register_state_dict_post_hook(_with_a_count)
    adam.register_load_state_dict_post_hook(_without_counts)
    megatrons_load_state_dict = optimizer.load_state_dict

    @torch.no_grad()
    def load_state_dict(state_dict: StateDict) -> None:
        megatrons_load_state_dict(state_dict)
        for group in adam.param_groups:
            step = group.pop(_STEP)
            for parameter in group["params"]:
                adam.state[parameter][_STEP] = torch.tensor(float(step))

    optimizer.load_state_dict = load_state_dict


def _with_a_count(adam: Any, state_dict: StateDict) -> StateDict:
    return state_dict | {"state": state_dict["state"] or {"nothing": {_STEP: torch.zeros(())}}}


def _without_counts(adam: Any) -> None:
    for state in adam.state.values():
        state.pop(_STEP)
