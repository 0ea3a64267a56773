"""Averages of weights beside any optimizer, against their definitions: evaluated, saved, resumed and refused."""

import copy
import pickle

import pytest
import torch

from megatron_eopt import Muon, WeightAverage
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.optimizers.weight_average import AVERAGE, SCHEDULE
from tests.optimizers.family import build, matrices, take
from tests.optimizers.several import run

AVERAGED = [name for name in OPTIMIZERS if name != "schedule_free_adamw"]
RULES = ["ema:0.8", "tail:3"]


def with_adamw(dtype=torch.float32):
    of_muon, rest = matrices(), [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.zeros(3, 4))]
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in (*of_muon, *rest)]
    return Muon(params[:2], params[2:], adam_lr=0.01), params


def adamw(dtype=torch.float32):
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in matrices()]
    return torch.optim.AdamW(params, lr=0.1), params


def muon(dtype=torch.float32):
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in matrices()]
    return OPTIMIZERS["muon"].cls(params, lr=0.1), params


def by_definition(rule, weights):
    """The average of a list of weights in fp64, all of which are kept."""
    kind, number = rule.split(":")
    if kind == "ema":
        parts = [float(number) ** age for age in reversed(range(len(weights)))]
    else:
        in_window = (len(weights) - 1) % int(number) + 1
        parts = [0.0] * (len(weights) - in_window) + [1.0] * in_window
    return sum(part * w.double() for part, w in zip(parts, weights, strict=True)) / sum(parts)


def stepped(optimizer, params, average, rule, steps):
    """Compares in each step the average with its definition."""
    seen = [[] for _ in params]
    for step in range(steps):
        run(optimizer, params, [step])
        for p, of_p in zip(params, seen, strict=True):
            of_p.append(p.detach().clone())
            torch.testing.assert_close(average.of(p).double(), by_definition(rule, of_p), rtol=2e-6, atol=1e-6)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", [with_adamw, adamw, muon])
def test_the_average_is_what_its_definition_says_after_every_step(make, rule, dtype):
    optimizer, params = make(dtype)
    average = WeightAverage(rule, optimizer)
    assert all(torch.equal(average.of(p), p.to(average.of(p).dtype)) for p in params)  # before the first step
    seen = stepped(optimizer, params, average, rule, 8)
    assert average.of(params[0]).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not torch.equal(average.of(params[0]), params[0].to(average.of(params[0]).dtype))
    if rule == "tail:3":  # at the end of a window, the mean of the last three
        run(optimizer, params, [8])
        mean = sum(w.double() for w in (*seen[0][-2:], params[0])) / 3
        torch.testing.assert_close(average.of(params[0]).double(), mean, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", AVERAGED)
def test_steps_beside_an_average_are_the_steps_without(name):
    own, other = matrices(), matrices()
    straight, optimizer = build(name, other), build(name, own)
    average = WeightAverage("ema:0.9", optimizer)
    take(straight, 4)
    take(optimizer, 4)
    assert all(torch.equal(p, q) for p, q in zip(own, other, strict=True))
    assert not any(torch.equal(average.of(p), p) for p in own)


def test_a_window_begins_where_the_remaining_steps_are_one_window():
    optimizer, params = muon()
    average = WeightAverage("tail:3", optimizer, remaining=lambda: 7 - len(counts))
    counts = []
    for step in range(8):
        run(optimizer, params, [step])
        counts.append(average.steps)
    assert counts == [1, 2, 3, 1, 2, 1, 2, 3]


def test_a_restarted_average_has_no_trace_of_what_was_before():
    optimizer, params = muon()
    average = WeightAverage("ema:0.9", optimizer)
    run(optimizer, params, range(3))
    average.restart()
    run(optimizer, params, [3])
    assert average.steps == 1
    assert all(torch.equal(average.of(p), p) for p in params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [with_adamw, adamw, muon])
def test_parameters_are_at_their_averages_in_a_block_and_training_goes_on_bit_for_bit(make, dtype):
    straight, of_straight = make(dtype)
    optimizer, params = make(dtype)
    average = WeightAverage("ema:0.9", optimizer)
    for step in range(4):
        run(straight, of_straight, [step])
        run(optimizer, params, [step])
        averages = [average.of(p).to(dtype) for p in params]
        with average.applied():
            assert all(torch.equal(p, a) for p, a in zip(params, averages, strict=True))
        assert all(torch.equal(p, q) for p, q in zip(params, of_straight, strict=True))
    with average.applied(), pytest.raises(RuntimeError, match="parameters are at their averages, and a step would"):
        run(optimizer, params, [4])
    run(optimizer, params, [4])
    run(straight, of_straight, [4])
    assert all(torch.equal(p, q) for p, q in zip(params, of_straight, strict=True))


def through_a_file(state_dict):
    return pickle.loads(pickle.dumps(state_dict))


def resumed(make, dtype, rule, optimizer, params):
    other, of_other = make(dtype)
    for p, q in zip(of_other, params, strict=True):
        p.data.copy_(q)
    average = WeightAverage(rule, other)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    return other, of_other, average


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", [with_adamw, adamw, muon])
def test_a_resumed_average_goes_on_bit_for_bit(make, rule, dtype):
    optimizer, params = make(dtype)
    average = WeightAverage(rule, optimizer)
    run(optimizer, params, range(4))
    other, of_other, again = resumed(make, dtype, rule, optimizer, params)
    assert again.steps == average.steps
    for step in range(4, 7):
        run(optimizer, params, [step])
        run(other, of_other, [step])
        for p, q in zip(params, of_other, strict=True):
            assert torch.equal(p, q)
            assert torch.equal(average.of(p), again.of(q))


def test_a_copy_goes_on_where_an_average_is_made_of_it():
    optimizer, params = muon()
    WeightAverage("ema:0.9", optimizer)
    run(optimizer, params, range(3))
    copied = copy.deepcopy(optimizer)
    average = WeightAverage("ema:0.9", copied)
    assert average.steps == 3
    of_copy = copied.param_groups[0]["params"]
    assert all(torch.equal(average.of(q), optimizer.state[p][AVERAGE]) for p, q in zip(params, of_copy, strict=True))


@pytest.mark.parametrize("make", [with_adamw, adamw, muon])
def test_a_state_without_an_average_begins_one_and_says_so(make, caplog):
    optimizer, params = make()
    run(optimizer, params, range(2))
    other, of_other, average = resumed(make, torch.float32, "ema:0.9", optimizer, params)
    assert "loads a state with no average of weights, and this run's is ema:0.9: it begins anew" in caplog.text
    run(other, of_other, [2])
    assert average.steps == 1
    assert all(torch.equal(average.of(p), p) for p in of_other)


@pytest.mark.parametrize("make", [with_adamw, muon])
def test_an_optimizer_without_an_average_drops_what_it_loads_and_says_so(make, caplog):
    optimizer, params = make()
    WeightAverage("ema:0.9", optimizer)
    run(optimizer, params, range(2))
    other, _ = make()
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert "loads a state with an average of weights, which it drops: make a WeightAverage" in caplog.text
    kept = {key for state in other.state_dict()["state"].values() for key in state}
    assert not any(AVERAGE in key or SCHEDULE in key for key in kept)


@pytest.mark.parametrize("make", [with_adamw, adamw, muon])
def test_an_average_by_another_rule_begins_anew_and_says_so(make, caplog):
    optimizer, params = make()
    WeightAverage("ema:0.9", optimizer)
    run(optimizer, params, range(2))
    _, of_other, average = resumed(make, torch.float32, "tail:3", optimizer, params)
    assert "loads a state with the average ema:0.9 of weights, and this run's is tail:3: it begins anew" in caplog.text
    assert average.steps == 0
    assert all(torch.equal(average.of(p), p) for p in of_other)


def test_an_average_of_another_shape_is_refused_before_anything_changes():
    optimizer, params = adamw()
    average = WeightAverage("ema:0.9", optimizer)
    run(optimizer, params, range(2))
    saved = through_a_file(optimizer.state_dict())
    saved["state"][0][AVERAGE] = torch.ones(3, 3)
    before = average.of(params[0]).clone()
    with pytest.raises(ValueError, match=r"'weight_average' has shape \(3, 3\), expected \(6, 4\) of its parameter"):
        optimizer.load_state_dict(saved)
    assert torch.equal(average.of(params[0]), before)


def test_a_parameter_without_gradients_is_its_own_average_until_it_has_one():
    optimizer, params = adamw()
    average = WeightAverage("ema:0.9", optimizer)
    for step in range(4):
        for p in params[: 1 if step < 2 else 2]:
            p.grad = torch.full_like(p, 1.0 + step)
        optimizer.step()
        assert step >= 2 or torch.equal(average.of(params[1]), params[1])
        assert step >= 2 or params[1] not in optimizer.state
    assert not torch.equal(average.of(params[1]), params[1])


@pytest.mark.parametrize("rule", ["ema", "ema:1", "ema:0", "ema:nan", "ema:x", "tail:0", "tail:-1", "tail:2.5", "", 3])
def test_other_rules_are_refused(rule):
    optimizer, _ = adamw()
    with pytest.raises(ValueError, match="an average of weights is ema:DECAY with 0 < DECAY < 1"):
        WeightAverage(rule, optimizer)


def test_a_second_average_and_schedule_free_are_refused():
    optimizer, _ = muon()
    WeightAverage("ema:0.9", optimizer)
    with pytest.raises(ValueError, match=r"already has an average of weights, ema:0\.9"):
        WeightAverage("tail:3", optimizer)
    with pytest.raises(ValueError, match="ScheduleFreeAdamW is an average of weights itself: leave tail:3 away"):
        WeightAverage("tail:3", build("schedule_free_adamw", matrices()))


def test_what_is_no_set_of_optimizers_is_refused():
    p = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.AdamW([p])
    with pytest.raises(ValueError, match="one or more different optimizers, got none"):
        WeightAverage("ema:0.9")
    with pytest.raises(ValueError, match="one or more different optimizers, got AdamW, AdamW"):
        WeightAverage("ema:0.9", optimizer, optimizer)
    with pytest.raises(ValueError, match=r"no optimizer of this average has the parameter of shape \(5,\)"):
        WeightAverage("ema:0.9", optimizer).of(torch.nn.Parameter(torch.ones(5)))


def test_an_average_that_a_load_has_rounded_is_not_gone_on_from():
    """torch casts state to the dtype of the parameter, in bf16 also a count of steps."""
    first, second = (torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))]) for _ in range(2))
    WeightAverage("tail:20", first)
    first.param_groups[0]["params"][0].grad = torch.ones(2, 3, dtype=torch.bfloat16)
    first.step()
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"has rounded to torch\.bfloat16: make a WeightAverage before the load"):
        WeightAverage("tail:20", second)
