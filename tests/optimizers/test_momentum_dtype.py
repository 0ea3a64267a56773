"""Momenta in bf16: how far they are from fp32, what a step makes of them, and what is refused."""

import copy
import logging

import pytest
import torch

from tests.optimizers.family import ELEMENTWISE, build, having, take
from tests.optimizers.several import parameters as of_shapes

RELATIVES = having("momentum_dtype")
relatives = pytest.mark.parametrize("name", RELATIVES)
BF16 = torch.bfloat16
MOMENTUM = "momentum_buffer"
SHAPES = [(12, 8), (8, 12), (12, 8), (6, 130)]


def parameters(dtype=torch.float32):
    return of_shapes(SHAPES, dtype)


def gradients(step):
    """Those that ``take`` gives."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def momenta(optimizer):
    return [state[MOMENTUM] for state in optimizer.state.values()]


@relatives
def test_the_state_takes_half_the_bytes(name):
    wide, narrow = build(name, parameters()), build(name, parameters(), momentum_dtype=BF16)
    for optimizer in (wide, narrow):
        take(optimizer, 2)
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
        take(optimizer, 1)
    for p, q in zip(wide.state, narrow.state, strict=True):
        assert torch.equal(p, q)
    for optimizer in (wide, narrow):
        take(optimizer, 1, start=1)
    assert not all(torch.equal(p, q) for p, q in zip(wide.state, narrow.state, strict=True))


@pytest.mark.parametrize("beta", [0.5, 0.95])
def test_the_error_of_a_momentum_is_bounded(beta):
    """One rounding moves an entry by less than the spacing, at most 2^-7 of it; every step multiplies that by beta."""
    optimizer = build("muon", parameters(), momentum=beta, momentum_dtype=BF16)
    exact = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    bound = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    errors = []
    for step in range(150):
        take(optimizer, 1, step)
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
    take(first, 3)
    second = build("muon", parameters(), momentum_dtype=now)
    with caplog.at_level(logging.WARNING):
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    dtypes = (torch.bfloat16, torch.float32) if was else (torch.float32, torch.bfloat16)
    said = f"TensorParallelMuon converts the state that it loads: {MOMENTUM} from {dtypes[0]} to {dtypes[1]}"
    assert [record.getMessage() for record in caplog.records] == [said]
    for m, other in zip(momenta(second), momenta(first), strict=True):
        assert torch.equal(m, other.to(dtypes[1]))
    take(second, 2, start=3)
    assert second.param_groups[0].get("momentum_steps") == {None: 3, BF16: 2}[now]


def test_refusals():
    with pytest.raises(ValueError, match=r"averaged in fp32, got a parameter in fp64 of shape \(12, 8\)"):
        build("muon", parameters(torch.float64), momentum_dtype=BF16)
    for name in (*ELEMENTWISE, "soap", "spectron"):
        with pytest.raises(TypeError, match="momentum_dtype"):
            build(name, parameters(), momentum_dtype=BF16)
