"""Momenta in bf16: how far they are from fp32, what a step makes of them, and what is refused."""

import copy
import logging

import pytest
import torch
from torch import nn

from megatron_eopt import Execution, TensorParallelMuon
from megatron_eopt.matrices import experts, per_shard
from megatron_eopt.optimizers.with_adamw import Muon
from tests.optimizers.family import ELEMENTWISE, build, having
from tests.optimizers.several import parameters as of_shapes

RELATIVES = having("momentum_dtype")
relatives = pytest.mark.parametrize("name", RELATIVES)
BF16 = torch.bfloat16
MOMENTUM = "momentum_buffer"
SHAPES = [(12, 8), (8, 12), (12, 8), (6, 130)]


def parameters(dtype=torch.float32):
    return of_shapes(SHAPES, dtype)


def gradients(step, shapes=SHAPES):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def take(optimizer, steps):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        for p, g in zip(params, gradients(step, [p.shape for p in params]), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()


def momentum(state):
    return state[MOMENTUM]


def momenta(optimizer):
    return [momentum(state) for state in optimizer.state.values()]


def dtypes(optimizer):
    return {state[MOMENTUM].dtype for state in optimizer.state.values()}


def assert_equal(one, other):
    for group, of_other in zip(one.param_groups, other.param_groups, strict=True):
        for p, q in zip(group["params"], of_other["params"], strict=True):
            assert torch.equal(p, q)
            for key, x in one.state[p].items():
                assert x.dtype == other.state[q][key].dtype
                assert torch.equal(x, other.state[q][key]), key


@relatives
def test_the_state_takes_half_the_bytes(name):
    wide, narrow = build(name, parameters()), build(name, parameters(), momentum_dtype=BF16)
    for optimizer in (wide, narrow):
        take(optimizer, range(2))
    assert {m.dtype for m in momenta(narrow)} == {BF16}
    assert 2 * sum(m.nbytes for m in momenta(narrow)) == sum(m.nbytes for m in momenta(wide))
    for p, q in zip(wide.param_groups[0]["params"], narrow.param_groups[0]["params"], strict=True):
        others = [(t.key, t.dtype, t.dims) for t in wide.state_tensors(p)[1:]]
        assert others == [(t.key, t.dtype, t.dims) for t in narrow.state_tensors(q)[1:]]


@relatives
def test_the_first_update_is_that_of_a_momentum_in_fp32(name):
    """It is of the average before that is rounded."""
    wide, narrow = build(name, parameters()), build(name, parameters(), momentum_dtype=BF16)
    for optimizer in (wide, narrow):
        take(optimizer, range(1))
    for p, q in zip(wide.state, narrow.state, strict=True):
        assert torch.equal(p, q)
    take(wide, range(1, 2))
    take(narrow, range(1, 2))
    assert not all(torch.equal(p, q) for p, q in zip(wide.state, narrow.state, strict=True))


@pytest.mark.parametrize("beta", [0.5, 0.95])
def test_the_error_of_a_momentum_is_bounded(beta):
    """One rounding moves an entry by less than the spacing, at most 2^-7 of it; every step multiplies that by beta."""
    optimizer = build("muon", parameters(), momentum=beta, momentum_dtype=BF16)
    exact = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    bound = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    errors = []
    for step in range(150):
        take(optimizer, [step])
        for i, (g, m) in enumerate(zip(gradients(step), momenta(optimizer), strict=True)):
            exact[i] = beta * exact[i] + (1 - beta) * g.double()
            # what was rounded is the momentum but for one rounding
            bound[i] = beta * bound[i] + 2**-7 * 1.01 * m.double().abs() + 1e-9
            assert ((m.double() - exact[i]).abs() <= bound[i]).all()
            errors.append(((m.double() - exact[i]).norm() / exact[i].norm()).item())
    # of random directions: a standard deviation below half the spacing, in each step
    assert sum(errors) / len(errors) < 2**-8 / (1 - beta**2) ** 0.5


@pytest.mark.parametrize(("was", "now"), [(None, BF16), (BF16, None)])
def test_a_state_of_the_other_kind_is_converted_and_that_is_said(was, now, caplog):
    first = build("muon", parameters(), momentum_dtype=was)
    take(first, range(3))
    second = build("muon", parameters(), momentum_dtype=now)
    with caplog.at_level(logging.WARNING):
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    dtypes = (torch.bfloat16, torch.float32) if was else (torch.float32, torch.bfloat16)
    said = f"TensorParallelMuon converts the state that it loads: {MOMENTUM} from {dtypes[0]} to {dtypes[1]}"
    assert [record.getMessage() for record in caplog.records] == [said]
    for m, other in zip(momenta(second), momenta(first), strict=True):
        assert torch.equal(m, other.to(dtypes[1]))
    take(second, range(3, 5))
    assert second.param_groups[0].get("momentum_steps") == {None: 3, BF16: 2}[now]


def test_stacks_and_what_is_read_as_a_matrix():
    stack, one = nn.Parameter(torch.ones(2, 6, 130)), nn.Parameter(torch.ones(1, 6, 4))
    stack.logical_matrices, one.logical_matrices = experts(2, per_shard(gate=3, up=3)), experts(1)
    optimizer = TensorParallelMuon([("stack", stack), ("one", one)], execution=Execution(momentum_dtype=BF16))
    take(optimizer, range(2))
    flattened = [nn.Parameter(torch.ones(6, 4, 1, 1)), nn.Parameter(torch.ones(6, 4))]
    heavy = [Muon([("filter", p)], [], execution=Execution(momentum_dtype=BF16)) for p in flattened]
    for each in heavy:
        for step in range(3):
            p = each.param_groups[0]["params"][0]
            p.grad = gradients(step, [(6, 4)])[0].view(p.shape)
            each.step()
    assert torch.equal(flattened[0].flatten(1), flattened[1])
    of_filter, of_matrix = (momentum(each.state[p]) for each, p in zip(heavy, flattened, strict=True))
    assert torch.equal(of_filter.flatten(1), of_matrix)
    assert of_matrix.any()
    assert dtypes(optimizer) | dtypes(heavy[0]) == {BF16}
    again = TensorParallelMuon([("stack", stack), ("one", one)], execution=Execution(momentum_dtype=BF16))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(map(torch.equal, momenta(again), momenta(optimizer)))
    exact = sum(0.05 * 0.95 ** (1 - step) * gradients(step, [(2, 6, 130)])[0] for step in range(2))
    assert (momenta(optimizer)[0] - exact).norm() < 0.03 * exact.norm()


class Own(TensorParallelMuon):
    """An orthogonalize of the user's own, before which nothing is changed."""

    def orthogonalize(self, p, grad, **group_settings):
        if self.fails:
            raise RuntimeError("of the user")
        return super().orthogonalize(p, grad, **group_settings)


def test_an_orthogonalize_of_ones_own_gets_the_same():
    plain, own = (kind(parameters(), execution=Execution(momentum_dtype=BF16)) for kind in (TensorParallelMuon, Own))
    own.fails = False
    for optimizer in (plain, own):
        take(optimizer, range(3))
    assert_equal(own, plain)
    own.fails, before = True, copy.deepcopy(own.state_dict())
    weights = [p.detach().clone() for p in own.param_groups[0]["params"]]
    with pytest.raises(RuntimeError, match="of the user"):
        take(own, [3])
    own.fails = False
    with pytest.raises(RuntimeError, match="ended the last step"):
        take(own, [3])
    own.load_state_dict(before)
    torch._foreach_copy_([p.detach() for p in own.param_groups[0]["params"]], weights)
    for optimizer in (plain, own):
        take(optimizer, range(3, 5))
    assert_equal(own, plain)


def test_l2_decay_and_gradients_in_bf16():
    params = parameters(BF16)
    settings = {"weight_decay": 0.1, "weight_decay_method": "l2", "momentum": 0.5, "nesterov": False, "lr": 0.0}
    optimizer = TensorParallelMuon(params, execution=Execution(momentum_dtype=BF16), **settings)
    take(optimizer, range(2))
    for i, (p, m) in enumerate(zip(params, momenta(optimizer), strict=True)):
        both = [g[i].to(BF16).double() + 0.1 * p.double() for g in (gradients(0), gradients(1))]
        torch.testing.assert_close(m.double(), both[0] / 4 + both[1] / 2, rtol=2**-6, atol=2**-7)


def test_refusals():
    with pytest.raises(ValueError, match=r"averaged in fp32, got a parameter in fp64 of shape \(12, 8\)"):
        build("muon", parameters(torch.float64), momentum_dtype=BF16)
    for name in (*ELEMENTWISE, "soap", "spectron"):
        with pytest.raises(TypeError, match="momentum_dtype"):
            build(name, parameters(), momentum_dtype=BF16)
