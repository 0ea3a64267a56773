"""What the base class and Muon promise alike to those who know the originals: settings of groups, states, errors."""

import copy
import itertools

import pytest
import torch

from tests.contracts.made import (
    BETA,
    DECAY,
    KINDS,
    LR,
    METHODS,
    SHAPES,
    assert_equal,
    assert_near,
    gradients,
    parameters,
    reference,
    run,
)

BOTH = list(itertools.product([True, False], repeat=2))  # nesterov, use_decoupled_weight_decay


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize("how", ["constructor", "add_param_group", "load_state_dict", "between steps"])
def test_the_groups_own_value_counts(kind, how):
    for (nesterov, decoupled), (of_group, of_group_decoupled) in zip(BOTH, reversed(BOTH), strict=True):
        params, steps = parameters(), gradients()
        before = 1 if how == "between steps" else 0

        def settings_of(step, index, both=((nesterov, decoupled), (of_group, of_group_decoupled)), before=before):
            its_nesterov, its_decoupled = both[index == 1 and step >= before]
            return its_nesterov, "decoupled" if its_decoupled else "l2"

        expected = reference(params, steps, settings_of, kind.update)
        own = {kind.nesterov: of_group, "use_decoupled_weight_decay": of_group_decoupled}
        given = {kind.nesterov: nesterov, "use_decoupled_weight_decay": decoupled}
        groups = [{"params": [params[0], params[2]]}, {"params": [params[1]]}]
        if how == "constructor":
            opt = kind.made([groups[0], {**groups[1], **own}], **given)
        elif how == "add_param_group":
            opt = kind.made([groups[0]], **given)
            opt.add_param_group({**groups[1], **own})
        elif how == "load_state_dict":
            saved = kind.made([groups[0], {**groups[1], **own}], **given).state_dict()
            opt = kind.made(groups, **{key: not value for key, value in given.items()})
            opt.load_state_dict(saved)
        else:
            opt = kind.made(groups, **given)
            run(opt, params, steps[:1])
            opt.param_groups[1].update(own)
        run(opt, params, steps[before:])
        assert_near(params, expected)


@pytest.mark.parametrize("decay", METHODS)
def test_kinds_of_weight_decay(kind, decay):
    both = {"weight_decay_method": decay, "use_decoupled_weight_decay": decay != "l2"}
    for where in ("constructor", "group", "between steps"):
        params, steps = parameters(), gradients()
        expected = reference(params, steps, lambda *_: (False, decay), kind.update)
        if where == "constructor":
            opt = kind.made(params, **both)
        elif where == "group":
            opt = kind.made([{"params": params, "weight_decay_method": decay}])
            assert opt.param_groups[0]["use_decoupled_weight_decay"] is (decay != "l2")
        else:
            opt = kind.made(params)
            opt.param_groups[0].update(both)
        run(opt, params, steps)
        assert_near(params, expected)


@pytest.mark.parametrize("decay", METHODS)
def test_a_kind_of_decay_that_contradicts_the_flag_is_refused(kind, decay):
    (p,) = parameters(SHAPES[:1])
    flag = decay == "l2"
    message = rf"weight_decay_method '{decay}' contradicts use_decoupled_weight_decay {flag}"
    contradiction = {"weight_decay_method": decay, "use_decoupled_weight_decay": flag}
    with pytest.raises(ValueError, match=message):
        kind.made([{"params": [p], **contradiction}])
    if not flag or kind is KINDS["base"]:  # True is the default of Muon's
        with pytest.raises(ValueError, match=message):
            kind.made([p], **contradiction)
    opt = kind.made([p])
    before = p.detach().clone()
    opt.param_groups[0].update(contradiction)
    with pytest.raises(ValueError, match=message):
        run(opt, [p], gradients(SHAPES[:1], 1))
    assert torch.equal(p, before)
    # a group that says one of the two does not contradict what the optimizer says of the other
    opt = kind.made(
        [{"params": [p], "use_decoupled_weight_decay": flag}],
        **{**contradiction, "use_decoupled_weight_decay": not flag},
    )
    assert opt.param_groups[0]["weight_decay_method"] is None


OLD_GROUPS = [  # of releases of Megatron and of emerging-optimizers, and of ours before
    ({"momentum": BETA}, {}),
    ({}, {"momentum": BETA}),
    ({"momentum": BETA, "nesterov": True, "use_decoupled_weight_decay": True}, {"nesterov": False}),
    ({"momentum_beta": BETA, "use_nesterov": True, "use_decoupled_weight_decay": True}, {"nesterov": False}),
]


@pytest.mark.parametrize(("group", "given"), OLD_GROUPS)
def test_a_state_dict_of_the_original_goes_on(kind, group, given):
    params, steps = parameters(), gradients(steps=4)
    expected = reference(params, steps, lambda *_: (True, "decoupled"), kind.update)
    middle = reference(params, steps[:2], lambda *_: (True, "decoupled"), kind.update)
    momenta = [torch.zeros_like(p) for p in params]
    for of_step in steps[:2]:
        momenta = [BETA * m + (1 - BETA) * g for m, g in zip(momenta, of_step, strict=True)]
    saved = {
        "state": {i: {"momentum_buffer": m} for i, m in enumerate(momenta)},
        "param_groups": [{"lr": LR, "weight_decay": DECAY, **group, "params": [0, 1, 2]}],
    }
    resumed = [torch.nn.Parameter(p) for p in middle]
    given = {"nesterov": True, "momentum": 0.1, **given}
    opt = kind.made(resumed, **{kind.nesterov: given["nesterov"], kind.momentum: given["momentum"]})
    opt.load_state_dict(copy.deepcopy(saved))
    assert len(opt.param_groups[0].keys() & {"momentum", "momentum_beta"}) == 1
    run(opt, resumed, steps[2:])
    assert_near(resumed, expected)


@pytest.mark.parametrize(
    ("one", "two", "value"), [("momentum_beta", "momentum", 0.5), ("use_nesterov", "nesterov", True)]
)
def test_the_other_name_of_a_setting_is_taken_over_or_refused(kind, one, two, value):
    name, other = (one, two) if kind is KINDS["base"] else (two, one)
    p, q, _ = parameters()
    opt = kind.made([{"params": [p], other: value}])
    opt.add_param_group({"params": [q], other: value, name: value})
    assert [group[name] for group in opt.param_groups] == [value, value]
    assert not any(other in group for group in opt.param_groups)
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        group[other] = group.pop(name)
    opt = kind.made([{"params": [p]}, {"params": [q]}])
    opt.load_state_dict(saved)
    assert [group[name] for group in opt.param_groups] == [value, value]

    different = {name: value, other: not value if isinstance(value, bool) else 0.7}
    message = f"two names of one setting: leave '{other}' out"
    with pytest.raises(ValueError, match=message):
        kind.made([{"params": [p], **different}])
    saved["param_groups"][1] |= different
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(saved)


@pytest.mark.parametrize("decay", METHODS)
def test_gradients_are_never_written_to(kind, decay):
    class Doubled(kind.cls):
        def orthogonalize(self, p, grad):
            return 2 * super().orthogonalize(p, grad)

    both = {"weight_decay_method": decay, "use_decoupled_weight_decay": decay != "l2", kind.nesterov: True}
    for cls in (None, Doubled):
        params = parameters()
        opt = kind.made(params, cls, **both)
        for p, g in zip(params, gradients(steps=1)[0], strict=True):
            p.grad = g.clone()
        kept = [p.grad for p in params]
        before = [g.clone() for g in kept]
        opt.step()
        assert all(p.grad is g for p, g in zip(params, kept, strict=True))
        assert_equal(kept, before)
