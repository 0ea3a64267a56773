"""Gradients that are not finite, too large, or not there on every rank."""

import logging
from functools import partial

import pytest
import torch

from megatron_eopt import TensorParallelMuon
from megatron_eopt.optimizers.nonfinite import LARGEST_NORM, MAX_IN_A_ROW, NonFinite
from megatron_eopt.optimizers.with_adamw import Muon
from tests.optimizers.family import OPTIMIZERS, build, every
from tests.optimizers.field import gradient, matrix
from tests.optimizers.test_orthogonalized import optimizer

MAKE = {
    "base": lambda params: optimizer(params, weight_decay=0.5, use_nesterov=True),
    "muon": lambda params: TensorParallelMuon(params, lr=0.1, weight_decay=0.5),
    **{name: partial(build, name) for name in OPTIMIZERS if name != "muon"},
    **{name: partial(build, "adaptive_muon", moment2_method=name) for name in ("adamuon", "namo")},
}


@pytest.mark.parametrize("make", MAKE)
# in fp32 the squares of 1e20 are infinite, and those of 1e16 can be, over a small gradient before
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e16, 1e20, -1e30])
@pytest.mark.parametrize("at", [0, 1])
def test_a_gradient_that_is_not_finite_or_too_large_is_as_if_it_were_not_there(make, bad, at):
    def run(wrong=None):
        p, q = matrix(), matrix(5, 7, seed=1)
        opt = MAKE[make]([p, q])
        for step in range(3):
            p.grad, q.grad = gradient(p, step), gradient(q, step)
            if step == at and wrong == "missing":
                p.grad = None
            if step == at and wrong == "bad":
                p.grad[2, 1] = bad
            opt.step()
        return [p, *opt.state[p].values()], [q, *opt.state[q].values()], opt.skipped_steps()

    (own, other, skipped), (expected, *_), (_, undisturbed, none) = run("bad"), run("missing"), run()
    assert all(map(torch.equal, own, expected))
    assert all(map(torch.equal, other, undisturbed))
    assert (skipped, none) == ({"parameter 0 of group 0, of shape (6, 4)": 1}, {})


@pytest.mark.parametrize("make", ["base", "muon", "lion"])
def test_several_in_a_row_are_an_error_before_anything_changes(make, caplog):
    p, q = matrix(), matrix(5, 7, seed=1)
    opt = MAKE[make]([("layer.weight", p), ("other.weight", q)])
    with caplog.at_level(logging.WARNING):
        for step in range(MAX_IN_A_ROW - 1):
            p.grad, q.grad = torch.full_like(p, torch.nan), gradient(q, step)
            opt.step()
    assert [record.message for record in caplog.records] == [
        "gradients are not finite, or above 2^50 in norm, of layer.weight: "
        f"their steps are skipped, {count} in all so far"
        for count in range(1, MAX_IN_A_ROW)
    ]
    before = q.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"not finite in 5 steps in a row, .* of layer\.weight: these parameters stand"
    ):
        opt.step()
    assert torch.equal(q, before)


def test_a_good_gradient_starts_the_count_anew():
    p = matrix()
    opt = optimizer([p])
    for step in range(4 * MAX_IN_A_ROW):
        p.grad = torch.full_like(p, torch.nan) if step % MAX_IN_A_ROW else gradient(p, step)
        opt.step()
    assert sum(opt.skipped_steps().values()) == 4 * (MAX_IN_A_ROW - 1)


def test_a_missing_gradient_is_neither_counted_nor_good():
    skipping = NonFinite(["a", "b"], torch.device("cpu"))
    bad = torch.tensor([[torch.inf]])
    for _ in range(MAX_IN_A_ROW - 1):
        assert skipping.accept([bad, None]).tolist() == [False, False]
        assert skipping.accept([None, None]).tolist() == [False, False]
    assert skipping.total == {"a": MAX_IN_A_ROW - 1}
    with pytest.raises(RuntimeError, match=r"steps in a row, .* of a:"):
        skipping.accept([bad, torch.ones(1, 1)])


def test_what_another_rank_says_counts():
    def other(ok, present):
        flags = torch.tensor([[ok], [present], [-present]], dtype=torch.int32)
        return lambda own: torch.minimum(own, flags)

    skipping = NonFinite(["a"], torch.device("cpu"))
    good = torch.ones(2, 2)
    assert skipping.accept([good], other(1, 1)).tolist() == [True]
    assert skipping.accept([good], other(0, 1)).tolist() == [False]
    assert skipping.total == {"a": 1}
    assert skipping.accept([None], other(0, 0)).tolist() == [False]
    for own, theirs in ((good, other(0, 0)), (None, other(1, 1))):
        with pytest.raises(RuntimeError, match="a has a gradient on some of the ranks that share it, none on others"):
            NonFinite(["a"], torch.device("cpu")).accept([own], theirs)


@every
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("usual", [1.0, 1e-6])
def test_a_gradient_of_norm_1e15_is_a_step_like_others(name, at, usual):
    """Which no product of its squares makes infinite, nor the weights absurd."""
    p = matrix()
    before = p.detach().clone()
    opt = build(name, [p])
    for step in range(6):
        p.grad = usual * gradient(p, step)
        if step == at:
            p.grad *= 1e15 / p.grad.norm()
        opt.step()
        assert all(x.isfinite().all() for x in [p, *filter(torch.is_tensor, opt.state[p].values())])
    assert not torch.equal(p, before)
    assert opt.skipped_steps() == {}
    # PolarGrad's update is as large as the gradient
    assert name == "polargrad" or p.abs().max() < 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_large_and_empty_gradients_are_taken(dtype):
    largest = min(LARGEST_NORM / 64, torch.finfo(dtype).max)
    large = torch.full((64, 64), largest, dtype=dtype)
    skipping = NonFinite(["large", "empty", "zero"], torch.device("cpu"))
    assert skipping.accept([large, large.new_empty(0, 4), torch.zeros_like(large)]).all()


def test_gradients_of_several_dtypes_are_judged_by_one_bound():
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float64, torch.float64, torch.float32)
    values = (1.0, 1e14, 1.0, 1e300, torch.nan, torch.inf)
    gradients = [torch.full((2, 2), value, dtype=dtype) for value, dtype in zip(values, dtypes, strict=True)]
    skipping = NonFinite(list("abcdefg"), torch.device("cpu"))
    assert skipping.accept([*gradients, None]).tolist() == [True, True, True, False, False, False, False]
    assert skipping.total == {"d": 1, "e": 1, "f": 1}


def test_a_copy_to_the_host_is_awaited_on_the_device_of_the_parameters(monkeypatch):
    """Which need not be the current one: an event of that one's stream would tell nothing of the copy."""
    log = []

    class Event:
        def record(self, stream=None):
            log.append(("recorded on", stream))

        def query(self):
            return there

        def synchronize(self):
            log.append("awaited")

    empty, there = torch.empty, True
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **kwargs: empty(*size, **kwargs))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"the stream of {device}")
    nonfinite = NonFinite(["a"], torch.device("cpu"))
    nonfinite._device = torch.device("cuda:1")
    for _ in range(3):
        nonfinite._report()
    recorded = ("recorded on", "the stream of cuda:1")
    assert log == [recorded] * 3  # a copy that is there costs no call that waits
    there = False
    nonfinite._report()
    assert log == [recorded] * 4 + ["awaited"]


def said(caplog):
    """What was warned of steps without a gradient."""
    return [record.message for record in caplog.records if "has a gradient" in record.message]


@every
def test_a_step_in_which_no_parameter_has_a_gradient_is_told_once(name, caplog):
    p, q = matrix(), matrix(5, 7, seed=1)
    opt = build(name, [p, q])
    before = p.detach().clone()
    for _ in range(3):
        opt.step()
    [message] = said(caplog)
    assert message.startswith(f"{type(opt).__name__} makes a step in which none of its parameters (2) has a gradient")
    assert "fully_shard replaces the parameters of a model, so build the optimizer after it" in message
    assert torch.equal(p, before)


def test_a_gradient_of_one_parameter_is_enough_and_frozen_ones_need_none(caplog):
    p, q = matrix(), matrix(5, 7, seed=1)
    opt = TensorParallelMuon([p, q])
    q.grad = gradient(q, 0)
    opt.step()
    opt.step(lambda: (p.square().sum() + q.square().sum()).backward())
    TensorParallelMuon([matrix().requires_grad_(False)]).step()
    TensorParallelMuon([{"params": []}]).step()
    assert said(caplog) == []


def test_muon_with_adamw_inside_tells_of_matrices_without_a_gradient(caplog):
    p, q = matrix(), matrix(5, 7, seed=1)
    opt = Muon([p], [q])
    q.grad = gradient(q, 0)
    opt.step()
    opt.step()
    [message] = said(caplog)
    assert message.startswith("Muon makes a step in which none of its parameters (1) has a gradient")
