"""A stand-in for NVIDIA's Apex: its fused Adam, without a GPU.

Constructor, state and step as Apex documents them (https://nvidia.github.io/apex/optimizers.html): ``adam_w_mode`` and
``bias_correction`` in place of another class, moments in the state of parameters, and the count of steps in the group.
Transformer Engine's has the same interface.
"""

import torch


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
        capturable=False,
        master_weights=False,
    ):
        if amsgrad or capturable or master_weights:
            raise NotImplementedError
        self.adam_w_mode = adam_w_mode
        decay = {"bias_correction": bias_correction, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, **decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = t = group.get("step", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                self.update(p, self.state[p], t, **{key: x for key, x in group.items() if key in self.defaults})

    def update(self, p, state, t, *, lr, bias_correction, betas, eps, weight_decay):
        g = p.grad if self.adam_w_mode else p.grad + weight_decay * p
        for key, beta, new in (("exp_avg", betas[0], g), ("exp_avg_sq", betas[1], g * g)):
            state[key] = beta * state.get(key, torch.zeros_like(p)) + (1 - beta) * new
        m, v = (state[key] / (1 - beta**t * bias_correction) for key, beta in zip(state, betas, strict=True))
        p -= lr * (m / (v.sqrt() + eps) + weight_decay * p * self.adam_w_mode)


class FusedSGD(torch.optim.SGD):
    """Only imported."""
