import copy

import emerging_optimizers.scalar_optimizers as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt import Lion
from tests.distributed.ranks import run_ranks
from tests.optimizers.several import SHAPES, UNEVEN, gradients_of, parameters, run, set_gradients, stepped_in_shards

METHODS = ["decoupled", "independent", "palm", "l2"]


def set_quarters_as_gradients(params, step):
    """Gradients whose averages are exact at betas of a few binary places: a sum that is zero is so in every dtype."""
    set_gradients(params, step, scale=4.0)
    for p in params:
        p.grad = p.grad.round() / 4


def reference_steps(p, gradients, lr, betas, weight_decay, weight_decay_method="decoupled"):
    """The algorithm, written out for one tensor in fp64; what is kept is rounded to the dtype of the parameter."""
    kept = p.dtype
    p, m = p.detach().double().clone(), torch.zeros_like(p, dtype=torch.float64)
    for g in gradients:
        g = g.double() + (weight_decay * p if weight_decay_method == "l2" else 0)
        rate = {"decoupled": lr, "independent": 1, "palm": lr**2, "l2": 0}[weight_decay_method]
        p = (p - rate * weight_decay * p).to(kept).double()
        p = (p - lr * torch.sign(betas[0] * m + (1 - betas[0]) * g)).to(kept).double()
        m = (betas[1] * m + (1 - betas[1]) * g).to(kept).double()
    return p.to(kept), m.to(kept)


def follows(shapes, steps, dtype=torch.float32, rtol=1e-6, atol=1e-6, set_gradients=set_gradients, **settings):
    params = parameters(shapes, dtype)
    before, optimizer = copy.deepcopy(params), Lion(params, **settings)
    gradients = gradients_of(optimizer, params, range(steps), set_gradients)
    for p, first, seen in zip(params, before, gradients, strict=True):
        expected, momentum = reference_steps(first, seen, **settings)
        assert p.dtype == optimizer.state[p]["exp_avg"].dtype == dtype
        torch.testing.assert_close(p.detach(), expected, rtol=rtol, atol=atol)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], momentum, rtol=rtol, atol=atol)
        assert list(optimizer.state[p]) == ["exp_avg"]


def test_twenty_steps_follow_the_formula():
    follows(SHAPES, 20, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)


def test_twenty_steps_of_bf16_parameters_follow_the_formula():
    # the reference rounds where a value is kept and nowhere between; near a tie that is another neighbour than ours,
    # but a fifth of a step at most
    follows(SHAPES, 20, torch.bfloat16, 2**-7, 2e-3, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=20),
    lr=st.floats(0, 1),
    betas=st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.875])] * 2),
    weight_decay=st.floats(0, 1),
)
def test_shapes_and_settings_of_any_kind(shapes, lr, betas, weight_decay):
    follows(shapes, 3, set_gradients=set_quarters_as_gradients, lr=lr, betas=betas, weight_decay=weight_decay)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("maximize", [False, True])
def test_weight_decay_of_each_method_follows_the_formula(method, maximize):
    settings = {"lr": 0.3, "betas": (0.9, 0.99), "weight_decay": 0.05, "weight_decay_method": method}
    if not maximize:
        follows(SHAPES, 20, **settings)
        return
    ours, mirrored = parameters(), parameters()
    a, b = Lion(ours, maximize=True, **settings), Lion(mirrored, **settings)
    for step in range(3):  # decay pulls to zero either way
        set_gradients(ours, step)
        set_gradients(mirrored, step, scale=-1.0)
        a.step()
        b.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, mirrored, strict=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_emerging_optimizers(dtype, method):
    settings = {"lr": 0.01, "betas": (0.95, 0.98), "weight_decay": 0.1, "weight_decay_method": method}
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    a, b = Lion(ours, **settings), oracle.Lion(theirs, **settings)
    run(a, ours, range(20))
    with torch.compiler.set_stance("force_eager"):  # theirs is compiled, which takes longer than the steps
        run(b, theirs, range(20))
    for p, q in zip(ours, theirs, strict=True):
        tolerance = 1e-6 if dtype == torch.float32 else 0.0
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(a.state[p]["exp_avg"], b.state[q]["exp_avg"], rtol=tolerance, atol=tolerance)


def test_groups_have_settings_of_their_own():
    settings = [
        {"lr": 0.1, "betas": (0.5, 0.6), "weight_decay": 0.3},
        {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.0},
    ]
    params, before = parameters(), parameters()
    optimizer = Lion([{"params": params[:2], **settings[0]}, {"params": params[2:4]}], **settings[1])
    optimizer.add_param_group({"params": params[4:], **settings[0]})
    gradients = gradients_of(optimizer, params, range(3))
    for index, which in enumerate((0, 0, 1, 1, 0)):
        expected, _ = reference_steps(before[index], gradients[index], **settings[which])
        torch.testing.assert_close(params[index].detach(), expected, rtol=1e-6, atol=1e-6)


def test_an_unknown_weight_decay_method_is_refused():
    (p,) = parameters([(6, 4)])
    message = "Lion: unknown weight_decay_method 'l1': expected one of decoupled, l2"
    with pytest.raises(ValueError, match=message):
        Lion([p], weight_decay_method="l1")
    with pytest.raises(ValueError, match=message):
        Lion([p]).add_param_group({"params": parameters([(5,)]), "weight_decay_method": "l1"})


def _distributed_steps(rank, world_size):
    params, optimizer = stepped_in_shards(world_size, lambda params: Lion(params, lr=0.01, weight_decay=0.1))
    return [(p.full_tensor().detach(), optimizer.state[p]["exp_avg"].full_tensor()) for p in params]


@pytest.mark.wide
def test_dtensors_train_as_on_one_rank():
    params = parameters(UNEVEN)
    optimizer = Lion(params, lr=0.01, weight_decay=0.1)
    run(optimizer, params, range(3))
    for found in run_ranks(_distributed_steps, 2):
        for (p, momentum), alone in zip(found, params, strict=True):
            assert torch.equal(p, alone)
            assert torch.equal(momentum, optimizer.state[alone]["exp_avg"])
