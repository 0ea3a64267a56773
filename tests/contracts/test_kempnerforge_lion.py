"""KempnerForge's Lion, as its users call it: its steps and its state dicts."""

import copy
from functools import partial

import torch

from megatron_eopt import Lion
from tests.optimizers import several
from tests.optimizers.several import run as steps

parameters = partial(several.parameters, [(6, 4), (5,), (2, 3, 4)])


class Original:
    """What the original does, in fp32, and the state dict that it writes."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        self.params, self.momenta = params, [torch.zeros_like(p) for p in params]
        self.group = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "params": list(range(len(params)))}

    @torch.no_grad()
    def step(self):
        lr, (b1, b2), wd = self.group["lr"], self.group["betas"], self.group["weight_decay"]
        for p, m in zip(self.params, self.momenta, strict=True):
            p.copy_(p * (1 - lr * wd) - lr * torch.sign(b1 * m + (1 - b1) * p.grad))
            m.copy_(b2 * m + (1 - b2) * p.grad)

    def state_dict(self):
        return {"state": {i: {"exp_avg": m} for i, m in enumerate(self.momenta)}, "param_groups": [self.group]}


def assert_close(params, others):
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_state_dicts_of_the_original_go_on():
    originals = parameters()
    original = Original(originals, lr=0.02, betas=(0.8, 0.95), weight_decay=0.1)
    steps(original, originals, range(4))
    params = copy.deepcopy(originals)
    optimizer = Lion(params)  # the settings come with the state
    optimizer.load_state_dict(copy.deepcopy(original.state_dict()))
    steps(optimizer, params, range(4, 9))
    steps(original, originals, range(4, 9))
    assert_close(params, originals)
    assert optimizer.state[params[0]].keys() == {"exp_avg"}
