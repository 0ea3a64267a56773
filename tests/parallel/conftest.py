"""A group of ranks of which one is there."""

import pytest
import torch.distributed as dist
from step import RANKS
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture(scope="module")
def fake_group():
    """A group of eight ranks of which one is there: what it receives has no numbers."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()
