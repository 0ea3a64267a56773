"""The base class, as those write against it who know the original: names, order of arguments, overrides and errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt import OrthogonalizedOptimizer
from tests.contracts.made import (
    BASE,
    BETA,
    DECAY,
    LR,
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


def test_all_arguments_by_position():
    params, steps = parameters(), gradients()
    expected = reference(params, steps, lambda *_: (True, "l2"), BASE.update)
    args = (LR, BETA, True, DECAY, False, False, None, None, "highest", polar, scale)
    run(OrthogonalizedOptimizer(params, *args), params, steps)
    assert_near(params, expected)


class Plain(OrthogonalizedOptimizer):
    def orthogonalize(self, p, grad):
        return self.seen(p, grad, {})

    def seen(self, p, grad, given):
        self.calls.append((p.detach().clone(), grad.clone(), given))
        return polar(grad)

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)


class All(Plain):
    def orthogonalize(self, p, grad, **group_settings):
        return self.seen(p, grad, group_settings)


class Some(Plain):
    def orthogonalize(self, param, momentum, lr, rank=None, *, further="none"):
        return self.seen(param, momentum, {"lr": lr, "rank": rank, "further": further})


@pytest.mark.parametrize("kind", ["l2", "palm"])
@pytest.mark.parametrize("cls", [Plain, All, Some])
def test_an_override_of_any_signature_steps_and_sees_what_it_did(cls, kind):
    params, steps = parameters(), gradients()
    given = {"weight_decay_method": kind, "use_decoupled_weight_decay": kind != "l2", "use_nesterov": True}
    opt = BASE.made([{"params": params[:1]}, {"params": params[1:], "rank": 7}], cls, **given)
    ps, ms = [p.detach().clone() for p in params], [torch.zeros_like(p) for p in params]
    for of_step in steps:
        opt.calls.clear()
        run(opt, params, [of_step])
        for i, ((p, update, settings_seen), g) in enumerate(zip(opt.calls, of_step, strict=True)):
            ps[i], g = decayed(ps[i], g, kind)
            ms[i], look_ahead = averaged(ms[i], g, True)
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


FAILURES = [  # what an override of the last parameter returns, and what is said
    (lambda grad: 1 / 0, "division"),
    (torch.flatten, r"orthogonalize of a parameter must return a tensor of shape \(3, 5\) on cpu .*, got \(15"),
    (lambda grad: None, r"must return a tensor .*, got None"),
    (lambda grad: grad.to(torch.complex64), r"can be cast to torch\.float64, got .* of torch\.complex64"),
    (lambda grad: grad.to("meta"), r"must return a tensor .* on cpu .* on meta"),
]


@pytest.mark.parametrize(("failing", "message"), FAILURES)
def test_a_failing_override_ends_the_step_and_the_next(failing, message):
    params = parameters()
    opt = BASE.made(params)
    own = opt.orthogonalize
    opt.orthogonalize = lambda p, grad: failing(grad.zero_()) if p is params[-1] else own(p, grad)
    with pytest.raises((ZeroDivisionError, ValueError), match=message):
        run(opt, params, gradients(steps=1))
    opt.orthogonalize = own
    with pytest.raises(RuntimeError, match="ended the last step while it changed weights and state"):
        run(opt, params, gradients(steps=1))


def test_what_an_override_writes_to_is_not_what_the_step_reads():
    """To its argument, and the results of two parameters into one buffer."""
    params, steps = parameters([(6, 4), (6, 4)]), gradients([(6, 4), (6, 4)])
    expected = reference(params, steps, lambda *_: DECOUPLED, lambda u, _: 2 * u)
    buffer = torch.empty(6, 4, dtype=torch.float64)
    opt = BASE.made(params)
    opt.orthogonalize = lambda p, grad: buffer.copy_(grad.mul_(2))
    run(opt, params, steps)
    assert_near(params, expected)


@pytest.mark.parametrize("how", ["function", "override"])
def test_more_dimensions_with_the_users_own_function(how):
    shape = (2, 3, 4, 5)
    (p,), steps = parameters([shape]), gradients([shape])

    def flat(x):
        assert x.shape == shape
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


def test_one_dimension_is_refused_at_construction():
    for shape in ((5,), ()):
        one = torch.nn.Parameter(torch.ones(shape))
        with pytest.raises(
            ValueError, match="OrthogonalizedOptimizer orthogonalizes matrices, but parameter 1 of group 0"
        ):
            BASE.made([*parameters([(3, 4)]), one])
        with pytest.raises(ValueError, match="Plain orthogonalizes matrices, but parameter 0 of group 0 has shape"):
            BASE.made([one], Plain)


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


def test_a_matrix_without_entries_is_left_alone():
    shapes = [(4, 0), (0, 4), (0, 0), (6, 4)]
    params, steps = parameters(shapes), gradients(shapes)
    expected = reference(params[3:], [s[3:] for s in steps], lambda *_: DECOUPLED, lambda u, _: 6 / 4 * polar(u))
    run(BASE.made(params, scale_factor_fn=lambda rows, cols: rows / cols), params, steps)
    assert_near(params[3:], expected)
