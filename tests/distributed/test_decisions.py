"""What all ranks of a run find out together."""

from unittest import mock

from megatron_eopt.megatron import consensus
from megatron_eopt.megatron.consensus import from_rank_0, on_all_ranks
from megatron_eopt.routing import OverrideError
from tests.distributed.ranks import run_ranks


def on_rank(rank, world_size):
    return [*(decided(rank, by) for by in ((), (1,), (0, 1))), failed_to_find()]


def decided(rank, wrong):
    """A decision that some ranks cannot make, and how often values crossed."""

    def decide():
        if rank in wrong:
            raise (OverrideError if rank else ValueError)(f"not on rank {rank}")
        return rank

    with mock.patch.object(consensus, "values_of", side_effect=consensus.values_of) as values:
        try:
            return on_all_ranks(decide), values.call_count
        except ValueError as error:
            return type(error), str(error), values.call_count


def failed_to_find():
    def find():
        raise FileNotFoundError("no checkpoint")

    try:
        from_rank_0(find)
    except (FileNotFoundError, RuntimeError) as error:
        return str(error)


def test_a_mistake_of_one_rank_ends_all_ranks():
    lost = ["no checkpoint", "the first rank failed: FileNotFoundError: no checkpoint"]
    for rank, found in enumerate(run_ranks(on_rank, 2)):
        assert found[:3] == [(rank, 0), (OverrideError, "not on rank 1", 1), (ValueError, "not on rank 0", 1)]
        assert found[3] == lost[rank]
