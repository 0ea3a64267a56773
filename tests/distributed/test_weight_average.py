"""Averages of weights on DTensors of FSDP2: the average of one process, through torch.distributed.checkpoint."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

from megatron_eopt import WeightAverage
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import whole
from tests.distributed.test_plain import Model, optimizer_of, sharded
from tests.distributed.test_plain_checkpoints import step, template

RULE = "ema:0.8"


def averages(model, average):
    return {name: whole(average.of(p)) for name, p in model.named_parameters()}


def averaged(ranks, name, steps):
    """A model and its optimizer after some steps, with an average from the first one on."""
    model = Model() if ranks == 1 else sharded(init_device_mesh("cpu", (ranks,)))
    optimizer = optimizer_of(model, name)
    average = WeightAverage(RULE, optimizer)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer, average


def ran(rank, ranks, folder):
    """The averages after three steps, after a load of these, and one step later of both."""
    found = {}
    for name in ("muon", "lion"):
        model, optimizer, average = averaged(ranks, name, 3)
        dcp.save(template(model, optimizer, "plain"), checkpoint_id=folder / f"{name}-{ranks}")
        other, its_optimizer, again = averaged(ranks, name, 0)
        state = template(other, its_optimizer, "plain")
        dcp.load(state, checkpoint_id=folder / f"{name}-{ranks}")
        set_model_state_dict(other, state["model"])
        set_optimizer_state_dict(other, its_optimizer, state["optimizer"])
        loaded = averages(model, average), averages(other, again)
        step(model, optimizer, 3)
        step(other, its_optimizer, 3)
        found[name] = loaded, (averages(model, average), averages(other, again)), again.steps
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_have_the_average_of_the_whole_and_a_checkpoint_goes_on_with_it(tmp_path):
    alone, (of_two, _) = ran(0, 1, tmp_path), run_ranks(ran, 2, tmp_path)
    for name, (loaded, later, steps) in of_two.items():
        assert steps == 4
        for saved, again in (loaded, later):
            assert saved.keys() == again.keys()
            assert all(torch.equal(saved[key], again[key]) for key in saved)
        for key, average in alone[name][1][0].items():
            torch.testing.assert_close(later[0][key], average, rtol=0, atol=0 if name == "lion" else 1e-5)
        assert not torch.equal(loaded[0]["lm_head.weight"], later[0]["lm_head.weight"])
