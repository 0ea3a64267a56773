"""A step that is interrupted: either nothing has changed, and it can be made again, or the next one is refused."""

import contextlib
import copy
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_eopt import Muon
from tests.optimizers.family import FURTHER, build, decays, every_class, matrices
from tests.optimizers.field import drawn

REFUSED = "KeyboardInterrupt ended the last step while it changed weights and state"


class Operations(TorchDispatchMode):
    """Counts the operations of torch, and raises a KeyboardInterrupt in place of one of them."""

    def __init__(self, last=None):
        super().__init__()
        self.count, self.last = 0, last

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count += 1
        if self.count == self.last:
            raise KeyboardInterrupt
        return function(*arguments, **(named or {}))


def all_parameters(opt):
    further = opt.adamw.param_groups if isinstance(opt, Muon) else []
    return [p for group in [*opt.param_groups, *further] for p in group["params"]]


def stepped(name, steps):
    """An optimizer after some steps, with the gradients of the next one."""
    decaying = name != "users_own" and (name in FURTHER or decays(name))  # that one decays by itself
    opt = build(name, matrices(), **({"weight_decay": 0.1} if decaying else {}))
    for step in range(steps + 1):
        for i, p in enumerate(all_parameters(opt)):
            p.grad = drawn(p.shape, 10 * step + i)
        if step < steps:
            opt.step()
    return opt


def opt_of_matrices(opt):
    return opt.matrices if isinstance(opt, Muon) else opt


def values(opt):
    """Weights, and of the state what a parameter has beyond the zeros that it begins with; the counts of groups."""
    tensors = [p.detach().clone() for p in all_parameters(opt)]
    for state in (opt.state[p] for group in opt.param_groups for p in group["params"] if p in opt.state):
        tensors += [x.clone() for _, x in sorted(state.items()) if x.any()]
    return tensors, [[x for _, x in sorted(g.items()) if isinstance(x, int)] for g in opt.param_groups]


def are_equal(one, other):
    return one[1] == other[1] and len(one[0]) == len(other[0]) and all(map(torch.equal, one[0], other[0]))


def interrupted(name, steps, places=10):
    """The optimizer, interrupted in a step at so many places, one after another."""
    opt = stepped(name, steps)
    with Operations() as operations:
        opt.step()
    last = operations.count - 1 - isinstance(opt, Muon)  # then torch's profiler is told that the steps have ended
    for place in sorted({1 + i * (last - 1) // (places - 1) for i in range(places)}):
        opt = stepped(name, steps)
        with contextlib.suppress(KeyboardInterrupt), Operations(place):
            opt.step()
            raise AssertionError("the step was not interrupted")
        yield opt


@every_class
@pytest.mark.parametrize("steps", [0, 1])
def test_an_interrupted_step_is_made_again_or_refused(name, steps):
    undisturbed, refused = stepped(name, steps), 0
    undisturbed.step()
    for opt in interrupted(name, steps):
        if not opt_of_matrices(opt)._session.changing:
            opt.step()
            assert are_equal(values(opt), values(undisturbed))
            continue
        refused += 1
        for further in (opt.step, opt.state_dict, partial(copy.deepcopy, opt)):
            with pytest.raises(RuntimeError, match=REFUSED):
                further()
    assert refused


@every_class
def test_weights_and_state_of_a_checkpoint_are_gone_on_from(name):
    opt = stepped(name, 1)
    saved, weights = copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in all_parameters(opt)]
    undisturbed = stepped(name, 1)
    undisturbed.step()
    for other in interrupted(name, 1, places=5):
        with torch.no_grad():
            for p, weight in zip(all_parameters(other), weights, strict=True):
                p.copy_(weight)
        other.load_state_dict(copy.deepcopy(saved))
        other.step()
        assert are_equal(values(other), values(undisturbed))


def fails(*arguments):
    raise ValueError("so it is")


def refused_gradient(opt):
    opt.param_groups[0]["params"][0].grad = torch.ones(6, 4).to_sparse()
    opt.step()


@every_class
@pytest.mark.parametrize("fault", [lambda opt: opt.step(fails), refused_gradient], ids=["closure", "gradient"])
def test_what_fails_before_anything_changed_can_be_made_again(name, fault):
    opt, undisturbed = stepped(name, 1), stepped(name, 1)
    before = opt.param_groups[0]["params"][0].grad
    with pytest.raises(ValueError, match=r"so it is|sparse"):
        fault(opt)
    opt.param_groups[0]["params"][0].grad = before
    for each in (opt, undisturbed):
        each.state_dict()
        each.step()
    assert are_equal(values(opt), values(undisturbed))
