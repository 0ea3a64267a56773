"""What the ranks of a run tell each other: every different value once, whatever the number of ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.megatron import consensus
from megatron_eopt.megatron.consensus import distinct
from megatron_eopt.megatron.model_parameters import ModelParameter
from megatron_eopt.parallel import agreement, collectives
from megatron_eopt.routing import ParameterInfo


class Ranks:
    """A group of so many ranks, each a thread, with the collectives that agree; counts what each rank receives."""

    ReduceOp = dist.ReduceOp
    _device_types = ()

    def __init__(self, ranks):
        self._ranks, self._own, self._barrier = ranks, threading.local(), threading.Barrier(ranks)
        self._sent, self.received, self.exchanges = [None] * ranks, [0] * ranks, 0

    def run(self, function):
        """What a function of the rank returns on each."""

        def of_rank(rank):
            self._own.rank = rank
            return function(rank)

        with ThreadPoolExecutor(self._ranks) as pool:
            return list(pool.map(of_rank, range(self._ranks)))

    def rank(self):
        return self._own.rank

    def size(self):
        return self._ranks

    def get_global_rank(self, group, rank):
        return 10 * rank

    def all_gather_into_tensor(self, everywhere, x, group):
        everywhere.copy_(torch.cat(self._exchange(x)))

    def all_reduce(self, x, op, group):
        x.copy_(sum(self._exchange(x)))

    def _exchange(self, x):
        self._sent[self.rank()] = x.clone()
        self._barrier.wait()
        found = list(self._sent)
        self.exchanges += self.rank() == 0
        self.received[self.rank()] += x.nbytes
        self._barrier.wait()
        return found


@pytest.fixture
def world(monkeypatch):
    def make(ranks):
        found = Ranks(ranks)
        monkeypatch.setattr(collectives, "dist", found)
        monkeypatch.setattr(agreement, "dist", found)
        monkeypatch.setattr(consensus, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=found)))
        return found

    return make


@pytest.mark.parametrize(("values", "exchanges"), [(5, 3), (1, 1)])
def test_all_ranks_are_heard_in_their_order(world, values, exchanges):
    """In as many exchanges, however many say something else."""
    found = (ran := world(8)).run(lambda rank: distinct((rank % values, 1.5)))
    assert found == [[(each, 1.5) for each in range(values)]] * 8
    assert ran.exchanges == exchanges


def parameter(name, trainable=True, shape=(4, 2), expert=False):
    tensor = torch.nn.Parameter(torch.empty(shape), requires_grad=trainable)
    tensor.allreduce = not expert
    return ModelParameter(tensor, ParameterInfo(name, shape, {}), None, "")


@pytest.mark.parametrize("group", ["dp_cp", "expt_tp"])
@pytest.mark.parametrize(
    ("of_rank_2", "line"),
    [
        ([{"name": "a"}, {"name": "b", "trainable": False}], "b is 'trainable, {0}' on rank 0 and 'frozen, {0}'"),
        ([{"name": "a"}, {"name": "b", "shape": (4, 3)}], "(4, 2)' on rank 0 and 'trainable, torch.float32, (4, 3)'"),
        ([{"name": "a"}, {"name": "b"}, {"name": "c"}], "c is 'missing' on rank 0 and 'trainable, {0}'"),
        ([{"name": "b"}, {"name": "a"}], "parameter 0 is 'a' on rank 0 and 'b'"),
        ([{"name": "a"}, {"name": "b"}], None),
    ],
)
def test_the_first_parameter_that_differs_is_named(world, group, of_rank_2, line):
    expert = group.startswith("expt")
    ran = world(3)

    def compare(rank):
        described = of_rank_2 if rank == 2 else [{"name": "a"}, {"name": "b"}]
        here = [parameter(**each, expert=expert) for each in described]
        here.append(parameter(f"of rank {rank}", expert=not expert))  # which other ranks have
        try:
            consensus.refuse_different_parameters(here, SimpleNamespace(**{group: ran}))
        except ValueError as error:
            return str(error)

    for message in ran.run(compare):
        if line is None:
            assert message is None
        else:
            assert f"{line.format('torch.float32, (4, 2)')} on rank 20" in message.splitlines()[1]
