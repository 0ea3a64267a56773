"""Dion2 on several ranks selects and steps as one does, also after a resume."""

from functools import partial

import pytest
import torch

from megatron_eopt.optimizers.dion2 import Dion2
from tests.distributed import test_dion
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut
from tests.distributed.test_dion import CASES, PLACEMENTS, STEPS, assert_as_one_rank, found, of_dtensors
from tests.optimizers.field import assert_close


def of_cases(first, others, **settings):
    return Dion2([{"params": first, "fraction": 0.4}, {"params": others, "lr": 0.02}], **settings)


# in fp64; one step is left out on all ranks
trained = partial(test_dion.trained, dtype=torch.float64, build=of_cases, broken={(2, "expert")})


def on_all(rank, world_size):
    _, straight = trained(rank, world_size)
    first, begun = trained(rank, world_size, steps=range(2))
    _, resumed = trained(rank, world_size, steps=range(2, STEPS), state=first.state_dict(), start=found(begun))
    return found(straight), found(resumed), of_dtensors(rank, world_size, Dion2)


@pytest.fixture(scope="module")
def ran():
    return {ranks: run_ranks(on_all, ranks) for ranks in (2, 4)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_take_the_steps_of_one(ran, ranks):
    _, alone = trained(0, 1)
    for rank, (straight, resumed, _) in enumerate(ran[ranks]):
        for name, (_, attributes) in CASES.items():
            # stacks of one and of many are multiplied in other orders
            assert_close(straight[name], cut(alone[name].detach(), attributes, rank, ranks), 1e-11, name)
            assert torch.equal(resumed[name], straight[name]), name


@pytest.mark.parametrize("name", PLACEMENTS)
def test_dtensors_take_the_steps_of_one_rank(ran, name):
    assert_as_one_rank([of_placements[name] for _, _, of_placements in ran[4]], Dion2)
