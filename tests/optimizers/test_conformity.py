"""What torch promises of every optimizer: closures, groups, state dicts, copies, schedulers, refusals."""

import copy
import io
import pickle

import pytest
import torch

from megatron_eopt import Muon, TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.matrices import concatenated
from tests.optimizers.family import build, every, every_class, having, matrices, take
from tests.optimizers.field import drawn

HOLD = {"weight_norm": "hold", "weight_decay": 0.0}


def parameters(optimizer):
    return [p.detach().clone() for group in of_matrices(optimizer) for p in group["params"]]


def of_matrices(optimizer):
    return getattr(optimizer, "matrices", optimizer).param_groups


def assert_equal(one, other):
    for a, b in zip(parameters(one), parameters(other), strict=True):
        assert torch.equal(a, b)


@every_class
def test_a_closure_is_called_once_with_gradients_enabled(name):
    own, other = matrices(1), matrices(1)
    target = torch.ones(6, 4)
    called = []

    def closure():
        called.append(torch.is_grad_enabled())
        closed.zero_grad()
        loss = (own[0] - target).square().sum()
        loss.backward()
        return loss

    closed, plain = build(name, own), build(name, other)
    with torch.no_grad():
        loss = closed.step(closure)
    other[0].grad = 2 * (other[0].detach() - target)
    assert plain.step() is None
    assert called == [True]
    torch.testing.assert_close(loss, (matrices(1)[0] - target).square().sum())
    torch.testing.assert_close(own[0], other[0])


@every
def test_groups_have_settings_of_their_own(name):
    together, apart = matrices(2), matrices(2)
    both = build(name, [{"params": together[:1], "lr": 0.02}, {"params": together[1:]}])
    alone = [build(name, apart[:1], lr=0.02), build(name, apart[1:])]
    for step in range(3):
        for ours, theirs in zip(together, apart, strict=True):
            ours.grad = drawn((6, 4), step)
            theirs.grad = ours.grad.clone()
        both.step()
        for each in alone:
            each.step()
    for ours, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # a stack rounds otherwise than one matrix


@every
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_rows_that_are_scaled_between_steps_stay_scaled(name, dtype, tolerance):
    """Whatever an optimizer keeps of its weights: a step that is next to nothing leaves them where they are."""
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in matrices()]
    optimizer = build(name, params)
    take(optimizer, 3)
    factors = torch.tensor([1.0, 0.5, 1.0, 0.25, 0.0, 1.0])
    expected = [params[0].detach() * factors.to(dtype)[:, None], params[1].detach().clone()]
    optimizer.scale_rows(params[:1], [factors])
    assert all(map(torch.equal, params, expected))
    for group in optimizer.param_groups:
        group["lr"] = 1e-9
    take(optimizer, 1)
    for found, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in OPTIMIZERS),
        *((name, HOLD) for name in ("muon", "adaptive_muon", "soap", "shampoo", "kl_shampoo")),
    ],
)
def test_rows_may_be_scaled_before_the_first_step_and_leave_no_graph_in_the_state(name, settings):
    params = matrices()
    optimizer = build(name, params, **settings)
    for steps in (0, 2):
        take(optimizer, steps)
        expected = params[0].detach() * 0.5
        optimizer.scale_rows(params[:1], [torch.full((6,), 0.5)])
        assert torch.equal(params[0], expected)
    kept = copy.deepcopy(optimizer.state_dict())["state"]
    assert not any(x.requires_grad for state in kept.values() for x in state.values() if isinstance(x, torch.Tensor))


@every
def test_a_group_that_is_added_is_stepped(name):
    first, second = matrices(2)
    optimizer = build(name, [first])
    take(optimizer, 2)
    optimizer.add_param_group({"params": [second], "lr": 0.5 if name != "spectron" else 0.05})
    before = second.detach().clone()
    take(optimizer, 3, start=2)
    assert not torch.equal(second, before)
    with pytest.raises(ValueError, match="lr must"):
        optimizer.add_param_group({"params": matrices(1, seed=5), "lr": -1.0})
    assert len(of_matrices(optimizer)) == 2


@every_class
def test_a_state_dict_goes_on_bit_for_bit(name):
    optimizer = build(name, matrices())
    take(optimizer, 3)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "parameters": parameters(optimizer)}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = build(name, [torch.nn.Parameter(p) for p in saved["parameters"]], lr=0.3)
    other.load_state_dict(saved["optimizer"])
    assert other.param_groups[0]["lr"] == 0.01
    for each in (optimizer, other):
        take(each, 3, start=3)
    assert_equal(optimizer, other)


@every_class
def test_a_parameter_without_gradient_is_left_as_it_is(name):
    p, q = matrices()
    optimizer = build(name, [p, q])
    before = q.detach().clone()
    for step in range(2):
        p.grad = matrices(1, seed=step)[0].detach()
        optimizer.step()
    assert torch.equal(q, before)
    makes_all_at_once = name in ("muon_hyperball", "with_adamw", "distributed_muon")
    assert (q in optimizer.state) is makes_all_at_once


@every
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_is_another_optimizer_that_does_the_same(name, steps, way):
    optimizer = build(name, matrices())
    take(optimizer, steps)
    other = way(optimizer)
    kept = parameters(other)
    take(optimizer, 3, start=steps)
    for one, before in zip(parameters(other), kept, strict=True):
        assert torch.equal(one, before)
    take(other, 3, start=steps)
    assert_equal(optimizer, other)


@every
@pytest.mark.parametrize("way", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_with_a_scheduler_steps_its_own_parameters(name, way):
    optimizer = build(name, matrices())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    other = way(optimizer)
    kept = parameters(optimizer)
    take(other, 2)
    assert all(map(torch.equal, kept, parameters(optimizer)))
    take(optimizer, 2)
    assert_equal(optimizer, other)


@pytest.mark.parametrize("name", having("split_qkv"))
@pytest.mark.parametrize("way", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_knows_the_matrices_that_are_declared(name, way):
    """torch copies a parameter without the attributes that it was given."""
    p = torch.nn.Parameter(drawn((6, 4), 9))
    p.logical_matrices = concatenated(a=3, b=3)
    optimizer = build(name, [p])
    take(optimizer, 1)
    other = way(optimizer)
    for each in (optimizer, other):
        take(each, 3, start=1)
    assert_equal(optimizer, other)


@pytest.mark.parametrize("name", having("maximize"))
def test_maximize_is_the_step_of_the_negated_gradient(name):
    up, down = matrices(1), matrices(1)
    for step in range(3):
        gradient = drawn((6, 4), step)
        up[0].grad, down[0].grad = gradient, -gradient
        if step == 0:
            ascends, descends = build(name, up, maximize=True), build(name, down)
        ascends.step()
        descends.step()
        assert torch.equal(up[0].grad, gradient)
    torch.testing.assert_close(up[0], down[0], rtol=0, atol=0)


@every
def test_schedulers_of_torch_set_the_rate_of_the_next_step(name):
    scheduled, by_hand = build(name, matrices()), build(name, matrices())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(scheduled, T_0=2)
    for step in range(5):
        by_hand.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
        for each in (scheduled, by_hand):
            take(each, 1, start=step)
        scheduler.step()
    assert_equal(scheduled, by_hand)


def one_entry(value, shape):
    return torch.full(shape, value)


@every_class
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("how", ["constructor", "set later", "changed in place", "loaded"])
def test_a_rate_may_be_a_tensor_of_one_entry(name, shape, how):
    number, own = build(name, matrices()), build(name, matrices(), lr=one_entry(0.01, shape))
    rate = one_entry(0.01, shape)
    if how == "set later":
        own = build(name, matrices())
        own.param_groups[0]["lr"] = rate
    if how == "changed in place":
        rate = one_entry(0.02, shape)
        own = build(name, matrices(), lr=rate)
        rate.mul_(0.5)
        number.param_groups[0]["lr"] = 0.01
    if how == "loaded":
        saved = own.state_dict()
        saved["param_groups"][0]["lr"] = rate
        own = build(name, matrices(), lr=0.5)
        own.load_state_dict(saved)
    for each in (number, own):
        take(each, 3)
    for a, b in zip(parameters(number), parameters(own), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_rate_of_adamw_follows_a_tensor_that_is_changed_in_place(shape):
    rate, vectors = one_entry(0.02, shape), [torch.nn.Parameter(torch.ones(5)) for _ in range(2)]
    own, number = (Muon(matrices(), [v], lr=lr) for v, lr in zip(vectors, (rate, 0.02), strict=True))
    for step in range(3):
        for each, v in zip((own, number), vectors, strict=True):
            v.grad = torch.arange(5.0)
            take(each, 1, start=step)
        rate.mul_(0.5)
        number.param_groups[0]["lr"] *= 0.5
    torch.testing.assert_close(*vectors, rtol=1e-6, atol=1e-7)


@every_class
def test_settings_of_the_users_own_may_be_any_tensors(name):
    mine = torch.arange(6.0)
    plain, own = build(name, matrices()), build(name, [{"params": matrices(), "mine": mine}])
    for each in (plain, own):
        take(each, 2)
    own.load_state_dict(copy.deepcopy(own.state_dict()))
    for each in (plain, own):
        take(each, 1, start=2)
    assert_equal(plain, own)
    assert torch.equal(own.param_groups[0]["mine"], mine)


@every
@pytest.mark.parametrize("dtypes", [(32, 64), (64, 32), (16, 32, 64)], ids=str)
def test_parameters_of_several_dtypes_step_as_each_alone(name, dtypes):
    wide = {16: torch.bfloat16, 32: torch.float32, 64: torch.float64}
    own, others = ([torch.nn.Parameter(matrices(1)[0].to(wide[bits])) for bits in dtypes] for _ in range(2))
    together, alone = build(name, own), [build(name, [p]) for p in others]
    for step in range(3):
        for p, q in zip(own, others, strict=True):
            p.grad = drawn((6, 4), 1 + step).to(p.dtype)  # no multiple of the weight
            q.grad = p.grad.clone()
        together.step()
        for each in alone:
            each.step()
    for p, q in zip(own, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@every
@pytest.mark.parametrize("first", [True, False])
def test_a_group_may_be_empty(name, first):
    own, other = matrices(), matrices()
    groups = [{"params": own}, {"params": []}]
    optimizer, expected = build(name, groups[::-1] if first else groups), build(name, other)
    for each in (optimizer, expected):
        take(each, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take(optimizer, 1, start=2)
    take(expected, 1, start=2)
    assert_equal(optimizer, expected)


@every_class
@pytest.mark.parametrize("steps_before", [0, 2])
def test_what_users_keep_in_the_state_stays_and_changes_no_step(name, steps_before):
    plain, own = (build(name, matrices()) for _ in range(2))
    for each in (plain, own):
        take(each, steps_before)
        each.add_param_group({"params": matrices(1, seed=7)})
    for number, p in enumerate(p for group in of_matrices(own) for p in group["params"]):
        own.state[p]["mine"] = torch.full((1,), float(number))
    for each in (plain, own):
        take(each, 3, start=steps_before)
    assert_equal(own, plain)
    one, two, three = parameters(own)
    other = build(name, [torch.nn.Parameter(x) for x in (one, two)])
    other.add_param_group({"params": [torch.nn.Parameter(three)]})
    other.load_state_dict(copy.deepcopy(own.state_dict()))
    for each in (own, other):
        take(each, 2, start=9)
    assert_equal(own, other)
    for each in (own, other):
        mine = [each.state[p]["mine"] for group in of_matrices(each) for p in group["params"]]
        assert [x.tolist() for x in mine] == [[0.0], [1.0], [2.0]]


@every_class
def test_the_state_of_a_parameter_that_made_no_step_loads_with_what_users_keep_there(name):
    optimizer, other = (build(name, matrices()) for _ in range(2))
    for each in (optimizer, other):
        for p in each.param_groups[0]["params"]:
            each.state[p]["mine"] = torch.ones(1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(6, 4)
    optimizer.step()
    optimizer.zero_grad()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        q.data.copy_(p.data)
    for each in (optimizer, other):
        take(each, 2)
    assert_equal(optimizer, other)
    assert all(other.state[p]["mine"] == 1 for p in other.param_groups[0]["params"])


@every_class
def test_a_tensor_that_users_put_in_the_state_is_taken_and_the_others_are_made(name):
    plain, own, began = (build(name, matrices()) for _ in range(3))
    began.state_dict() if name == "with_adamw" else began.init_state()
    for p, q in zip(own.param_groups[0]["params"], began.param_groups[0]["params"], strict=True):
        key, value = next(iter(began.state[q].items()))
        own.state[p][key] = value.clone()
    for each in (plain, own):
        take(each, 3)
    assert_equal(own, plain)


@every_class
def test_a_compiled_step_is_the_step(name):
    made = [build(name, matrices()) for _ in range(2)]
    take(made[0], 2)
    compiled = torch.compile(made[1].step, backend="eager")
    for step in range(2):
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in made[1].param_groups[0]["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        compiled()
    assert_equal(*made)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_has_the_private_attributes_of_a_subclass(copied):
    optimizer = Own([torch.nn.Parameter(torch.zeros(4, 4))])
    optimizer._alpha = 0.5
    assert copied(optimizer)._alpha == 0.5


class Own(TensorParallelMuon):
    """A user's."""
