"""What Muon's step does on a device and in memory, and what a rule of one's own is told."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_eopt import Execution, PolarGrad, TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron_eopt.step import foreach
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.momenta.momentum_stack import Update, scaled

SHAPES = [(24, 16), (16, 40), (33, 12)]


class Names(TorchDispatchMode):
    """The operations of torch, by their names."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.found.append(str(function))
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_scale_is_copied_to_a_gpu(dtype):
    """A copy from the host would be waited for, and cannot be captured as a graph."""
    with FakeTensorMode():
        factors = [torch.empty(shape, dtype=dtype, device="cuda") for shape in SHAPES]
        with Names() as names:
            scaled(Update([factor], scale) for factor, scale in zip(factors, [0.5, 1.0, 0.5], strict=True))
    assert names.found == ["aten._foreach_mul_.Scalar"]


def test_a_program_that_keeps_momenta_has_less_room_for_a_chunk():
    """It holds them in fp32 until their factors are there."""

    def chunks(cls, **settings):
        matrices = [torch.nn.Parameter(torch.zeros(64, 64)) for _ in range(16)]
        engine = cls(matrices, execution=Execution(workspace=2**18), **settings).proposed()
        return len(engine.order(range(16)))

    muon, adamuon = chunks(TensorParallelMuon), chunks(TensorParallelAdaptiveMuon)
    assert chunks(PolarGrad) > muon
    assert chunks(TensorParallelAdaptiveMuon, moment2_method="namo") > muon == adamuon


def gradients(stack):
    return [x.clone() for x in stack.shards("gradient")]


def no_generator(self, stack):
    return Update(gradients(stack), 1.0)


def no_request(self, stack):
    yield gradients(stack)


def a_request_for_shards(self, stack):
    O = yield stack.orthogonalize(stack.momentum())
    return Update(O, 1.0)


def no_update(self, stack):
    return (yield stack.orthogonalize(gradients(stack)))


def one_of_two_groups(self, stack):
    if stack.group_number == 0:
        return Update((yield stack.orthogonalize(gradients(stack))), 1.0)
    return Update(gradients(stack), 1.0)


def without_orthogonalizing(self, stack):
    return Update((yield stack.momentum()), 1.0)


def orthogonalizing_twice(self, stack):
    O = yield stack.orthogonalize(gradients(stack))
    return Update((yield stack.orthogonalize(O)), 1.0)


def two_rules_of_momenta(self, stack):
    u = yield stack.momentum(foreach.heavy_ball if stack.group_number else foreach.average)
    return Update((yield stack.orthogonalize(u)), 1.0)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (no_generator, "has to yield what it waits for"),
        (no_request, "a rule yields what methods of its stack return"),
        (a_request_for_shards, "a list of shards, or what `yield stack.momentum"),
        (no_update, "has to return an Update"),
        (one_of_two_groups, "the rules of all groups orthogonalize once"),
        (without_orthogonalizing, "once, got none"),
        (orthogonalizing_twice, "once, got it twice"),
        (two_rules_of_momenta, "all groups take one rule of momenta"),
    ],
)
def test_a_rule_with_a_mistake_is_told_what_rules_do(update, message):
    parameters = [torch.nn.Parameter(torch.ones(6, 4)) for _ in range(2)]
    cls = type("Own", (TensorParallelMuon,), {"update": update})
    optimizer = cls([{"params": [p]} for p in parameters])
    for p in parameters:
        p.grad = torch.ones_like(p)
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.step()


def test_a_setting_that_no_class_of_ours_has_is_refused():
    class Own(TensorParallelMuon):
        def __init__(self, params, lr=0.1, beta_slow=0.9):
            BaseOptimizer.__init__(self, params, locals())

    with pytest.raises(TypeError, match="passes on beta_slow, no setting of the class of megatron_eopt"):
        Own([torch.nn.Parameter(torch.ones(6, 4))])
