"""State in host memory changes no bit of a step over two ranks, whatever the scheme."""

import pytest
import torch

from megatron_eopt.optimizers.mars_muon import MarsMuon
from tests.distributed.ranks import run_ranks
from tests.distributed.test_workspace import CASES as OF_WORKSPACE
from tests.distributed.test_workspace import OPTIMIZERS, stepped

KINDS = OPTIMIZERS | {"mars": MarsMuon}
CASES = [*OF_WORKSPACE, ("mars", "owner")]
FRACTIONS = dict.fromkeys(KINDS, 1.0) | {"muon": 0.5, "mars": 0.5}


def offloaded(name, mode, fraction, rank, ranks):
    """Parameters and state after some steps, whose is in host memory, and bytes that a step copied and was to copy."""
    moved = []
    parameters, optimizer = stepped(
        *(KINDS[name], rank, ranks),
        tp_mode=mode,
        offload_fraction=fraction,
        watch=lambda optimizer: moved.append((optimizer.streamed.stored, sum(optimizer.engine.offloaded()))),
    )
    tensors = [x for p in parameters for x in (p.detach(), *optimizer.state[p].values())]
    return tensors, [optimizer.on_host(p) for p in parameters], moved[0]  # of the step in which all had gradients


def run(rank, ranks):
    return {(*case, each): offloaded(*case, each, rank, ranks) for case in CASES for each in (0.0, FRACTIONS[case[0]])}


@pytest.fixture(scope="module")
def found():
    return run_ranks(run, 2)


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES)
def test_ranks_step_as_with_all_state_on_the_device(found, case):
    for of_rank in found:
        plain, _, none = of_rank[*case, 0.0]
        assert none == (0, 0)
        tensors, _, (stored, planned) = of_rank[*case, FRACTIONS[case[0]]]
        assert all(map(torch.equal, tensors, plain))
        assert stored == planned > 0
    one, other = (of_rank[*case, FRACTIONS[case[0]]][1] for of_rank in found)
    assert one == other
    assert all(one) == (FRACTIONS[case[0]] == 1)
