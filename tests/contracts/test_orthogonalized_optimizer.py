"""The base class, as those write against it who know the original: names, order of arguments, overrides and errors."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt import OrthogonalizedOptimizer, TensorParallelMuon

LR, BETA, DECAY = 0.1, 0.8, 0.3
SHAPES = [(6, 4), (3, 5)]


def parameters(shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(shapes=SHAPES, steps=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(steps)]


def polar(x):
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def scale(rows, cols):
    return max(1.0, rows / cols) ** 0.5


def optimizer(params, cls=OrthogonalizedOptimizer, **changed):
    arguments = {
        "lr": LR,
        "momentum_beta": BETA,
        "use_nesterov": False,
        "weight_decay": DECAY,
        "use_decoupled_weight_decay": True,
        "split_qkv": False,
        "is_qkv_fn": None,
        "qkv_split_shapes": None,
        "fp32_matmul_prec": "highest",
        "orthogonalize_fn": polar,
        "scale_factor_fn": scale,
    }
    return cls(params, **{**arguments, **changed})


def reference_step(p, m, g, nesterov, method, lr=LR, beta=BETA, decay=DECAY, orthogonalize=polar, scale=scale):
    """One step of one matrix: returns the parameter and the momentum after it."""
    if method == "l2":
        g = g + decay * p
    else:
        p = p - {"decoupled": lr * decay, "independent": decay, "palm": lr * lr * decay}[method] * p
    m = beta * m + (1 - beta) * g
    u = (1 - beta) * g + beta * m if nesterov else m
    return p - lr * scale(*u.shape[:2]) * orthogonalize(u), m


def run(opt, params, steps):
    for of_step in steps:
        for p, g in zip(params, of_step, strict=True):
            p.grad = g.clone()
        opt.step()


def referenced(params, steps, settings_of, **further):
    """Parameters after steps whose (nesterov, method) are ``settings_of(step, index)``."""
    ps = [p.detach().clone() for p in params]
    ms = [torch.zeros_like(p) for p in ps]
    for number, of_step in enumerate(steps):
        for i, g in enumerate(of_step):
            ps[i], ms[i] = reference_step(ps[i], ms[i], g, *settings_of(number, i), **further)
    return ps


def assert_near(params, expected):
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-5, atol=1e-5)


def test_all_arguments_by_position():
    params, steps = parameters(), gradients()
    expected = referenced(params, steps, lambda step, index: (True, "l2"))
    args = (LR, BETA, True, DECAY, False, False, None, None, "highest", polar, scale)
    run(OrthogonalizedOptimizer(params, *args), params, steps)
    assert_near(params, expected)


BOTH = list(itertools.product([True, False], repeat=2))  # use_nesterov, use_decoupled_weight_decay


def method(decoupled):
    return "decoupled" if decoupled else "l2"


@pytest.mark.parametrize(("nesterov", "decoupled"), BOTH)
@pytest.mark.parametrize(("of_group", "of_group_decoupled"), BOTH)
@pytest.mark.parametrize("how", ["constructor", "add_param_group", "load_state_dict", "between steps"])
def test_the_groups_own_value_counts(nesterov, decoupled, of_group, of_group_decoupled, how):
    params, steps = parameters(), gradients()
    before = 1 if how == "between steps" else 0

    def settings_of(step, index):
        own = index == 1 and step >= before
        return (of_group, method(of_group_decoupled)) if own else (nesterov, method(decoupled))

    expected = referenced(params, steps, settings_of)
    own = {"use_nesterov": of_group, "use_decoupled_weight_decay": of_group_decoupled}
    given = {"use_nesterov": nesterov, "use_decoupled_weight_decay": decoupled}
    groups = [{"params": [params[0]]}, {"params": [params[1]]}]
    if how == "constructor":
        opt = optimizer([groups[0], {**groups[1], **own}], **given)
    elif how == "add_param_group":
        opt = optimizer([groups[0]], **given)
        opt.add_param_group({**groups[1], **own})
    elif how == "load_state_dict":
        saved = optimizer([groups[0], {**groups[1], **own}], **given).state_dict()
        opt = optimizer(groups, use_nesterov=not nesterov, use_decoupled_weight_decay=not decoupled)
        opt.load_state_dict(saved)
    else:
        opt = optimizer(groups, **given)
        run(opt, params, steps[:1])
        opt.param_groups[1].update(own)
    run(opt, params, steps[before:])
    assert_near(params, expected)


def test_defaults_of_groups():
    opt = optimizer(parameters(), rank=3)
    assert opt.defaults["use_nesterov"] is False
    settings = {key: value for key, value in opt.param_groups[0].items() if key not in ("params", "state_of")}
    assert settings == opt.defaults
    assert opt.param_groups[0]["momentum_beta"] == BETA
    assert opt.param_groups[0]["rank"] == 3
    assert (opt.use_nesterov, opt.use_decoupled_weight_decay) == (False, True)


@pytest.mark.parametrize(
    ("groups", "given"),
    [
        ([{"lr": LR, "momentum_beta": BETA, "weight_decay": DECAY}], {}),
        ([{"lr": LR, "momentum": BETA, "weight_decay": DECAY}], {"momentum_beta": 0.1}),
        ([{"lr": LR, "weight_decay": DECAY}], {}),
        (
            [{"lr": LR, "momentum": BETA, "weight_decay": DECAY, "nesterov": True, "use_decoupled_weight_decay": True}],
            {"use_nesterov": False},
        ),
    ],
)
def test_a_state_dict_of_the_original_goes_on(groups, given):
    params, steps = parameters(), gradients(steps=4)
    expected = referenced(params, steps, lambda step, index: (True, "decoupled"))
    middle = referenced(parameters(), steps[:2], lambda step, index: (True, "decoupled"))
    momenta = [torch.zeros(shape) for shape in SHAPES]
    for of_step in steps[:2]:
        momenta = [BETA * m + (1 - BETA) * g for m, g in zip(momenta, of_step, strict=True)]
    saved = {
        "state": {i: {"momentum_buffer": m} for i, m in enumerate(momenta)},
        "param_groups": [{**group, "params": [0, 1]} for group in groups],
    }
    resumed = [torch.nn.Parameter(p) for p in middle]
    opt = optimizer(resumed, **{"use_nesterov": True, **given})
    opt.load_state_dict(copy.deepcopy(saved))
    run(opt, resumed, steps[2:])
    assert_near(resumed, expected)


def test_a_group_keeps_its_own_value_where_a_state_has_none():
    params, steps = parameters(), gradients()
    expected = referenced(params, steps, lambda step, index: (index == 1, "decoupled"))
    opt = optimizer([{"params": [params[0]]}, {"params": [params[1]], "use_nesterov": True}])
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        del group["use_nesterov"]
    opt.load_state_dict(saved)
    run(opt, params, steps)
    assert_near(params, expected)


@pytest.mark.parametrize(
    ("name", "other", "value"), [("momentum_beta", "momentum", 0.5), ("use_nesterov", "nesterov", True)]
)
def test_the_other_name_of_a_setting_is_taken_over_or_refused(name, other, value):
    p, q = parameters()
    opt = optimizer([{"params": [p], other: value}])
    opt.add_param_group({"params": [q], other: value})
    assert [group[name] for group in opt.param_groups] == [value, value]
    assert not any(other in group for group in opt.param_groups)
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        group[other] = group.pop(name)
    opt = optimizer([{"params": [p]}, {"params": [q]}])
    opt.load_state_dict(saved)
    assert [group[name] for group in opt.param_groups] == [value, value]

    message = f"OrthogonalizedOptimizer reads '{name}', of which '{other}' is another name, but a group has"
    different = not value if isinstance(value, bool) else 0.7
    with pytest.raises(ValueError, match=message):
        optimizer([{"params": [p], name: value, other: different}])
    with pytest.raises(ValueError, match=message):
        optimizer([p], **{other: value, name: different})
    saved["param_groups"][1] |= {name: value, other: different}
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(saved)
    opt.param_groups[1][other] = different
    before = p.detach().clone()
    with pytest.raises(ValueError, match=message):
        run(opt, [p, q], gradients(steps=1))
    assert torch.equal(p, before)
    opt.param_groups[1][other] = value
    run(opt, [p, q], gradients(steps=1))
    assert other not in opt.param_groups[1]


METHODS = ["decoupled", "l2", "independent", "palm"]


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("where", ["constructor", "group", "between steps"])
def test_kinds_of_weight_decay(kind, where):
    params, steps = parameters(), gradients()
    expected = referenced(params, steps, lambda step, index: (False, kind))
    if where == "constructor":
        opt = optimizer(params, weight_decay_method=kind, use_decoupled_weight_decay=kind != "l2")
    elif where == "group":
        opt = optimizer([{"params": params, "weight_decay_method": kind}])
        assert opt.param_groups[0]["use_decoupled_weight_decay"] is (kind != "l2")
    else:
        opt = optimizer(params)
        opt.param_groups[0].update(weight_decay_method=kind, use_decoupled_weight_decay=kind != "l2")
    run(opt, params, steps)
    assert_near(params, expected)


@pytest.mark.parametrize("kind", METHODS)
def test_a_kind_that_contradicts_the_flag_is_refused(kind):
    p, q = parameters()
    flag = kind == "l2"
    message = rf"weight_decay_method '{kind}' contradicts use_decoupled_weight_decay {flag}"
    contradiction = {"weight_decay_method": kind, "use_decoupled_weight_decay": flag}
    with pytest.raises(ValueError, match=message):
        optimizer([p], **contradiction)
    with pytest.raises(ValueError, match=message):
        optimizer([{"params": [p], **contradiction}])
    opt = optimizer([p])
    before = p.detach().clone()
    opt.param_groups[0].update(contradiction)
    with pytest.raises(ValueError, match=message):
        run(opt, [p], gradients(SHAPES[:1], 1))
    assert torch.equal(p, before)
    # a group that says one of the two does not contradict what the optimizer says of the other
    opt = optimizer(
        [{"params": [q], "use_decoupled_weight_decay": flag}],
        **{**contradiction, "use_decoupled_weight_decay": not flag},
    )
    assert opt.param_groups[0]["weight_decay_method"] is None
    with pytest.raises(ValueError, match="unknown weight_decay_method of OrthogonalizedOptimizer 'cosine'"):
        optimizer([p], weight_decay_method="cosine")


@pytest.mark.parametrize("key", ["use_nesterov", "use_decoupled_weight_decay", "split_qkv"])
@pytest.mark.parametrize("value", [0.1, 1, None, "yes"])
def test_a_flag_that_is_no_bool_is_a_type_error(key, value):
    # text was hardly given by position
    by_position = "$" if value == "yes" else r": the positional order of emerging-optimizers is \(params, lr,"
    message = rf"{key} must be True or False, got {value!r}{by_position}"
    (p,) = parameters(SHAPES[:1])
    with pytest.raises(TypeError, match=message):
        optimizer([p], **{key: value})
    if key != "split_qkv":
        with pytest.raises(TypeError, match=message):
            optimizer([{"params": [p], key: value}])
        opt = optimizer([p])
        opt.param_groups[0][key] = value
        before = p.detach().clone()
        with pytest.raises(TypeError, match=message):
            run(opt, [p], gradients(SHAPES[:1], 1))
        assert torch.equal(p, before)


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
    opt = optimizer([{"params": [params[0]]}, {"params": [params[1]], "rank": 7}], cls, **given)
    ps, ms = [p.detach().clone() for p in params], [torch.zeros(shape) for shape in SHAPES]
    for of_step in steps:
        opt.calls.clear()
        run(opt, params, [of_step])
        for i, ((p, update, settings_seen), g) in enumerate(zip(opt.calls, of_step, strict=True)):
            decayed, m = reference_step(ps[i], ms[i], g, nesterov, kind, orthogonalize=torch.zeros_like)
            gradient = g + DECAY * ps[i] if kind == "l2" else g
            look_ahead = (1 - BETA) * gradient + BETA * m if nesterov else m
            torch.testing.assert_close(p, decayed)
            torch.testing.assert_close(update, look_ahead)
            ps[i], ms[i] = decayed - LR * polar(look_ahead), m
            if cls is Some:
                assert settings_seen == {"lr": LR, "rank": 7 if i else None, "further": "none"}
            elif cls is not Plain:
                group = opt.param_groups[i]
                assert settings_seen == {key: group[key] for key in group.keys() - {"params", "state_of"}}
        assert_near(params, ps)
        assert_near([opt.state[p]["momentum_buffer"] for p in params], ms)


def test_a_method_that_is_put_on_the_object_counts():
    params, steps = parameters(), gradients()
    expected = referenced(params, steps, lambda *_: (False, "decoupled"), orthogonalize=torch.sign, scale=lambda *_: 1)
    opt = optimizer(params)
    opt.orthogonalize = lambda p, grad: torch.sign(grad)
    run(opt, params, steps)
    assert_near(params, expected)


class Fails(OrthogonalizedOptimizer):
    """Fails at the second parameter, in every way in which a step can."""

    how = None

    def orthogonalize(self, p, grad):
        if p.shape == SHAPES[0] or self.how is None:
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


def failing(p):
    raise RuntimeError("in the step")


FAILURES = [
    ("raises", "in the step"),
    (
        "shape",
        r"orthogonalize of a parameter of shape \(3, 5\) must return a tensor of the shape of grad, \(3, 5\), got \(15",
    ),
    ("broadcast", r"of the shape of grad, \(3, 5\), got \(1, 5\)"),
    ("nothing", "must return a tensor, got None"),
    ("complex", r"can be cast to torch\.float32, got torch\.complex64"),
    ("device", "must return a tensor on cpu .* on meta"),
]


@pytest.mark.parametrize(("how", "message"), FAILURES)
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", METHODS)
def test_a_failing_override_leaves_no_trace(how, message, steps_before, kind):
    params = parameters()
    opt = optimizer(params, Fails, weight_decay_method=kind, use_decoupled_weight_decay=kind != "l2", use_nesterov=True)
    run(opt, params, gradients(steps=steps_before))
    before, state = [p.detach().clone() for p in params], copy.deepcopy(opt.state_dict())
    opt.how = how
    with pytest.raises((RuntimeError, ValueError), match=message):
        run(opt, params, gradients(steps=1, seed=5))
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    after = opt.state_dict()
    assert after["param_groups"] == state["param_groups"]
    assert after["state"].keys() == state["state"].keys()
    for index, kept in state["state"].items():
        assert torch.equal(after["state"][index]["momentum_buffer"], kept["momentum_buffer"])
    # and the optimizer goes on as if that step had never been tried
    opt.how = None
    run(opt, params, gradients(steps=1, seed=6))
    expected = parameters()
    other = optimizer(expected, weight_decay_method=kind, use_decoupled_weight_decay=kind != "l2", use_nesterov=True)
    run(other, expected, [*gradients(steps=steps_before), *gradients(steps=1, seed=6)])
    assert all(torch.equal(p, q) for p, q in zip(params, expected, strict=True))


def test_a_failing_override_leaves_what_users_keep_in_the_state_alone():
    params = parameters()
    opt = optimizer(params, Fails)
    opt.state[params[0]]["mine"] = torch.ones(1)
    opt.how = "raises"
    with pytest.raises(RuntimeError, match="in the step"):
        run(opt, params, gradients(steps=1))
    assert {p: list(state) for p, state in opt.state.items()} == {params[0]: ["mine"]}


@pytest.mark.parametrize("function", ["orthogonalize_fn", "scale_factor_fn"])
def test_a_failing_function_leaves_no_trace(function):
    params = parameters()
    opt = optimizer(params)
    run(opt, params, gradients(steps=1))
    before = [p.detach().clone() for p in params]
    momenta = [opt.state[p]["momentum_buffer"].clone() for p in params]

    def fails_at_wide(*args):
        shape = args if function == "scale_factor_fn" else args[0].shape
        if tuple(shape) == SHAPES[1]:
            raise RuntimeError("in the step")
        return scale(*args) if function == "scale_factor_fn" else polar(*args)

    setattr(opt, function, fails_at_wide)
    with pytest.raises(RuntimeError, match="in the step"):
        run(opt, params, gradients(steps=1, seed=5))
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert all(torch.equal(opt.state[p]["momentum_buffer"], m) for p, m in zip(params, momenta, strict=True))


def test_results_in_one_buffer_are_kept_apart():
    params, steps = parameters([(6, 4), (6, 4)]), gradients([(6, 4), (6, 4)])
    expected = referenced(params, steps, lambda *_: (False, "decoupled"))
    buffer = torch.empty(6, 4)
    opt = optimizer(params)
    opt.orthogonalize = lambda p, grad: buffer.copy_(scale(6, 4) * polar(grad))
    run(opt, params, steps)
    assert_near(params, expected)


@pytest.mark.parametrize("in_place", [True, False])
def test_an_override_that_writes_to_its_argument_leaves_the_momentum(in_place):
    params, steps = parameters(), gradients()
    expected = referenced(
        params, steps, lambda *_: (False, "decoupled"), orthogonalize=lambda u: 2 * u, scale=lambda *_: 1
    )
    opt = optimizer(params)
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

    expected = referenced(
        [p], steps, lambda *_: (True, "l2"), orthogonalize=flat, scale=scale if how == "function" else lambda *_: 1
    )
    own = {"orthogonalize_fn": flat} if how == "function" else {}
    cls = OrthogonalizedOptimizer if how == "function" else Flat
    run(optimizer([p], cls, use_nesterov=True, use_decoupled_weight_decay=False, **own), [p], steps)
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
    opt = optimizer([p], orthogonalize_fn=torch.sign, scale_factor_fn=seen_scale, **split)
    run(opt, [p], [[torch.ones_like(p)]])
    assert seen == ([(rows, columns) for rows in (5, 2, 1)] if fused else [(8, columns)])


@pytest.mark.parametrize("cls", [OrthogonalizedOptimizer, TensorParallelMuon])
def test_shapes_of_a_fused_projection_are_kept_without_a_split(cls):
    settings = {"lr": 0.1, "split_qkv": False, "is_qkv_fn": None, "qkv_split_shapes": [3, 2, 1]}
    opt = optimizer(parameters(), **settings) if cls is OrthogonalizedOptimizer else cls(parameters(), **settings)
    assert opt.qkv_split_shapes == [3, 2, 1]
    assert opt.is_qkv_fn is None


@pytest.mark.parametrize("shape", [(5,), ()])
def test_one_dimension_is_refused_at_construction(shape):
    with pytest.raises(
        ValueError, match=r"OrthogonalizedOptimizer orthogonalizes matrices, but parameter 1 of group 0"
    ):
        optimizer([*parameters([(3, 4)]), torch.nn.Parameter(torch.ones(shape))])
    with pytest.raises(ValueError, match="Plain orthogonalizes matrices, but parameter 0 of group 0 has shape"):
        optimizer([torch.nn.Parameter(torch.ones(shape))], Plain)


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
        return polar(x.double().flatten(1)).view(x.shape).to(x.dtype)

    def by_parts(x):
        return torch.cat([scale(*part.shape[:2]) * flat(part) for part in x.split(sizes)])

    expected = [
        *referenced(
            params[:1],
            [s[:1] for s in steps],
            lambda *_: (nesterov, "decoupled"),
            orthogonalize=by_parts,
            scale=lambda *_: 1,
        ),
        *referenced(params[1:], [s[1:] for s in steps], lambda *_: (nesterov, "decoupled"), orthogonalize=flat),
    ]
    split = {"split_qkv": True, "is_qkv_fn": is_fused, "qkv_split_shapes": tuple(sizes)}
    run(optimizer(params, use_nesterov=nesterov, orthogonalize_fn=flat, **split), params, steps)
    for p, q in zip(params, expected, strict=True):  # of a nearly singular matrix rounding is all that there is
        assert (p - q).norm() <= 2e-2 * q.norm()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"is_qkv_fn": None}, "split_qkv needs is_qkv_fn"),
        ({"qkv_split_shapes": None}, "split_qkv needs qkv_split_shapes"),
        ({"qkv_split_shapes": (3, 3)}, "3 positive integers, got 2"),
        ({"qkv_split_shapes": (4, 1, 1.0)}, "must be integers"),
        ({"qkv_split_shapes": (6, 1, -1)}, "must be positive"),
        ({"qkv_split_shapes": (6, 0, 0)}, "must be positive"),
        ({"qkv_split_shapes": (2, 1, 1)}, r"of 6 rows cannot be split into \[2, 1, 1\]"),
    ],
)
def test_each_wrong_split_is_a_value_error_of_its_own(changed, message):
    (p,) = parameters(SHAPES[:1])
    p.fused = True
    given = {"split_qkv": True, "is_qkv_fn": is_fused, "qkv_split_shapes": (3, 2, 1), **changed}
    with pytest.raises(ValueError, match=message):
        optimizer([p], **given)


def test_a_closure_has_gradients_and_its_loss_comes_back():
    (p,) = parameters(SHAPES[:1])
    start = p.detach().clone()
    opt = optimizer([p])

    def closure():
        opt.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert opt.step(closure).item() == start.square().sum().item()
    (expected,) = referenced([start], [[2 * start]], lambda *_: (False, "decoupled"))
    assert_near([p], [expected])
    assert opt.step() is None


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("nesterov", [True, False])
def test_gradients_are_never_written_to(kind, nesterov):
    params = parameters()
    opt = optimizer(params, weight_decay_method=kind, use_decoupled_weight_decay=kind != "l2", use_nesterov=nesterov)
    for p, g in zip(params, gradients(steps=1)[0], strict=True):
        p.grad = g.clone()
    kept = [p.grad for p in params]
    before = [g.clone() for g in kept]
    opt.step()
    assert all(p.grad is g and torch.equal(g, h) for p, g, h in zip(params, kept, before, strict=True))


def test_state_of_a_group_can_be_made_before_the_first_step():
    params = parameters()
    opt = optimizer([{"params": [p]} for p in params])
    params[0].grad = torch.ones(SHAPES[0])
    for group in opt.param_groups:
        opt._init_group(group, skip_non_grad_params=True)
    assert list(opt.state) == [params[0]]
    opt._init_group(opt.param_groups[1])
    assert torch.equal(opt.state[params[1]]["momentum_buffer"], torch.zeros(SHAPES[1]))


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0, 0)])
def test_a_matrix_without_entries_is_left_alone(shape):
    empty, p = parameters([shape, (6, 4)])
    steps = gradients([shape, (6, 4)])
    expected = referenced([p], [s[1:] for s in steps], lambda *_: (False, "decoupled"), scale=lambda m, n: m / n)
    run(optimizer([empty, p], scale_factor_fn=lambda rows, cols: rows / cols), [empty, p], steps)
    assert_near([p], expected)
