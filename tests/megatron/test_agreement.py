"""What the ranks of a run tell each other: every different value once, whatever the number of ranks."""

import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.megatron import agreement
from megatron_eopt.megatron.agreement import distinct
from megatron_eopt.parallel import collectives

HASH = 4 * 8 + 8  # bytes of a hash and of a size


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
        monkeypatch.setattr(agreement, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=found)))
        return found

    return make


STAGES = 4


def of_stage(rank, ranks):
    """What ranks of a pipeline stage say of its parameters, of those that have no other part of the model."""
    first = 8 * (rank * STAGES // ranks)
    weights = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    return [f"decoder.layers.{layer}.{name}.weight" for layer in range(first, first + 8) for name in weights]


@pytest.mark.parametrize("ranks", [8, 16, 32, 64])
def test_each_value_is_sent_once_at_any_number_of_ranks(world, ranks):
    found = (ran := world(ranks)).run(lambda rank: distinct(of_stage(rank, ranks)))
    stages = [of_stage(rank, ranks) for rank in range(0, ranks, ranks // STAGES)]
    assert found == [stages] * ranks
    of_values = sum(len(pickle.dumps(each)) for each in stages)
    assert max(ran.received) == of_values + HASH


@pytest.mark.parametrize(("values", "exchanges"), [(8, 3), (5, 3), (4, 3), (1, 1)])
def test_ranks_that_say_different_things_are_all_heard_in_their_order(world, values, exchanges):
    """In as many exchanges, however many say something else."""
    found = (ran := world(8)).run(lambda rank: distinct((rank % values, 1.5)))
    assert found == [[(each, 1.5) for each in range(values)]] * 8
    assert ran.exchanges == exchanges


def test_equal_values_are_one_however_they_were_made(world):
    """Strings that are one object, and those that are equal, are pickled in different ways."""

    def value(rank):
        word = "".join(random.Random(0).sample("abcdef", 6))
        return {"a": [word, word if rank % 2 else "".join(list(word))], "b": 0.1}

    assert world(8).run(lambda rank: distinct(value(rank))) == [[value(0)]] * 8
