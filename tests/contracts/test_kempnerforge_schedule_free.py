"""KempnerForge's ScheduleFreeAdamW, as its users call it: its steps, its one warm-up, and its checkpoints."""

import copy
import pickle
from functools import partial

import pytest
import torch

from megatron_eopt import ScheduleFreeAdamW
from tests.optimizers import several

SETTINGS = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "warmup_steps": 6}
parameters = partial(several.parameters, [(6, 4), (5,), (2, 3, 4)])


def set_gradients(params, step, late=0):
    """Gradients of a step; of parameter 1 none before step ``late``."""
    several.set_gradients(params, step)
    if step < late:
        params[1].grad = None


class Original:
    """What the original does, in fp32, but for a correction of ``v`` by the steps that a parameter took."""

    def __init__(self, params, lr=0.025, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, warmup_steps=0):
        self.params, self.k, self.warmup_steps, self.state = params, 0, warmup_steps, {}
        self.group = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}

    @torch.no_grad()
    def step(self):
        self.k += 1
        (b1, b2), eps, wd = self.group["betas"], self.group["eps"], self.group["weight_decay"]
        lr = self.group["lr"] * (min(1, self.k / self.warmup_steps) if self.warmup_steps else 1)
        for i, p in enumerate(self.params):
            if p.grad is None:
                continue
            s = self.state.setdefault(
                i, {"z": p.clone(), "v": torch.zeros_like(p), "x": p.clone(), "weight_sum": 0.0, "t": 0}
            )
            s["t"] += 1
            s["v"] = b2 * s["v"] + (1 - b2) * p.grad**2
            s["z"] = (s["z"] - lr * p.grad / ((s["v"] / (1 - b2 ** s["t"])).sqrt() + eps)) * (1 - lr * wd)
            s["weight_sum"] += lr * (1 - b1)
            s["x"] = s["x"] + lr * (1 - b1) / s["weight_sum"] * (s["z"] - s["x"])
            p.copy_((1 - b1) * s["z"] + b1 * s["x"])


def test_warmup_steps_may_be_set_and_are_those_of_all_groups():
    params, others = parameters(), parameters()
    optimizer = ScheduleFreeAdamW([{"params": params[:1]}, {"params": params[1:]}], **SETTINGS)
    original = Original(others, **SETTINGS)
    for each, its in ((optimizer, params), (original, others)):
        steps(each, its, range(2))
        each.warmup_steps = 12
        steps(each, its, range(2, 6))
    assert_close(params, others)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    assert [group["warmup_steps"] for group in optimizer.param_groups] == [12] * 3
    with pytest.raises(ValueError, match="warmup_steps must be a whole number of at least 0, got -1"):
        optimizer.warmup_steps = -1


def steps(optimizer, params, numbers, late=0):
    for step in numbers:
        set_gradients(params, step, late)
        optimizer.step()


def assert_close(params, others):
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, SETTINGS, {**SETTINGS, "betas": (0.3, 0.9)}], ids=["defaults", "all", "b1"])
@pytest.mark.parametrize("late", [0, 9])
def test_a_parameter_that_joins_late_begins_no_new_warmup(settings, late):
    params, originals = parameters(), parameters()
    optimizer, original = ScheduleFreeAdamW(params, **settings), Original(originals, **settings)
    for step in range(14):
        steps(optimizer, params, [step], late)
        steps(original, originals, [step], late)
        assert_close(params, originals)
    optimizer.eval_params()
    assert_close(params, [original.state[i]["x"] for i in range(3)])
    with pytest.raises(RuntimeError, match="at x, for evaluation: call train_params"):
        optimizer.step()
    optimizer.train_params()
    assert_close(params, originals)


def test_the_count_survives_before_a_first_gradient():
    straight, stopped = parameters(), parameters()
    steps(ScheduleFreeAdamW(straight, **SETTINGS), straight, range(9), late=6)
    first = ScheduleFreeAdamW(stopped, **SETTINGS)
    steps(first, stopped, range(4), late=6)
    resumed = copy.deepcopy(stopped)
    second = ScheduleFreeAdamW(resumed)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert [group["k"] for group in second.param_groups] == [4]
    steps(second, resumed, range(4, 9), late=6)
    assert all(map(torch.equal, resumed, straight))
