"""A step of Spectron for many equal matrices: few operations, stacks of bounded size, the step of each by itself."""

from collections import Counter

import pytest
import torch
from counting import Operations

from megatron_eopt.matrices import GATE_UP, experts
from megatron_eopt.optimizers import foreach
from megatron_eopt.optimizers.spectron import factor_pairs
from tests.optimizers.several import run, set_gradients
from tests.optimizers.spectrons import parameters, spectron

SHAPES = [(64, 64), (96, 64), (64, 96), (128, 64), (64, 128)]
MOST = 1500


class Sizes(Operations):
    """Has also the most bytes that each operation makes, or changes."""

    def __init__(self):
        super().__init__()
        self.largest = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = super().__torch_dispatch__(func, types, args, kwargs)
        changed = made if made is not None else args[0]
        tensors = changed if isinstance(changed, list | tuple) else [changed]
        nbytes = sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))
        name = func.overloadpacket.__name__
        self.largest[name] = max(self.largest[name], nbytes)
        return made


def operations(optimizer, params, accepted=None):
    """Of one step, without the check of the gradients, which reads its result on a CPU alone."""
    with Sizes() as found, torch.no_grad():
        optimizer._take(torch.ones(len(params), dtype=torch.bool) if accepted is None else accepted)
    return found


@pytest.mark.parametrize("left_out", ["none", "every third"])
def test_a_step_of_many_matrices_takes_few_operations(left_out):
    params = parameters(SHAPES * 64)
    optimizer = spectron(params, lr=0.05, rank=16, fp32_matmul_prec="medium")
    run(optimizer, params, [0])
    accepted = torch.arange(len(params)) % 3 >= (left_out == "every third")
    assert operations(optimizer, params, accepted).counts.total() <= MOST


def test_a_step_of_many_pairs_takes_few_operations():
    params = parameters([(64, 16), (16, 96)] * 160)
    optimizer = spectron([factor_pairs(list(zip(params[::2], params[1::2], strict=True)))], lr=0.05)
    run(optimizer, params, [0])
    assert operations(optimizer, params).counts.total() <= MOST


def mixed():
    """Equal parameters, and others between them: weights, weights of several matrices, and pairs of factors."""
    weights = parameters([(24, 16), (16, 24), (24, 16), (3, 24, 16), (48, 16), (24, 16), (48, 16), (16, 24)])
    A, B, C, D, E, F = parameters([(24, 4), (4, 16), (24, 4), (16, 4), (24, 4), (4, 16)])
    weights[3].logical_matrices = experts(3)
    weights[4].logical_matrices = weights[6].logical_matrices = GATE_UP
    return weights, [(A, B), (C, D), (E, F)]


def built(weights, pairs, **settings):
    groups = [{"params": weights}] * bool(weights) + [factor_pairs(pairs, weight_decay=0.3)] * bool(pairs)
    return spectron(groups, lr=0.05, **settings)


def state_of(optimizer, p):
    return {"p": p.detach().clone(), **{key: value.clone() for key, value in optimizer.state[p].items()}}


@pytest.mark.parametrize("most", [2**28, 2**12, 1])
def test_equal_matrices_step_as_each_by_itself(most, monkeypatch):
    (weights, pairs), (alone, pairs_alone) = mixed(), mixed()
    params, each = [*weights, *sum(pairs, ())], [*alone, *sum(pairs_alone, ())]
    apart = [built([p], []) for p in alone] + [built([], [pair]) for pair in pairs_alone]
    monkeypatch.setattr(foreach, "MOST_BYTES", most)
    together = built(weights, pairs)
    for step in range(3):
        set_gradients(params, step)
        set_gradients(each, step)
        for optimizer in (together, *apart):
            optimizer.step()
    kept = {p: optimizer.state[p] for optimizer in apart for p in optimizer.state}
    for p, q in zip(params, each, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        for key, value in together.state[p].items():
            torch.testing.assert_close(value, kept[q][key], rtol=1e-5, atol=1e-6)


def test_what_is_not_accepted_stays_bit_for_bit_among_equal_matrices():
    (weights, pairs), (others, other_pairs) = mixed(), mixed()
    params, all_step = [*weights, *sum(pairs, ())], [*others, *sum(other_pairs, ())]
    one, other = built(weights, pairs), built(others, other_pairs)
    for optimizer, of_it in ((one, params), (other, all_step)):
        run(optimizer, of_it, range(2))
        set_gradients(of_it, 2)
    left_out = {2, 4, 9}  # of the first pair one factor, with which the other stays
    for index in left_out:
        params[index].grad[..., 0, 0] = torch.nan
    before = [state_of(one, p) for p in params]
    one.step()
    other.step()
    for index, (p, q) in enumerate(zip(params, all_step, strict=True)):
        expected = before[index] if index in left_out | {8} else state_of(other, q)
        for key, value in state_of(one, p).items():
            assert torch.equal(value, expected[key]), (index, key)


def test_a_rate_of_zero_leaves_equal_matrices_bit_equal():
    weights, pairs = mixed()
    params, optimizer = [*weights, *sum(pairs, ())], built(weights, pairs)
    run(optimizer, params, range(2))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [state_of(optimizer, p) for p in params]
    run(optimizer, params, [2])
    for p, old in zip(params, before, strict=True):
        for key, value in state_of(optimizer, p).items():
            assert torch.equal(value, old[key]) == (key == "p" or key.startswith(("factor", "projected"))), key


@pytest.mark.parametrize("stacked", [False, True])
def test_stacks_are_of_bounded_size(stacked, monkeypatch):
    one = 4 * 96 * 64
    params = parameters([(8, 96, 64)] if stacked else [(96, 64)] * 8)
    if stacked:
        params[0].logical_matrices = experts(8)
    optimizer = spectron(params, lr=0.05)
    run(optimizer, params, [0])
    set_gradients(params, 1)
    assert operations(optimizer, params).largest["bmm"] == 8 * one
    monkeypatch.setattr(foreach, "MOST_BYTES", 3 * one)
    found = operations(optimizer, params)
    assert found.largest["bmm"] == 3 * one
    assert found.largest["stack"] <= 3 * one
    # nor are more of them there at a time, but for the matrices of one parameter
    assert found.largest["_foreach_copy_"] == (8 if stacked else 3) * one
