"""What a loaded state dict does not say of a group, and the contract by which others create state."""

import copy

import pytest
import torch

from tests.optimizers.family import OPTIMIZERS, build, every, matrices, take


def keys_of(name):
    return [key for key in build(name, matrices()).param_groups[0] if key != "params"]


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in OPTIMIZERS for key in keys_of(name)])
def test_a_setting_that_a_state_lacks_is_the_one_that_the_optimizer_was_built_with(name, key):
    straight = build(name, matrices())
    take(straight, 4)
    first = build(name, matrices())
    take(first, 2)
    saved = copy.deepcopy(first.state_dict())
    for group in saved["param_groups"]:
        group.pop(key, None)
    params = [torch.nn.Parameter(p.detach().clone()) for p in first.param_groups[0]["params"]]
    second = build(name, params)
    second.load_state_dict(saved)
    assert second.param_groups[0].keys() >= first.defaults.keys()
    take(second, 2, start=2)
    if key not in type(first).carried_settings:  # those are what the optimizer itself has counted or chosen
        assert second.param_groups[0][key] == build(name, matrices()).param_groups[0][key]
        for p, q in zip(params, straight.param_groups[0]["params"], strict=True):
            assert torch.equal(p, q)


@every
def test_a_groups_own_setting_stays_where_a_state_lacks_it(name):
    p, q = matrices()
    optimizer = build(name, [{"params": [p]}, {"params": [q], "weight_decay": 0.0, "lr": 0.5}])
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["lr"], group["weight_decay"]
    optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5]
    assert optimizer.param_groups[1]["weight_decay"] == 0.0


@every
def test_another_number_of_groups_is_refused(name):
    saved = build(name, [{"params": [p]} for p in matrices()]).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        build(name, matrices()).load_state_dict(saved)


@every
def test_the_state_of_a_group_can_be_made_by_the_contract_of_others(name):
    p, q, r = matrices(3)
    optimizer = build(name, [{"params": [p, q]}, {"params": [r]}])
    q.grad = torch.ones(6, 4)
    optimizer._init_group(optimizer.param_groups[0], skip_non_grad_params=True)
    assert list(optimizer.state) == [q]
    optimizer._init_group(optimizer.param_groups[0])
    assert set(optimizer.state) == {p, q}
    whole = build(name, matrices(3))
    whole.init_state()
    kept = [{key: value.shape for key, value in state.items()} for state in optimizer.state.values()]
    expected = list(whole.state.values())[:2]
    assert kept == [{key: value.shape for key, value in state.items()} for state in expected]
