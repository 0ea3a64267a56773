"""What is said of parameters that come twice, and of fp16."""

import gc
import weakref

import pytest
import torch

from megatron_eopt import Lion, Muon, ScheduleFreeAdamW, TensorParallelMuon
from megatron_eopt.plain import OptimizerConfig, build_optimizer
from tests.optimizers.family import build, every

pytestmark = pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")  # torch's


def weights(count=2, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(4, 6, dtype=dtype)) for _ in range(count)]


def step(*optimizers):
    for optimizer in optimizers:
        for group in [*optimizer.param_groups, *(getattr(optimizer, "_adam_groups", None) or [])]:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()


@pytest.mark.parametrize("make", [Lion, TensorParallelMuon, lambda params: Muon(params, [])])
def test_a_parameter_that_comes_twice_is_refused(make):
    first, second = weights()
    with pytest.raises(ValueError, match="readout comes twice in one list of parameters"):
        make([("readout", first), ("other", second), ("readout", first)])
    optimizer = make([first])
    with pytest.raises(ValueError, match=r"parameter 2 of group 1, .* comes twice"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2)), second, second]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="more than one parameter group"):
        make([{"params": [first]}, {"params": [first]}])


def test_adamw_inside_refuses_one_that_comes_twice():
    (matrix,), bias = weights(1), torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"AdamW in Muon: parameter 1 .* comes twice"):
        Muon([matrix], [bias, bias])


def test_optimizers_and_parameters_go_when_nobody_holds_them():
    parameters = weights()
    optimizers = [TensorParallelMuon(parameters), Lion(parameters)]
    step(*optimizers)
    gone = [weakref.ref(each) for each in (*optimizers, *parameters)]
    del optimizers, parameters
    gc.collect()
    assert [each() for each in gone] == [None] * 4


@every
def test_a_parameter_goes_that_was_taken_out_of_its_group(name):
    parameters = weights(3)
    optimizer = build(name, parameters)
    step(optimizer, optimizer)
    gone = weakref.ref(parameters.pop())
    del optimizer.param_groups[0]["params"][2]
    step(optimizer)
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ["adamw", "muon", "lion"])
def test_every_fp16_parameter_is_said_once(caplog, name):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = build_optimizer(model.half(), OptimizerConfig(name=name, lr=1e-3))
    step(optimizer, optimizer)
    messages = [record.message for record in caplog.records if "fp16" in record.message]
    for key, _ in model.named_parameters():
        assert sum(key in message for message in messages) == 1
    assert all("torch.autocast" in message and "bf16" in message for message in messages)


def test_other_dtypes_are_as_they_should_be(caplog):
    optimizer = ScheduleFreeAdamW([*weights(), *weights(dtype=torch.bfloat16)])
    optimizer.train_params()
    step(optimizer)
    assert not caplog.records
