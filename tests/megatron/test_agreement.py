"""What the ranks of a run tell each other: every different value once, whatever the number of ranks."""

import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_eopt.megatron import agreement
from megatron_eopt.megatron.agreement import distinct

HASH = 128  # bytes, pickled


class Ranks:
    """So many ranks, each a thread, with the collectives of objects; counts the bytes that each rank receives."""

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

    def get_rank(self):
        return self._own.rank

    def get_world_size(self):
        return self._ranks

    def all_gather_object(self, everywhere, value):
        self._sent[self.get_rank()] = pickle.dumps(value)
        self._barrier.wait()
        everywhere[:] = map(pickle.loads, self._sent)
        self.exchanges += self.get_rank() == 0
        self.received[self.get_rank()] += sum(map(len, self._sent))
        self._barrier.wait()

    def broadcast_object_list(self, values, src):
        if self.get_rank() == src:
            self._sent[src] = pickle.dumps(values)
        self._barrier.wait()
        values[:] = pickle.loads(self._sent[src])
        self.exchanges += self.get_rank() == 0
        self.received[self.get_rank()] += len(self._sent[src]) if self.get_rank() != src else 0
        self._barrier.wait()


@pytest.fixture
def world(monkeypatch):
    def make(ranks):
        monkeypatch.setattr(agreement, "dist", found := Ranks(ranks))
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
    of_values = sum(len(pickle.dumps([each])) for each in stages)
    assert max(ran.received) <= of_values + HASH * ranks
    gathered = ranks * len(pickle.dumps(stages[0]))
    print(f"{ranks} ranks: {max(ran.received):,} bytes a rank; as all gather all {gathered:,}")
    assert max(ran.received) < gathered / (ranks / 8)


@pytest.mark.parametrize(("values", "exchanges"), [(8, 2), (5, 2), (4, 5), (1, 1)])
def test_ranks_that_say_different_things_are_all_heard_in_their_order(world, values, exchanges):
    """At once, where most do: as many exchanges as values would take long."""
    found = (ran := world(8)).run(lambda rank: distinct((rank % values, 1.5)))
    assert found == [[(each, 1.5) for each in range(values)]] * 8
    assert ran.exchanges == exchanges


def test_equal_values_are_one_however_they_were_made(world):
    """Strings that are one object, and those that are equal, are pickled in different ways."""

    def value(rank):
        word = "".join(random.Random(0).sample("abcdef", 6))
        return {"a": [word, word if rank % 2 else "".join(list(word))], "b": 0.1}

    assert world(8).run(lambda rank: distinct(value(rank))) == [[value(0)]] * 8
