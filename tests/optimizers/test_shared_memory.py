"""What a step takes whose work data-parallel ranks share."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from counting import Allocations
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_eopt import SOAP, Execution


@pytest.mark.parametrize("ranks", [8, 64])
def test_a_shared_step_takes_as_much_at_any_number_of_ranks(ranks):
    """Each rank holds a copy of every matrix: what all ranks' copies take would grow with the ranks."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with FakeTensorMode():
            parameters = [torch.nn.Parameter(torch.empty(1024, 2048)) for _ in range(128)]
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            groups = SimpleNamespace(dp_cp=dist.group.WORLD)
            optimizer = SOAP(parameters, pg_collection=groups, share_over_dp=True)
            vars(optimizer)["execution"] = Execution(workspace=2**28)
            optimizer.init_state()
            for parameter in parameters:
                optimizer._note_begun(parameter, "steps")  # no first gradient
            optimizer._session.engine = optimizer.proposed()
            optimizer._session.settled = optimizer._settled(optimizer._session.engine)
            optimizer._session.stepping = [True] * len(parameters)
            with torch.no_grad(), Allocations() as allocated:
                optimizer._take(None)
    finally:
        dist.destroy_process_group()
    assert allocated.peak <= 2 * optimizer.execution.workspace
