"""The two points of Schedule-Free AdamW, and what it keeps: training goes on bit for bit, wherever it is put."""

import copy
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from megatron_eopt.optimizers.schedule_free import ScheduleFreeAdamW
from tests.optimizers.family import take
from tests.optimizers.several import parameters, run
from tests.optimizers.test_schedule_free import SETTINGS, VARIANTS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_is_at_x_and_training_goes_on_at_y(dtype):
    straight, params = parameters(dtype=dtype), parameters(dtype=dtype)
    run(ScheduleFreeAdamW(straight, **SETTINGS), straight, range(6))
    optimizer = ScheduleFreeAdamW(params, **SETTINGS)
    assert optimizer.live == "y"
    for step in range(6):
        before, averages = copy.deepcopy(params), [optimizer.average(p) for p in params]
        optimizer.eval_params()
        optimizer.eval_params()  # changes nothing
        assert optimizer.live == "x"
        assert all(torch.equal(p, x) for p, x in zip(params, averages, strict=True))
        assert all(torch.equal(optimizer.average(p), x) for p, x in zip(params, averages, strict=True))
        assert step < 2 or not torch.equal(params[0], before[0])  # of one step all points are z
        optimizer.train_params()
        optimizer.train_params()
        assert optimizer.live == "y"
        assert all(torch.equal(p, y) for p, y in zip(params, before, strict=True))
        run(optimizer, params, [step])
    assert all(torch.equal(p, q) for p, q in zip(params, straight, strict=True))


def test_a_step_at_x_is_an_error_before_anything_changes():
    params = parameters()
    optimizer = ScheduleFreeAdamW(params)
    run(optimizer, params, [0])
    optimizer.eval_params()
    before = copy.deepcopy(params)
    with pytest.raises(RuntimeError, match=r"gradients taken at y, but the parameters are at x.*call train_params\(\)"):
        run(optimizer, params, [1])
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    with pytest.raises(ValueError, match=r"parameters are at x, .*: call train_params\(\) before adding a group"):
        optimizer.add_param_group({"params": parameters([(2,)])})
    assert len(optimizer.param_groups) == 1


def through_state_dict(optimizer, params):
    new = ScheduleFreeAdamW(copy.deepcopy(params), betas=(0.8, 0.8))
    new.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    return new


def over_an_optimizer_at_x(optimizer, params):
    resumed = copy.deepcopy(params)
    new = ScheduleFreeAdamW(resumed)
    run(new, resumed, [7])
    new.eval_params()
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(resumed, params, strict=True):
        p.data.copy_(q)
    return new


@pytest.mark.parametrize("evaluating", [False, True], ids=["at y", "at x"])
@pytest.mark.parametrize(
    ("variant", "dtype"), zip(VARIANTS, (torch.float32, torch.bfloat16), strict=True), ids=VARIANTS
)
@pytest.mark.parametrize(
    "way",
    [
        through_state_dict,
        over_an_optimizer_at_x,
        lambda optimizer, params: copy.deepcopy(optimizer),
    ],
    ids=["state_dict", "over x", "deepcopy"],
)
def test_a_restored_optimizer_goes_on_bit_for_bit_within_warmup(way, variant, dtype, evaluating):
    settings = {**SETTINGS, "variant": variant}
    straight, stopped = parameters(dtype=dtype), parameters(dtype=dtype)
    whole = ScheduleFreeAdamW(straight, **settings)
    run(whole, straight, range(8))
    first = ScheduleFreeAdamW(stopped, **settings)
    run(first, stopped, range(3))
    if evaluating:
        first.eval_params()
    second = way(first, stopped)
    resumed = second.param_groups[0]["params"]
    assert second.live == ("x" if evaluating else "y")
    assert all(p is not q and torch.equal(p, q) for p, q in zip(resumed, stopped, strict=True))
    second.train_params()
    run(second, resumed, range(3, 8))
    for p, q in zip(resumed, straight, strict=True):
        assert torch.equal(p, q)
        assert set(second.state[p]) == set(whole.state[q])
        assert all(torch.equal(second.state[p][key], value) for key, value in whole.state[q].items())
        assert second.state[p]["schedule"].dtype == torch.float64


def test_a_state_that_lacks_y_is_refused_and_nothing_is_changed():
    params = parameters()
    optimizer = ScheduleFreeAdamW(params)
    run(optimizer, params, [0])
    optimizer.eval_params()
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][0]["y"]
    optimizer.train_params()
    with pytest.raises(ValueError, match="ScheduleFreeAdamW needs 'y' for the parameter of shape"):
        optimizer.load_state_dict(state)
    assert optimizer.live == "y"
    run(optimizer, params, [1])


def test_a_resume_by_torchs_checkpoints_warns_of_no_schedule(caplog):
    """They make a step at a rate of 0 to begin a state, and set the rate back."""
    models = [torch.nn.Linear(4, 4) for _ in range(2)]
    source, optimizer = (ScheduleFreeAdamW(model.parameters(), lr=2e-3) for model in models)
    take(source, 2)
    saved = get_optimizer_state_dict(models[0], source)
    get_optimizer_state_dict(models[1], optimizer)
    set_optimizer_state_dict(models[1], optimizer, saved)
    take(optimizer, 2)
    assert "schedule" not in caplog.text
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    take(optimizer, 1)
    assert "went from 0.002 to 0.001" in caplog.text
