"""Data-parallel ranks that hold different parameters do not make a first step."""

from functools import partial

import torch
import torch.distributed as dist

from megatron_eopt.megatron.checkpoints.checksums import check_replicas
from megatron_eopt.megatron.factory import check_first_step
from tests.distributed.ranks import run_ranks


class Optimizer:
    steps = 0

    def step(self):
        self.steps += 1
        return self.steps


def model(rank, different):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 3).bfloat16())
    layers[1].weight.allreduce = False  # an expert's
    if different:
        with torch.no_grad():  # one entry by one bit, on one rank
            getattr(layers[different[0]], different[1]).view(-1)[1:2].view(torch.uint8)[0] ^= rank == 1
    return layers


CASES = [(None, True), ((0, "weight"), True), ((0, "bias"), True), ((1, "weight"), True), ((1, "weight"), False)]


def first_steps(rank, world_size):
    return [first_step(rank, *case) for case in CASES]


def first_step(rank, different, experts):
    optimizer = Optimizer()
    groups = dist.group.WORLD, dist.group.WORLD if experts else None
    check_first_step(optimizer, [partial(check_replicas, [model(rank, different)], *groups)])
    try:
        return optimizer.step(), optimizer.step()
    except RuntimeError as error:
        return str(error), optimizer.steps


def test_all_ranks_refuse_and_name_the_parameter():
    for rank in run_ranks(first_steps, 2):
        same, weight, bias, expert, expert_of_others = rank
        assert same == (1, 2)
        assert expert_of_others == (1, 2)  # experts are compared with their own replicas only
        for (message, steps), count, name in (
            (weight, "1 of 3", "0.weight"),
            (bias, "1 of 3", "0.bias"),
            (expert, "1 of 1", "1.weight"),
        ):
            assert steps == 0
            assert message.startswith(f"{count} parameters differ between data-parallel ranks, such as {name}: the")
            assert "--no-check-replicas" in message
