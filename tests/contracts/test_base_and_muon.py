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


def method(decoupled):
    return "decoupled" if decoupled else "l2"


@pytest.mark.parametrize(("nesterov", "decoupled"), BOTH)
@pytest.mark.parametrize(("of_group", "of_group_decoupled"), BOTH)
@pytest.mark.parametrize("how", ["constructor", "add_param_group", "load_state_dict", "between steps"])
def test_the_groups_own_value_counts(kind, nesterov, decoupled, of_group, of_group_decoupled, how):
    params, steps = parameters(), gradients()
    before = 1 if how == "between steps" else 0

    def settings_of(step, index):
        own = index == 1 and step >= before
        return (of_group, method(of_group_decoupled)) if own else (nesterov, method(decoupled))

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
    if kind is KINDS["muon"]:
        default = {key: value != (how == "load_state_dict") for key, value in given.items()}
        different = [{key: each[key] for key in each if each[key] != default[key]} for each in (given, own)]
        assert opt.settings().get("of_groups", {}) == {i: each for i, each in enumerate(different) if each}


@pytest.mark.parametrize("decay", METHODS)
@pytest.mark.parametrize("where", ["constructor", "group", "between steps"])
def test_kinds_of_weight_decay(kind, decay, where):
    params, steps = parameters(), gradients()
    expected = reference(params, steps, lambda *_: (False, decay), kind.update)
    both = {"weight_decay_method": decay, "use_decoupled_weight_decay": decay != "l2"}
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
    p, q, _ = parameters()
    flag = decay == "l2"
    message = rf"weight_decay_method '{decay}' contradicts use_decoupled_weight_decay {flag}"
    contradiction = {"weight_decay_method": decay, "use_decoupled_weight_decay": flag}
    with pytest.raises(ValueError, match=message):
        kind.made([{"params": [p], **contradiction}])
    with pytest.raises(ValueError, match=f"{kind.cls.__name__}: unknown weight_decay_method 'cosine'"):
        kind.made([p], weight_decay_method="cosine")
    opt = kind.made([p])
    before = p.detach().clone()
    opt.param_groups[0].update(contradiction)
    with pytest.raises(ValueError, match=message):
        run(opt, [p], gradients(SHAPES[:1], 1))
    assert torch.equal(p, before)
    # a group that says one of the two does not contradict what the optimizer says of the other
    given = {**contradiction, "use_decoupled_weight_decay": not flag}
    opt = kind.made([{"params": [q], "use_decoupled_weight_decay": flag}], **given)
    assert opt.param_groups[0]["weight_decay_method"] is None


@pytest.mark.parametrize("decay", METHODS)
def test_a_constructor_refuses_a_contradiction(kind, decay):
    if decay == "l2" and kind is KINDS["muon"]:
        return  # where the flag's default is no contradiction
    with pytest.raises(ValueError, match=f"weight_decay_method '{decay}' contradicts use_decoupled_weight_decay"):
        kind.made(parameters(), weight_decay_method=decay, use_decoupled_weight_decay=decay == "l2")


@pytest.mark.parametrize("key", ["nesterov", "use_decoupled_weight_decay", "split_qkv", "cuda_graphs"])
@pytest.mark.parametrize("value", [0.1, 1, None, "yes"])
def test_a_flag_that_is_no_bool_is_a_type_error(kind, key, value):
    key = kind.nesterov if key == "nesterov" else key
    if key == "cuda_graphs" and kind is KINDS["base"]:
        return
    message = rf"{key} must be True or False, got {value!r}"
    (p,) = parameters(SHAPES[:1])
    with pytest.raises(TypeError, match=message):
        kind.made([p], **{key: value})
    if key not in (kind.nesterov, "use_decoupled_weight_decay"):
        return
    opt = kind.made([p])
    saved = opt.state_dict()
    saved["param_groups"][0][key] = value
    with pytest.raises(TypeError, match=message):
        kind.made([{"params": [p], key: value}])
    with pytest.raises(TypeError, match=message):
        opt.load_state_dict(saved)
    assert isinstance(opt.param_groups[0][key], bool)
    opt.param_groups[0][key] = value
    before = p.detach().clone()
    with pytest.raises(TypeError, match=message):
        run(opt, [p], gradients(SHAPES[:1], 1))
    assert torch.equal(p, before)


OLD_GROUPS = [  # of releases of Megatron and of emerging-optimizers, and of ours before
    ({"momentum_beta": BETA}, {}),
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

    message = f"two names of one setting: leave '{other}' out"
    different = not value if isinstance(value, bool) else 0.7
    with pytest.raises(ValueError, match=message):
        kind.made([{"params": [p], name: value, other: different}])
    saved["param_groups"][1] |= {name: value, other: different}
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(saved)
    opt.param_groups[1][other] = different
    before = p.detach().clone()
    with pytest.raises(ValueError, match=message):
        run(opt, [p, q], gradients(SHAPES[:2], 1))
    assert torch.equal(p, before)
    opt.param_groups[1][other] = value
    run(opt, [p, q], gradients(SHAPES[:2], 1))
    assert other not in opt.param_groups[1]


@pytest.mark.parametrize("decay", METHODS)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("overridden", [False, True])
def test_gradients_are_never_written_to(kind, decay, nesterov, overridden):
    class Doubled(kind.cls):
        def orthogonalize(self, p, grad):
            return 2 * super().orthogonalize(p, grad)

    params = parameters()
    both = {"weight_decay_method": decay, "use_decoupled_weight_decay": decay != "l2", kind.nesterov: nesterov}
    opt = kind.made(params, Doubled if overridden else None, **both)
    for p, g in zip(params, gradients(steps=1)[0], strict=True):
        p.grad = g.clone()
    kept = [p.grad for p in params]
    before = [g.clone() for g in kept]
    opt.step()
    assert all(p.grad is g for p, g in zip(params, kept, strict=True))
    assert_equal(kept, before)
