"""The base class, as those write against it who know the original: names, order of arguments, overrides and errors."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt import OrthogonalizedOptimizer, TensorParallelMuon
from tests.contracts.made import (
    BASE,
    BETA,
    DECAY,
    LR,
    METHODS,
    assert_equal,
    assert_near,
    averaged,
    decayed,
    gradients,
    parameters,
    polar,
    reference,
    run,
    scale,
)

DECOUPLED = (False, "decoupled")
WIDE = (3, 5)


def test_all_arguments_by_position():
    params, steps = parameters(), gradients()
    expected = reference(params, steps, lambda *_: (True, "l2"), BASE.update)
    args = (LR, BETA, True, DECAY, False, False, None, None, "highest", polar, scale)
    run(OrthogonalizedOptimizer(params, *args), params, steps)
    assert_near(params, expected)


def test_defaults_of_groups():
    opt = BASE.made(parameters(), rank=3)
    assert opt.defaults["use_nesterov"] is False
    settings = {key: value for key, value in opt.param_groups[0].items() if key not in ("params", "state_of")}
    assert settings == opt.defaults
    assert opt.param_groups[0]["momentum_beta"] == BETA
    assert opt.param_groups[0]["rank"] == 3
    assert (opt.use_nesterov, opt.use_decoupled_weight_decay) == (False, True)


def test_a_group_keeps_its_own_value_where_a_state_has_none():
    params, steps = parameters(), gradients()
    expected = reference(params, steps, lambda step, index: (index == 1, "decoupled"), BASE.update)
    opt = BASE.made([{"params": [params[0], params[2]]}, {"params": [params[1]], "use_nesterov": True}])
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        del group["use_nesterov"]
    opt.load_state_dict(saved)
    run(opt, params, steps)
    assert_near(params, expected)


class Plain(OrthogonalizedOptimizer):
    def orthogonalize(self, p, grad):
        return self.seen(p, grad, {})

    def seen(self, p, grad, given):
        self.calls.append((p.detach().clone(), grad.clone(), given))
        return self.factor * polar(grad)

    factor = 1.0

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)


class All(Plain):
    def orthogonalize(self, p, grad, **group_settings):
        return self.seen(p, grad, group_settings)


class Some(Plain):
    def orthogonalize(self, param, momentum, lr, rank=None, *, further="none"):
        return self.seen(param, momentum, {"lr": lr, "rank": rank, "further": further})


class Wrapped(Plain):
    def orthogonalize(self, *args, **kwargs):
        return self.seen(*args, kwargs)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("cls", [Plain, All, Some, Wrapped])
def test_an_override_of_any_signature_steps_and_sees_what_it_did(cls, kind, nesterov):
    params, steps = parameters(), gradients()
    given = {"weight_decay_method": kind, "use_decoupled_weight_decay": kind != "l2", "use_nesterov": nesterov}
    opt = BASE.made([{"params": params[:1]}, {"params": params[1:], "rank": 7}], cls, **given)
    ps, ms = [p.detach().clone() for p in params], [torch.zeros_like(p) for p in params]
    for of_step in steps:
        opt.calls.clear()
        run(opt, params, [of_step])
        for i, ((p, update, settings_seen), g) in enumerate(zip(opt.calls, of_step, strict=True)):
            ps[i], g = decayed(ps[i], g, kind)
            ms[i], look_ahead = averaged(ms[i], g, nesterov)
            torch.testing.assert_close(p, ps[i])
            torch.testing.assert_close(update, look_ahead)
            ps[i] = ps[i] - LR * polar(look_ahead)
            if cls is Some:
                assert settings_seen == {"lr": LR, "rank": 7 if i else None, "further": "none"}
            elif cls is not Plain:
                group = opt.param_groups[min(i, 1)]
                assert settings_seen == {key: group[key] for key in group.keys() - {"params", "state_of"}}
        assert_near(params, ps)
        assert_near([opt.state[p]["momentum_buffer"] for p in params], ms)


def test_a_method_that_is_put_on_the_object_counts():
    params, steps = parameters(), gradients()
    expected = reference(params, steps, lambda *_: DECOUPLED, lambda u, _: torch.sign(u))
    opt = BASE.made(params)
    opt.orthogonalize = lambda p, grad: torch.sign(grad)
    run(opt, params, steps)
    assert_near(params, expected)


class Fails(OrthogonalizedOptimizer):
    """Fails at the last parameter, in every way in which a step can."""

    how = None

    def orthogonalize(self, p, grad):
        if p.shape != WIDE or self.how is None:
            return super().orthogonalize(p, grad)
        grad.zero_()
        if self.how == "raises":
            raise RuntimeError("in the step")
        return {
            "shape": grad.flatten(),
            "broadcast": grad[:1],
            "nothing": None,
            "complex": grad.to(torch.complex64),
            "device": grad.to("meta"),
        }[self.how]


FAILURES = [
    ("raises", "in the step"),
    (
        "shape",
        r"orthogonalize of a parameter must return a tensor of shape \(3, 5\) on cpu .*, got \(15",
    ),
    ("broadcast", r"of shape \(3, 5\) .*, got \(1, 5\)"),
    ("nothing", r"must return a tensor .*, got None"),
    ("complex", r"can be cast to torch\.float64, got .* of torch\.complex64"),
    ("device", r"must return a tensor .* on cpu .* on meta"),
]


@pytest.mark.parametrize(("how", "message"), FAILURES)
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", METHODS)
def test_a_failing_override_leaves_no_trace(how, message, steps_before, kind):
    params = parameters()
    opt = BASE.made(params, Fails, weight_decay_method=kind, use_decoupled_weight_decay=kind != "l2", use_nesterov=True)
    run(opt, params, gradients(steps=steps_before))
    before, state = [p.detach().clone() for p in params], copy.deepcopy(opt.state_dict())
    opt.how = how
    with pytest.raises((RuntimeError, ValueError), match=message):
        run(opt, params, gradients(steps=1, seed=5))
    assert_equal(params, before)
    after = opt.state_dict()
    assert after["param_groups"] == state["param_groups"]
    assert after["state"].keys() == state["state"].keys()
    for index, kept in state["state"].items():
        assert torch.equal(after["state"][index]["momentum_buffer"], kept["momentum_buffer"])
    # and the optimizer goes on as if that step had never been tried
    opt.how = None
    run(opt, params, gradients(steps=1, seed=6))
    expected = parameters()
    other = BASE.made(expected, weight_decay_method=kind, use_decoupled_weight_decay=kind != "l2", use_nesterov=True)
    run(other, expected, [*gradients(steps=steps_before), *gradients(steps=1, seed=6)])
    assert_equal(params, expected)


def test_a_failing_override_leaves_what_users_keep_in_the_state_alone():
    params = parameters()
    opt = BASE.made(params, Fails)
    opt.state[params[0]]["mine"] = torch.ones(1)
    opt.how = "raises"
    with pytest.raises(RuntimeError, match="in the step"):
        run(opt, params, gradients(steps=1))
    assert {p: list(state) for p, state in opt.state.items()} == {params[0]: ["mine"]}


@pytest.mark.parametrize("function", ["orthogonalize_fn", "scale_factor_fn"])
def test_a_failing_function_leaves_no_trace(function):
    params = parameters()
    opt = BASE.made(params)
    run(opt, params, gradients(steps=1))
    before = [p.detach().clone() for p in params]
    momenta = [opt.state[p]["momentum_buffer"].clone() for p in params]

    def fails_at_wide(*args):
        shape = args if function == "scale_factor_fn" else args[0].shape
        if tuple(shape) == WIDE:
            raise RuntimeError("in the step")
        return scale(*args) if function == "scale_factor_fn" else polar(*args)

    setattr(opt, function, fails_at_wide)
    with pytest.raises(RuntimeError, match="in the step"):
        run(opt, params, gradients(steps=1, seed=5))
    assert_equal(params, before)
    assert_equal([opt.state[p]["momentum_buffer"] for p in params], momenta)


def test_results_in_one_buffer_are_kept_apart():
    params, steps = parameters([(6, 4), (6, 4)]), gradients([(6, 4), (6, 4)])
    expected = reference(params, steps, lambda *_: DECOUPLED, BASE.update)
    buffer = torch.empty(6, 4, dtype=torch.float64)
    opt = BASE.made(params)
    opt.orthogonalize = lambda p, grad: buffer.copy_(scale(6, 4) * polar(grad))
    run(opt, params, steps)
    assert_near(params, expected)


@pytest.mark.parametrize("in_place", [True, False])
def test_an_override_that_writes_to_its_argument_leaves_the_momentum(in_place):
    params, steps = parameters(), gradients()
    expected = reference(params, steps, lambda *_: DECOUPLED, lambda u, _: 2 * u)
    opt = BASE.made(params)
    opt.orthogonalize = (lambda p, grad: grad.mul_(2)) if in_place else (lambda p, grad: grad * 2)
    run(opt, params, steps)
    assert_near(params, expected)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 5)])
@pytest.mark.parametrize("how", ["function", "override"])
def test_more_dimensions_with_the_users_own_function(shape, how):
    (p,), steps = parameters([shape]), gradients([shape])
    seen = []

    def flat(x):
        seen.append(tuple(x.shape))
        return polar(x.flatten(1)).view(shape)

    class Flat(OrthogonalizedOptimizer):
        def orthogonalize(self, p, grad):
            return flat(grad)

    factor = scale(*shape[:2]) if how == "function" else 1
    expected = reference([p], steps, lambda *_: (True, "l2"), lambda u, _: factor * flat(u))
    own = {"orthogonalize_fn": flat} if how == "function" else {}
    cls = OrthogonalizedOptimizer if how == "function" else Flat
    run(BASE.made([p], cls, use_nesterov=True, use_decoupled_weight_decay=False, **own), [p], steps)
    assert_near([p], expected)
    assert set(seen) == {shape}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("tail", "columns"), [((4,), 4), ((4, 3, 3), 4), ((7, 1), 7)])
def test_the_scale_follows_from_the_first_two_sizes(tail, columns, fused):
    (p,), seen = parameters([(8, *tail)]), []
    p.fused = True

    def seen_scale(*sizes):
        seen.append(sizes)
        return 1.0

    split = {"split_qkv": fused, "is_qkv_fn": is_fused, "qkv_split_shapes": [5, 2, 1]}
    opt = BASE.made([p], orthogonalize_fn=torch.sign, scale_factor_fn=seen_scale, **split)
    run(opt, [p], [[torch.ones_like(p)]])
    assert seen == ([(rows, columns) for rows in (5, 2, 1)] if fused else [(8, columns)])


@pytest.mark.parametrize("cls", [OrthogonalizedOptimizer, TensorParallelMuon])
def test_shapes_of_a_fused_projection_are_kept_without_a_split(cls):
    settings = {"lr": 0.1, "split_qkv": False, "is_qkv_fn": None, "qkv_split_shapes": [3, 2, 1]}
    opt = BASE.made(parameters(), **settings) if cls is OrthogonalizedOptimizer else cls(parameters(), **settings)
    assert opt.qkv_split_shapes == [3, 2, 1]
    assert opt.is_qkv_fn is None


@pytest.mark.parametrize("shape", [(5,), ()])
def test_one_dimension_is_refused_at_construction(shape):
    with pytest.raises(
        ValueError, match=r"OrthogonalizedOptimizer orthogonalizes matrices, but parameter 1 of group 0"
    ):
        BASE.made([*parameters([(3, 4)]), torch.nn.Parameter(torch.ones(shape))])
    with pytest.raises(ValueError, match="Plain orthogonalizes matrices, but parameter 0 of group 0 has shape"):
        BASE.made([torch.nn.Parameter(torch.ones(shape))], Plain)


def is_fused(p):
    return hasattr(p, "fused")


@given(
    sizes=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    tail=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    nesterov=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_fused_parameters_are_split_along_their_first_dimension(sizes, tail, nesterov):
    shapes = [(sum(sizes), *tail), (sum(sizes), *tail)]
    params, steps = parameters(shapes), gradients(shapes, 2)
    params[0].fused = True

    def flat(x):
        return polar(x.flatten(1)).view(x.shape)

    def by_parts(x):
        return torch.cat([scale(*part.shape[:2]) * flat(part) for part in x.split(sizes)])

    def update(u, index):
        return scale(*u.shape[:2]) * flat(u) if index else by_parts(u)

    expected = reference(params, steps, lambda *_: (nesterov, "decoupled"), update)
    split = {"split_qkv": True, "is_qkv_fn": is_fused, "qkv_split_shapes": tuple(sizes)}
    run(BASE.made(params, use_nesterov=nesterov, orthogonalize_fn=flat, **split), params, steps)
    for p, q in zip(params, expected, strict=True):  # of a nearly singular matrix rounding is all that there is
        assert (p - q).norm() <= 2e-2 * q.norm()


def test_state_of_a_group_can_be_made_before_the_first_step():
    params = parameters()
    opt = BASE.made([{"params": [p]} for p in params])
    params[0].grad = torch.ones_like(params[0])
    for group in opt.param_groups:
        opt._init_group(group, skip_non_grad_params=True)
    assert list(opt.state) == [params[0]]
    opt._init_group(opt.param_groups[1])
    assert torch.equal(opt.state[params[1]]["momentum_buffer"], torch.zeros_like(params[1]))


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0, 0)])
def test_a_matrix_without_entries_is_left_alone(shape):
    empty, p = parameters([shape, (6, 4)])
    steps = gradients([shape, (6, 4)])
    expected = reference([p], [s[1:] for s in steps], lambda *_: DECOUPLED, lambda u, _: 6 / 4 * polar(u))
    run(BASE.made([empty, p], scale_factor_fn=lambda rows, cols: rows / cols), [empty, p], steps)
    assert_near([p], expected)
