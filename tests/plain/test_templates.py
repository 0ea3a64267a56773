"""The state of a new optimizer is a template: what torch.distributed.checkpoint loads into it, it goes on from."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from megatron_eopt.matrices import concatenated
from tests.plain.test_build import NAMES, Model, build, train


def assert_goes_on_alike(stopped, resumed):
    assert train(*resumed, 3) == train(*stopped, 3)
    for wanted, found in zip(stopped[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(wanted, found)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", NAMES)
def test_a_new_state_dict_is_loaded_into_and_goes_on_bit_for_bit(name, tmp_path):
    model = Model()
    optimizer = build(model, name)
    train(model, optimizer, 3)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    fresh = Model()
    resumed = build(fresh, name)
    template = {"model": fresh.state_dict(), "optimizer": resumed.state_dict()}
    if name == "adamw":  # torch's, which has no state before its first step
        train(fresh, resumed, 1)
        template = {"model": fresh.state_dict(), "optimizer": resumed.state_dict()}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    fresh.load_state_dict(template["model"])
    resumed.load_state_dict(template["optimizer"])
    assert_goes_on_alike((model, optimizer), (fresh, resumed))


class OfTwo(Model):
    """A model whose second half gets no gradient before it is asked for, as a vision tower that is given text."""

    def __init__(self):
        super().__init__()
        self.tower = Model()
        self.seen = False

    def forward(self, tokens):
        return super().forward(tokens) + (self.tower(tokens) if self.seen else 0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "adamw"])
def test_parameters_without_a_gradient_are_saved_and_loaded(name, tmp_path):
    model = OfTwo()
    optimizer = build(model, name)
    train(model, optimizer, 3)
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    fresh = OfTwo()
    resumed = build(fresh, name)
    template = {"model": fresh.state_dict(), "optimizer": get_optimizer_state_dict(fresh, resumed)}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    fresh.load_state_dict(template["model"])
    set_optimizer_state_dict(fresh, resumed, template["optimizer"])
    model.seen = fresh.seen = True
    assert_goes_on_alike((model, optimizer), (fresh, resumed))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_that_replace_others_are_trained_as_these(name, caplog):
    """As accelerate's prepare does, after it has read and loaded the state."""
    models = []
    told = []
    for replaced in (False, True):
        model = Model()
        model.layers[0]["output"].weight.logical_matrices = concatenated(first=4, second=4)
        optimizer = build(model, name)
        if replaced:
            optimizer.load_state_dict(optimizer.state_dict())
            new = {}
            for module in model.modules():
                for key, parameter in list(module.named_parameters(recurse=False)):
                    new[parameter] = nn.Parameter(parameter.detach().clone())
                    setattr(module, key, new[parameter])
            for group in optimizer.param_groups:
                group["params"] = [new[parameter] for parameter in group["params"]]
        train(model, optimizer, 3)
        models.append((model, optimizer))
        told.append(caplog.messages)
        caplog.clear()
    assert told[0] == told[1]
    assert_goes_on_alike(*models)
    assert len(models[1][1].state_dict()["state"]) == len(list(Model().parameters()))
