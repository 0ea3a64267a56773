"""What building a run's optimizer leaves behind in Megatron's objects: around its step, its overrides and its model."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_eopt import ScheduleFreeAdamW, TensorParallelMuon
from megatron_eopt.megatron.assignment import Assignment
from megatron_eopt.megatron.at_average import evaluated_at_average
from megatron_eopt.megatron.factory import warn_of_other_checkpoints
from megatron_eopt.megatron.first_step import check_steps, warn_of_unused
from megatron_eopt.megatron.wrappers import remember
from megatron_eopt.routing import Resolved


class FP32Optimizer:
    """As Megatron's wrapper of this name is seen: around a torch optimizer, with a step that may be left out."""

    def __init__(self, optimizer, left_out=0):
        self.optimizer, self.left_out = optimizer, left_out

    def step(self):
        self.left_out -= 1
        if self.left_out >= 0:
            return False, None, None
        self.optimizer.step()
        return True, 1.0, 0


def muon(count=2, **kwargs):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 3)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(4, 3)
    return TensorParallelMuon(parameters, **kwargs)


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)


def test_what_is_proven_once_is_not_asked_again(one_rank):
    optimizer = FP32Optimizer(muon(), left_out=2)
    check_steps(optimizer, 2)
    assert [optimizer.step()[0] for _ in range(3)] == [False, False, True]
    optimizer.optimizer.param_groups[0]["params"][0].grad = None
    assert optimizer.step()[0]


def test_a_matrix_without_a_gradient_is_an_error(one_rank):
    optimizer = FP32Optimizer(muon())
    optimizer.optimizer.param_groups[0]["params"][0].grad = None
    check_steps(optimizer, 2)
    with pytest.raises(
        RuntimeError, match="1 matrices were updated in the first step on rank 0, and the manifest has 2"
    ):
        optimizer.step()


def test_a_step_at_rest_or_that_is_skipped_proves_nothing():
    at_rest = FP32Optimizer(muon(lr=0.0))
    check_steps(at_rest, 3)
    assert all(at_rest.step()[0] for _ in range(2))
    optimizer = FP32Optimizer(muon())
    check_steps(optimizer, 2)
    gradient = optimizer.optimizer.param_groups[0]["params"][0].grad
    for value in (torch.nan, 1.0):
        gradient[0, 0] = value
        assert optimizer.step()[0]


def test_parameters_without_a_gradient_are_named_once(one_rank, monkeypatch, capsys):
    expert, grouped = (
        "decoder.mlp.experts.local_experts.{}.linear_fc1.weight",
        "decoder.mlp.experts.linear_fc2.weight{}",
    )
    used = ["embedding.weight", expert.format(0), grouped.format(11)]
    unused = ["unused.weight", "without.weight"]
    others = [expert.format(1), grouped.format(10), "elsewhere.weight", "at_rest.weight", "excluded.weight"]
    reads = []

    def assigned(name):
        parameter = nn.Parameter(torch.ones(2, 2))
        if name != "without.weight":
            parameter.main_grad = torch.eye(2) * (name in used)
        settings = {"lr": 0.0} if name == "at_rest.weight" else {}
        optimizer = None if name == "excluded.weight" else "muon"
        return Assignment(SimpleNamespace(tensor=parameter, name=name), optimizer, Resolved(settings, {}))

    def of_all_ranks(here):
        reads.append(here)
        return [here, {"elsewhere.weight": True, "unused.weight": False}]

    monkeypatch.setattr("megatron_eopt.megatron.first_step.distinct", of_all_ranks)
    optimizer, parameters = FP32Optimizer(muon()), [*map(assigned, used + unused + others)]
    check_steps(optimizer, 2, lambda: warn_of_unused(parameters))
    assert all(optimizer.step()[0] for _ in range(3))
    said = capsys.readouterr().out
    assert "zero everywhere in the first step, of unused.weight, without.weight: no forward pass uses it" in said
    assert (said.count("warning"), len(reads)) == (1, 1)


def test_a_model_is_evaluated_as_its_last_optimizer_has_it():
    model = nn.Linear(4, 3, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    averaging = FP32Optimizer(ScheduleFreeAdamW([model.weight], lr=0.5))
    for _ in range(3):
        averaging.step()
    trained = model.weight.detach().clone()
    evaluate = evaluated_at_average(lambda forward_step, data, model: model[0].weight.detach().clone())

    remember(averaging, [model])
    average = averaging.optimizer.exported(model.weight)
    assert not torch.equal(average, trained)
    assert torch.equal(evaluate(None, None, [model]), average)
    assert torch.equal(model.weight, trained)

    remember(FP32Optimizer(torch.optim.SGD([model.weight], lr=0.1)), [model])
    assert torch.equal(evaluate(None, None, [model]), trained)


def test_checkpoints_that_a_run_does_not_load_are_told(tmp_path, capsys):
    def told(load):
        warn_of_other_checkpoints(SimpleNamespace(save=str(tmp_path), load=load))
        return capsys.readouterr().out

    assert not told(None)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    for load in (None, str(tmp_path / "other")):
        assert f"{tmp_path} has checkpoints, and this run does not load them" in told(load)
    assert not told(str(tmp_path / "." / ""))
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert not told(str(tmp_path))  # a first run
    (tmp_path / "iter_0000020").mkdir()
    assert "since it has no latest_checkpointed_iteration.txt" in told(str(tmp_path))
