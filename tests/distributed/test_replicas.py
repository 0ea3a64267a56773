"""What all ranks of a run find out together.

Ranks that hold different copies of parameters do not make a first step, and data-parallel ones not many later ones.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.megatron import agreement, replicas
from megatron_eopt.megatron.agreement import from_rank_0, on_all_ranks
from megatron_eopt.megatron.first_step import check_steps
from megatron_eopt.megatron.releases import mark_sinks
from megatron_eopt.megatron.replicas import check_replicas
from megatron_eopt.routing import OverrideError
from tests.distributed.ranks import run_ranks


class Optimizer:
    steps = 0

    def step(self):
        self.steps += 1
        return True, self.steps  # whether it was made comes first, as Megatron has it


def model(rank, different):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 3).bfloat16())
    layers[1].weight.allreduce = False  # an expert's
    if different:
        with torch.no_grad():  # one entry by one bit, on one rank
            getattr(layers[different[0]], different[1]).view(-1)[1:2].view(torch.uint8)[0] ^= rank == 1
    return layers


CASES = [(None, True), ((0, "weight"), True), ((0, "bias"), True), ((1, "weight"), True), ((1, "weight"), False)]


def tensor_parallel(rank):
    """A shard, one of an expert, one that nobody marked, the offsets of a softmax, and a norm in three versions."""
    messages = []
    for name, value in (("norm", 1.0), ("norm", 1.0 + rank), ("gate", 1.0 + rank)):
        layers = torch.nn.Module()
        layers.norm, layers.gate = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        for other in ("shard", "expert", "unmarked"):
            layers.register_parameter(other, torch.nn.Parameter(torch.full((3, 3), float(rank))))
        layers.shard.tensor_model_parallel, layers.shard.partition_dim = True, 0
        layers.expert.allreduce, layers.expert.partition_dim = False, 1
        layers.unmarked.partition_dim = 0
        layers.gate.allreduce = False
        layers.attention = torch.nn.Module()
        layers.dt_bias = torch.nn.Parameter(torch.full((3,), float(rank)))  # as a gated delta product marks it
        layers.dt_bias.tensor_model_parallel = True
        layers.attention.softmax_offset = torch.nn.Parameter(torch.full((3,), float(rank)))
        mark_sinks([layers])
        getattr(layers, name).data.fill_(value)
        optimizer = Optimizer()
        check_steps(optimizer, 0, check_replicas([layers], None, None, dist.group.WORLD, dist.group.WORLD))
        try:
            messages.append(optimizer.step()[1])
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def on_rank(rank, world_size):
    decisions = [*(decided(rank, by) for by in ((), (1,), (0, 1))), failed_to_find()]
    return [first_step(rank, *case) for case in CASES], drift(rank), tensor_parallel(rank), decisions


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(on_rank, 2)


def first_step(rank, different, experts):
    optimizer = Optimizer()
    groups = dist.group.WORLD, dist.group.WORLD if experts else None
    check_steps(optimizer, 0, check_replicas([model(rank, different)], *groups))
    try:
        return optimizer.step()[1], optimizer.step()[1]
    except RuntimeError as error:
        return str(error), optimizer.steps


def drift(rank):
    """One entry moves by one bit on one rank in the seventh step; the steps that were made until that is an error."""
    before, replicas.EVERY = replicas.EVERY, 4
    optimizer, layers = Optimizer(), model(rank, None)
    check_steps(optimizer, 0, check_replicas([layers], dist.group.WORLD, dist.group.WORLD))
    real = dist.all_reduce
    dist.all_reduce = counted = mock.Mock(side_effect=real)
    try:
        for step in range(20):
            if step == 6 and rank == 1:
                layers[0].bias.data.view(torch.int32)[2] += 1
            optimizer.step()
    except RuntimeError as error:
        return str(error), optimizer.steps, counted.call_count
    finally:
        dist.all_reduce, replicas.EVERY = real, before


def decided(rank, wrong):
    """A decision that some ranks cannot make, and how often values crossed."""

    def decide():
        if rank in wrong:
            raise (OverrideError if rank else ValueError)(f"not on rank {rank}")
        return rank

    with mock.patch.object(agreement, "values_of", side_effect=agreement.values_of) as values:
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


def test_a_mistake_of_one_rank_ends_all_and_values_cross_for_its_sake_only(ranks):
    lost = ["no checkpoint", "the first rank failed: FileNotFoundError: no checkpoint"]
    for rank, (*_, found) in enumerate(ranks):
        assert found[:3] == [(rank, 0), (OverrideError, "not on rank 1", 1), (ValueError, "not on rank 0", 1)]
        assert found[3] == lost[rank]


def test_ranks_that_drift_apart_are_told_a_few_steps_after_the_next_comparison(ranks):
    for _, (message, steps, asked), *_ in ranks:
        assert message.startswith(
            "1 of 3 parameters differ between data-parallel ranks, such as 0.bias: the ranks would"
        )
        assert "Found after 10 steps" in message  # compared before the ninth step
        assert steps == 10
        assert asked == 2 * 3  # of dense parameters and of experts, before the first, the fifth and the ninth step


def test_all_ranks_refuse_and_name_the_parameter(ranks):
    for (same, weight, bias, expert, expert_of_others), *_ in ranks:
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


def test_what_tensor_parallel_ranks_have_whole_is_compared_before_the_first_step(ranks):
    for *_, (same, norm, gate), _ in ranks:
        assert same == 1
        assert norm.startswith("1 of 1 parameters differ between tensor-parallel ranks, such as norm: the ranks would")
        assert gate.startswith("1 of 1 parameters differ between tensor-parallel ranks, such as gate: the ranks would")
