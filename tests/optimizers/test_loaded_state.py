"""What a loaded state may be: whole, finite, and each tensor with memory of its own. Else it is refused, or said."""

import copy
import logging
import math
import re

import pytest
import torch

from megatron_eopt import WeightAverage
from megatron_eopt.family import OPTIMIZERS
from tests.optimizers.family import build, every, every_class, matrices, take


def tensors_of(state_dict):
    """Parameter and key of the tensors with more than one entry, and those tensors."""
    found = []
    for index, state in state_dict["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
                found.append((index, key, value))
    return found


def keys_of(name):
    """Each key of a parameter's state, but those of further logical matrices."""
    optimizer = build(name, matrices())
    take(optimizer, 2)
    return sorted({key for _, key, _ in tensors_of(optimizer.state_dict())})


def saved_and_other(name):
    """The state of an optimizer after some steps, and another one that has made others."""
    first, second = build(name, matrices()), build(name, matrices(seed=3))
    take(first, 3)
    take(second, 2, start=7)
    return copy.deepcopy(first.state_dict()), second


def snapshot(optimizer):
    return copy.deepcopy((optimizer.state_dict(), optimizer.param_groups))


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def assert_refused(optimizer, state_dict, *words, error=ValueError):
    before = snapshot(optimizer)
    with pytest.raises(error) as raised:
        optimizer.load_state_dict(state_dict)
    for word in words:
        assert word in str(raised.value)
    assert same(before, snapshot(optimizer))
    optimizer.load_state_dict(before[0])
    take(optimizer, 1, start=20)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@every_class
def test_values_that_are_not_finite_are_refused_by_name_whatever_the_key(name, value):
    for key in keys_of(name):
        saved, optimizer = saved_and_other(name)
        index = [index for index, known, _ in tensors_of(saved) if known == key][-1]
        saved["state"][index][key].view(-1)[-1] = value
        of_adamw = name == "with_adamw" and key != "momentum_buffer"
        called = "parameter 0 of group 1" if of_adamw else f"parameter {index} of group 0"
        assert_refused(optimizer, saved, "not finite", repr(key), called)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_value_that_only_a_wider_dtype_can_hold_is_refused(name):
    saved, optimizer = saved_and_other(name)
    index, key, value = tensors_of(saved)[0]
    saved["state"][index][key] = torch.full(value.shape, 1e200, dtype=torch.float64)
    assert_refused(optimizer, saved, "not finite", repr(key))


@every_class
@pytest.mark.parametrize("found", [None, [[0.0, 1.0]]], ids=["None", "list"])
def test_what_has_no_values_is_refused_by_name(name, found):
    saved, optimizer = saved_and_other(name)
    index, key, _ = tensors_of(saved)[0]
    saved["state"][index][key] = found
    assert_refused(optimizer, saved, repr(key), "in the state", error=TypeError)


def required(name):
    """Keys that a state needs: those of the second moment of a run without one are no others."""
    optimizer = build(name, matrices())
    take(optimizer, 1)
    p = optimizer.param_groups[0]["params"][1]
    return [tensor.key for tensor in optimizer.state_tensors(p) if not tensor.optional]


@every
def test_a_key_that_is_missing_beside_others_is_refused(name):
    keys = required(name)
    for key in keys if len(keys) > 1 else ():
        saved, optimizer = saved_and_other(name)
        del saved["state"][1][key]
        assert_refused(optimizer, saved, repr(key))


@every
@pytest.mark.parametrize("left", ["no entry", "an empty one"])
def test_a_parameter_without_state_beside_others_is_named(name, left, caplog):
    """As a parameter is that never had a gradient, which a state dict leaves out."""
    saved, optimizer = saved_and_other(name)
    if left == "no entry":
        del saved["state"][1]
    else:
        saved["state"][1] = {}
    with caplog.at_level(logging.WARNING):
        optimizer.load_state_dict(saved)
    told = [record.getMessage() for record in caplog.records if "begins anew" in record.getMessage()]
    assert len(told) == 1, told
    assert "parameter 1 of group 0" in told[0]
    assert "parameter 0" not in told[0]
    take(optimizer, 1, start=5)


@every
def test_a_parameter_that_never_had_a_gradient_loads_and_goes_on_alike(name):
    pairs = [matrices(), matrices()]
    first, second = (build(name, each) for each in pairs)
    for step in range(2):
        pairs[0][0].grad = matrices(1, seed=step)[0].detach()
        first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for p, q in zip(*pairs, strict=True):
        q.data.copy_(p.data)
    for each in (first, second):
        take(each, 2, start=2)
    assert all(map(torch.equal, *pairs))


@every
def test_states_that_say_all_there_is_are_loaded_without_a_word(name, caplog):
    """Of a run that made no step, of frozen parameters, and with every state there."""
    saved, optimizer = saved_and_other(name)
    fresh = build(name, matrices()).state_dict()
    p, q = matrices()
    q.requires_grad_(False)
    frozen = build(name, [p, q])
    p.grad = torch.ones_like(p)
    frozen.step()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        optimizer.load_state_dict(saved)
        optimizer.load_state_dict(fresh)
        frozen.load_state_dict(copy.deepcopy(frozen.state_dict()))
    assert not [record.getMessage() for record in caplog.records if "anew" in record.getMessage()]


@every
def test_rates_that_no_step_could_use_are_refused_with_the_state(name):
    for key, value in (("lr", math.nan), ("lr", "0.1"), ("lr", -1.0), ("weight_decay", math.nan)):
        saved, optimizer = saved_and_other(name)
        if key in saved["param_groups"][0]:
            saved["param_groups"][0][key] = value
            assert_refused(optimizer, saved, key, error=(TypeError, ValueError))


@every_class
def test_what_belongs_to_no_parameter_stays_and_changes_no_step(name):
    """As torch keeps it, which has no other place for what belongs to a whole optimizer."""
    saved, optimizer = saved_and_other(name)
    reference = build(name, [torch.nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]])
    reference.load_state_dict(copy.deepcopy(saved))
    optimizer.load_state_dict({**saved, "state": {**saved["state"], "mine": {"momentum_buffer": torch.ones(3)}}})
    for each in (optimizer, reference):
        take(each, 2, start=3)
    for p, q in zip(optimizer.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["muon", "lion", "with_adamw"])
def test_an_average_of_weights_that_is_not_finite_is_refused(name):
    optimizers = [build(name, matrices()) for _ in range(2)]
    for optimizer in optimizers:
        WeightAverage("ema:0.9", optimizer)
        take(optimizer, 2)
    saved = copy.deepcopy(optimizers[0].state_dict())
    saved["state"][1]["weight_average"].view(-1)[0] = math.nan
    before = copy.deepcopy(optimizers[1].state_dict())
    with pytest.raises(ValueError, match=r"weight_average.*parameter 1 of group 0.*not finite"):
        optimizers[1].load_state_dict(saved)
    assert same(before, copy.deepcopy(optimizers[1].state_dict()))


def test_names_of_the_model_are_in_the_message():
    model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4, bias=False))
    optimizers = [build("muon", list(copy.deepcopy(model).named_parameters())) for _ in range(2)]
    take(optimizers[0], 1)
    saved = copy.deepcopy(optimizers[0].state_dict())
    saved["state"][1]["momentum_buffer"][0, 0] = math.nan
    with pytest.raises(ValueError, match=re.escape("'momentum_buffer' of 1.weight")):
        optimizers[1].load_state_dict(saved)
