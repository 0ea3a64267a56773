import copy
import math
import pickle

import emerging_optimizers.scalar_optimizers as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_eopt import Lion
from tests.distributed.ranks import run_ranks

METHODS = ["decoupled", "independent", "palm", "l2"]
SHAPES = [(6, 4), (5,), (), (2, 3, 4), (0, 3)]


def parameters(shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params, step, scale=1.0):
    for index, p in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + index)
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


def set_quarters_as_gradients(params, step):
    """Gradients whose averages are exact at betas of a few binary places: a sum that is zero is so in every dtype."""
    set_gradients(params, step, scale=4.0)
    for p in params:
        p.grad = p.grad.round() / 4


def run(optimizer, params, steps):
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


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
    before, gradients = copy.deepcopy(params), [[] for _ in params]
    optimizer = Lion(params, **settings)
    for step in range(steps):
        set_gradients(params, step)
        for seen, p in zip(gradients, params, strict=True):
            seen.append(p.grad.clone())
        optimizer.step()
        assert all(torch.equal(p.grad, seen[-1]) for seen, p in zip(gradients, params, strict=True))
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
    params, before, gradients = parameters(), parameters(), [[] for _ in SHAPES]
    optimizer = Lion([{"params": params[:2], **settings[0]}, {"params": params[2:4]}], **settings[1])
    optimizer.add_param_group({"params": params[4:], **settings[0]})
    for step in range(3):
        run(optimizer, params, [step])
        for seen, p in zip(gradients, params, strict=True):
            seen.append(p.grad)
    for index, which in enumerate((0, 0, 1, 1, 0)):
        expected, _ = reference_steps(before[index], gradients[index], **settings[which])
        torch.testing.assert_close(params[index].detach(), expected, rtol=1e-6, atol=1e-6)


def test_the_closure_has_gradients_and_its_loss_is_returned():
    (p,) = parameters([(6, 4)])
    optimizer = Lion([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        expected = p.square().sum().item()
        assert optimizer.step(closure).item() == expected
    assert p.square().sum() < expected


def test_a_parameter_without_gradient_is_left_as_it_is():
    p, q = parameters([(6, 4), (5,)])
    optimizer = Lion([p, q], weight_decay=0.5)
    set_gradients([p], 1)
    before = q.detach().clone()
    optimizer.step()
    assert torch.equal(q, before)
    assert q not in optimizer.state
    optimizer.init_state()
    assert torch.equal(optimizer.state[q]["exp_avg"], torch.zeros(5))


def test_maximize_goes_the_other_way():
    ours, mirrored = parameters(), parameters()
    a, b = Lion(ours, lr=0.1, maximize=True), Lion(mirrored, lr=0.1)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(mirrored, step, scale=-1.0)
        a.step()
        b.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, mirrored, strict=True))


def test_a_learning_rate_as_a_tensor():
    ours, plain = parameters(), parameters()
    run(Lion(ours, lr=torch.tensor(0.01), weight_decay=0.1), ours, range(3))
    run(Lion(plain, lr=0.01, weight_decay=0.1), plain, range(3))
    for p, q in zip(ours, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def through_state_dict(optimizer, params):
    resumed = copy.deepcopy(params)
    new = Lion(resumed)
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return new


def from_emerging_optimizers(optimizer, params):
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["maximize"]
    new = Lion(copy.deepcopy(params))
    new.load_state_dict(state)
    return new


@pytest.mark.parametrize(
    "way",
    [
        through_state_dict,
        from_emerging_optimizers,
        lambda optimizer, params: copy.deepcopy(optimizer),
        lambda optimizer, params: pickle.loads(pickle.dumps(optimizer)),
    ],
    ids=["state_dict", "another package's state_dict", "deepcopy", "pickle"],
)
def test_a_restored_optimizer_goes_on_bit_for_bit(way):
    settings = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}
    straight = parameters()
    run(Lion(straight, **settings), straight, range(6))
    stopped = parameters()
    first = Lion(stopped, **settings)
    run(first, stopped, range(3))
    second = way(first, stopped)
    resumed = second.param_groups[0]["params"]
    assert all(p is not q for p, q in zip(resumed, stopped, strict=True))
    run(second, resumed, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(resumed, straight, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_gradient_that_is_not_finite_is_as_if_its_step_had_not_been(bad):
    def go(steps, bad_at=None):
        params = parameters([(6, 4), (5,)])
        optimizer = Lion(params, lr=0.1, weight_decay=0.5)
        for step in steps:
            set_gradients(params, step)
            if step == bad_at:
                params[0].grad[2, 1] = bad
            optimizer.step()
        return params, optimizer

    (p, q), optimizer = go((1, 2, 3), bad_at=2)
    (expected_p, _), without = go((1, 3))
    (_, expected_q), _ = go((1, 2, 3))
    assert torch.equal(p, expected_p)
    assert torch.equal(optimizer.state[p]["exp_avg"], without.state[expected_p]["exp_avg"])
    assert torch.equal(q, expected_q)
    assert optimizer.skipped_steps() == {"parameter 0 of group 0, of shape (6, 4)": 1}


def test_several_in_a_row_are_an_error():
    (p,) = parameters([(6, 4)])
    optimizer = Lion([("layer.weight", p)])
    p.grad = torch.full_like(p, torch.nan)
    for _ in range(4):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"not finite in 5 steps in a row, of layer\.weight"):
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, r"Lion: lr must be a finite number of at least 0, got -1\.0"),
        ({"lr": math.nan}, "Lion: lr must be a finite number of at least 0, got nan"),
        ({"weight_decay": -0.1}, r"Lion: weight_decay must be a finite number of at least 0, got -0\.1"),
        ({"betas": (1.0, 0.9)}, r"Lion: betas must be two numbers in \[0, 1\), got \(1\.0, 0\.9\)"),
        ({"betas": (0.9, -0.1)}, r"Lion: betas must be two numbers in \[0, 1\), got \(0\.9, -0\.1\)"),
        ({"weight_decay_method": "l1"}, "unknown weight_decay_method of Lion 'l1': expected one of decoupled, l2"),
        ({"betas": (0.9,)}, r"Lion: betas must be two numbers in \[0, 1\), got \(0\.9,\)"),
    ],
)
def test_wrong_settings_are_refused_at_construction_and_in_a_new_group(settings, message):
    p, q = parameters([(6, 4), (5,)])
    with pytest.raises(ValueError, match=message):
        Lion([p], **settings)
    optimizer = Lion([p])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [q], **settings})
    assert len(optimizer.param_groups) == 1


def _distributed_steps(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    shapes = [(5, 4), (7,), (1, 3)]  # uneven, and empty on one rank
    params = [torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in parameters(shapes)]
    optimizer = Lion(params, lr=0.01, weight_decay=0.1)
    for step in range(3):
        whole = parameters(shapes)
        set_gradients(whole, step)
        for p, q in zip(params, whole, strict=True):
            p.grad = distribute_tensor(q.grad, mesh, [Shard(0)])
        optimizer.step()
    return [(p.full_tensor().detach(), optimizer.state[p]["exp_avg"].full_tensor()) for p in params]


def test_dtensors_train_as_on_one_rank():
    params = parameters([(5, 4), (7,), (1, 3)])
    optimizer = Lion(params, lr=0.01, weight_decay=0.1)
    run(optimizer, params, range(3))
    for found in run_ranks(_distributed_steps, 2):
        for (p, momentum), alone in zip(found, params, strict=True):
            assert torch.equal(p, alone)
            assert torch.equal(momentum, optimizer.state[alone]["exp_avg"])
