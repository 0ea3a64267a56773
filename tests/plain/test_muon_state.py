"""Muon of plain torch: schedulers, one state of both parts, copies and loads."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import OneCycleLR

from megatron_eopt.optimizers.with_adamw import Muon
from tests.plain.made import assert_same, gradients, muon, parameters, run, values


@pytest.mark.parametrize("rates", [0.04, [0.04, 0.01]])
def test_a_scheduler_that_sets_first_rates_leaves_adamws(rates):
    optimizer, params = muon((4, 4), (4,), lr=0.02, adam_lr=0.005)
    scheduler = OneCycleLR(optimizer, rates, total_steps=10)
    for of_step in gradients(params, 9):
        run(optimizer, params, [of_step])
        rate, of_adamw = (group["lr"] for group in optimizer.param_groups)
        assert of_adamw == pytest.approx(rate / 4)
        scheduler.step()


def test_torchs_checkpoints_make_no_step_of_a_fresh_optimizer():
    (model, optimizer), (other, fresh) = of_a_model(), of_a_model()
    before = values(model.parameters())
    get_optimizer_state_dict(model, optimizer)
    assert all(map(torch.equal, model.parameters(), before))
    assert [optimizer.state[layer.bias]["step"] for layer in model] == [0, 0]
    for each, its in ((model, optimizer), (other, fresh)):
        step_of_ones(each, its)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def without_step(state):
    del state["state"][1]["step"]


# Shapes of the matrices and of AdamW's parameters of a state, what is taken out of it, and what is said.
UNFIT = [
    ([(4, 4)], [], None, r"groups of \[1\] parameters, but the state has \[\]"),
    ([(4, 4)], [(4,), (4,)], None, r"groups of \[1\] parameters, but the state has \[2\]"),
    ([(5, 4)], [(4,)], None, r"'momentum_buffer' has shape \(5, 4\), expected \(4, 4\)"),
    ([(4, 4)], [(5,)], None, r"'exp_avg' has shape \(5,\), expected \(4,\)"),
    ([(4, 4)], [(4,)], without_step, r"AdamW in Muon needs 'step' for the parameter of shape \(4,\)"),
]


@pytest.mark.parametrize(("matrices", "rest", "damage", "message"), UNFIT)
def test_a_state_that_does_not_fit_changes_nothing(matrices, rest, damage, message):
    optimizer, params = muon((4, 4), (4,), steps=2)
    kept = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(Muon(parameters(*matrices), parameters(*rest)).state_dict())
    if damage is not None:
        damage(state)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert_same(optimizer.state_dict(), kept)
    others = [nn.Parameter(x) for x in values(params)]
    resumed = Muon(others[:1], others[1:])
    resumed.load_state_dict(copy.deepcopy(kept))
    run(optimizer, params, gradients(params, 1))
    run(resumed, others, gradients(params, 1))
    assert all(map(torch.equal, params, others))


def test_loops_over_the_state_may_replace_its_tensors():
    """To the host and back, as frameworks of reinforcement learning do."""
    (optimizer, params), (other, copies), (scaled, others) = (muon((4, 4), (4,), (4,), steps=2) for _ in range(3))
    entries = sum(v.numel() for state in optimizer.state.values() for v in state.values())
    assert entries == 4 * 4 + 2 * (2 * 4 + 1)
    for each, factor in ((other, 1), (scaled, 3)):
        for state in each.state.values():
            for key, v in state.items():
                state[key] = v.clone() * (factor if key == "exp_avg" else 1)
    before = optimizer.adamw.state[params[1]]["exp_avg"].clone()
    for each, its in ((optimizer, params), (other, copies), (scaled, others)):
        run(each, its, gradients(its, 1, seed=3))
    assert all(map(torch.equal, params, copies))
    difference = scaled.adamw.state[others[1]]["exp_avg"] - optimizer.adamw.state[params[1]]["exp_avg"]
    torch.testing.assert_close(difference, 0.9 * 2 * before)


def test_asking_for_state_makes_none_as_in_torch():
    optimizer, (matrix, vector) = muon((4, 4), (4,), steps=2)
    other = nn.Parameter(torch.zeros(2))
    assert [p in optimizer.state for p in (matrix, vector, other)] == [True, True, False]
    assert optimizer.state.get(other) is None
    with pytest.raises(KeyError):
        optimizer.state.pop(other)
    assert optimizer.state.pop(vector)["step"] == 2
    optimizer.state.setdefault(vector, {"step": torch.tensor(0.0)})
    assert {*optimizer.matrices.state} == {matrix}
    assert {*optimizer.adamw.state} == {vector}


def test_messages_name_the_class_that_users_built():
    matrix, vector = parameters((4, 4), (4,))
    with pytest.raises(ValueError, match=r"^Muon: lr must be a finite number"):
        Muon([matrix], [vector], lr=-1.0)
    with pytest.raises(ValueError, match=r"^Muon orthogonalizes matrices"):
        Muon([matrix, vector], [])
    optimizer, _ = muon((4, 4), (4,))
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["momentum"] = state["state"][0].pop("momentum_buffer")
    with pytest.raises(ValueError, match=r"^Muon needs 'momentum_buffer'"):
        optimizer.load_state_dict(state)
    assert type(pickle.loads(pickle.dumps(optimizer)).matrices) is type(optimizer.matrices)


def of_a_model(frozen=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(not frozen)
    return model, Muon([layer.weight for layer in model], [layer.bias for layer in model], adam_lr=0.1)


def step_of_ones(model, optimizer):
    for p in (model[1].weight, model[1].bias, model[0].bias):
        p.grad = torch.ones_like(p).cumsum(0)
    optimizer.step()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_adamws_state_goes_by_names_of_the_model(frozen, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    (model, optimizer), (other, its_optimizer) = of_a_model(frozen), of_a_model(frozen)
    step_of_ones(model, optimizer)
    other.load_state_dict(model.state_dict())
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    set_optimizer_state_dict(other, its_optimizer, saved, options=options)
    step_of_ones(model, optimizer)
    step_of_ones(other, its_optimizer)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert its_optimizer.adamw.state[other[0].bias]["step"] == 2


def test_what_joins_adamw_later_steps_and_is_saved():
    params = parameters((4, 4), (4,), (3,))
    optimizer = Muon(params[:1], params[1:2], lr=0.02, adam_lr=0.01)
    run(optimizer, params, gradients(params, 1))
    optimizer.adamw.add_param_group({"params": params[2:], "lr": 0.5})
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    run(optimizer, params, gradients(params, 1))
    assert [group["lr"] for group in optimizer.adamw.param_groups] == [0.005, 0.25]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 1]
    assert optimizer.state_dict()["state"].keys() == {0, 1, 2}
