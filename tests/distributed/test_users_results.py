"""Updates of a user's own function that are not finite on one rank: all that share the parameter leave it out."""

import torch
import torch.distributed as dist

from megatron_eopt import TensorParallelMuon
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import groups_of, shard


class Fails(TensorParallelMuon):
    """Returns NaN for its first parameter, on rank 1 alone."""

    def orthogonalize(self, p, grad):
        return grad * (torch.nan if dist.get_rank() == 1 and p is self.param_groups[0]["params"][0] else 1)


def step(rank, world_size):
    p, q = shard(torch.ones(4, 6)), torch.nn.Parameter(torch.ones(4, 6))
    optimizer = Fails([("a", p), ("b", q)], lr=0.1, pg_collection=groups_of())
    p.grad, q.grad = torch.ones(4, 6), torch.ones(4, 6)
    optimizer.step()
    momentum = optimizer.state[p]["momentum_buffer"]
    return p.eq(1).all().item(), momentum.any().item(), q.eq(1).any().item(), optimizer.skipped_steps()


def test_ranks_that_share_a_matrix_agree():
    assert run_ranks(step, 2) == [(True, False, False, {"a": 1})] * 2
