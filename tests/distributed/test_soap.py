"""SOAP on several ranks: which rank has which factors, what it exchanges, and gradients that ranks have not."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.factors import eigenbases
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.optimizers.soap import SOAP
from megatron_eopt.orthogonalize.bases import by_products
from megatron_eopt.parallel.collectives import counters
from megatron_eopt.step import stacked_optimizer
from tests.distributed.layouts import PROGRAMS, TensorParallel, assert_as_one, found, set_gradients, trained
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import counted, grid, groups_of, message_of, placed, shard, sharded
from tests.optimizers.family import having

TWO, SMALL = TensorParallel(2), 8 * 3 * 48 * 24 * 2
LEFT = ["tall along columns", "expert"]
"""Parameters without a gradient in two steps on both ranks."""


def without_gradients(program, layout, rank):
    """What two steps without some of the gradients leave after two with all."""
    optimizer, parameters, _ = trained(program, layout, rank, range(2))
    for step in (2, 3):
        set_gradients(program, layout, rank, parameters, step)
        for name in LEFT:
            parameters[name].grad = None
        optimizer.step()
    return optimizer, parameters


def on_two(rank, ranks):
    program, results = PROGRAMS["soap"], {}
    most = stacked_optimizer.MOST_STACK_BYTES
    for name in ("soap", "psgd_kron"):
        stacked_optimizer.MOST_STACK_BYTES = SMALL
        optimizer, parameters, calls = trained(PROGRAMS[name], TWO, rank)
        results["small", name] = found(optimizer, parameters, TWO, rank), calls["all_to_all"]
        stacked_optimizer.MOST_STACK_BYTES = most
    with patch.object(eigenbases, "orthonormal_columns", by_products):  # as on a GPU
        optimizer, parameters, _ = trained(program, TWO, rank)
        results["by products"] = found(optimizer, parameters, TWO, rank)
    results["nowhere"] = found(*without_gradients(program, TWO, rank), TWO, rank)
    return results, of_zero_rows(rank, ranks)


def of_zero_rows(rank, ranks):
    """Weights after gradients with most rows zero, the first of them tiny and the last huge."""
    weights = {}
    for name in having("max_dim", "precondition_frequency"):
        generator = torch.Generator().manual_seed(0)
        p, *gradients = torch.randn(6, 128, 8, generator=generator)
        p = placed(p, sharded(0), rank, ranks)
        optimizer = OPTIMIZERS[name].cls([p], pg_collection=groups_of(ranks), precondition_frequency=1)
        for gradient, scale in zip(gradients, (1e-20, 1e-20, 1.0, 1e9, 1e12), strict=True):
            gradient[torch.rand(128, generator=generator) < 0.9] = 0
            p.grad = placed(gradient * scale, sharded(0), rank, ranks).detach()
            optimizer.step()
        weights[name] = p.detach()
    return weights


@pytest.fixture(scope="module")
def of_two():
    return run_ranks(on_two, 2)


def test_small_stacks_take_more_exchanges_for_the_same_steps(of_two):
    for name in ("soap", "psgd_kron"):
        program = PROGRAMS[name]
        alone = trained(program)
        assert_as_one(program, TWO, [of_rank["small", name][0] for of_rank, *_ in of_two], alone)
        assert all(of_rank["small", name][1][0] > program.calls["all_to_all"] for of_rank, *_ in of_two)
    for of_rank, *_ in of_two:  # factors of a cut matrix are on one rank, and of all of them on both
        cut = [of for name, of in of_rank["small", "soap"][0].items() if "replicated" not in name]
        assert any(of["L"].x.numel() for of in cut if "L" in of)


def test_bases_by_products_make_the_steps_of_one_rank(of_two):
    program = PROGRAMS["soap"]
    with patch.object(eigenbases, "orthonormal_columns", by_products):
        alone = trained(program)
    assert_as_one(program, TWO, [of_rank["by products"] for of_rank, *_ in of_two], alone)


def test_a_matrix_that_has_no_gradient_on_any_rank_is_left_out(of_two):
    program = PROGRAMS["soap"]
    before, (optimizer, parameters, _) = trained(program, steps=range(2)), trained(program, steps=range(4))
    for name in LEFT:
        parameters[name] = before[1][name]
        optimizer.state[before[1][name]] = before[0].state[before[1][name]]
    assert_as_one(program, TWO, [of_rank["nowhere"] for of_rank, *_ in of_two], (optimizer, parameters, {}))


def test_rows_of_zeros_of_all_sizes_make_the_steps_of_one_rank(of_two):
    for name, alone in of_zero_rows(0, 1).items():
        weight = torch.cat([of_rank[name] for *_, of_rank in of_two])
        assert torch.isfinite(weight).all(), name
        assert torch.equal(weight, alone), name


MODEL = [((16, 12), 0)] * 8 + [((8, 24), 1)] * 4
"""Shapes, and the dimension that is cut."""
SIDES = ("L", "Q_L", "R", "Q_R")


def dealt(rank, ranks, groups=None, **settings):
    """What a rank keeps of the sides of equal matrices, and what it sends in a step."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape, dim in MODEL:
        x, gradient = torch.randn(2, *shape, generator=generator).chunk(ranks, dim + 1)[rank]
        parameters.append(shard(x.clone(), dim))
        parameters[-1].grad = gradient.contiguous()
    optimizer = SOAP(parameters[:8], pg_collection=groups or groups_of(), **settings)
    optimizer.init_state()
    first = [optimizer.state[p]["L"].numel() for p in parameters[:8]]
    optimizer.add_param_group({"params": parameters[8:]})
    for _ in range(2):
        counters.reset()
        optimizer.step()
    sides = [tuple(optimizer.state[p][key].shape for key in SIDES) for p in parameters]
    assert [left[0].numel() for left in sides[:8]] == first  # a further group moves nothing
    schemes = {each.scheme for of_one in optimizer.described_matrices().values() for each in of_one}
    return sides, counted(), schemes, refusals(optimizer, parameters)


def refusals(optimizer, parameters):
    """A state as each rank had it whole loads; one with nothing where this rank computes does not."""
    state = optimizer.state_dict()
    earlier, emptied = ({**state, "state": {i: dict(each) for i, each in state["state"].items()}} for _ in range(2))
    for each, (shape, _) in zip(earlier["state"].values(), MODEL, strict=True):
        for key, n in zip(SIDES, [shape[0]] * 2 + [shape[1]] * 2, strict=True):
            each[key] = each[key] if each[key].numel() else torch.ones(n, n)
    optimizer.load_state_dict(earlier)
    for index, p in enumerate(parameters):
        assert all(torch.equal(x, state["state"][index][key]) for key, x in optimizer.state[p].items())
    for each in emptied["state"].values():
        each["L"] = torch.empty(0, 0)
    return message_of(lambda: optimizer.load_state_dict(emptied))


def over_four(rank, ranks):
    tp, dp = grid(rank)
    groups = SimpleNamespace(tp=tp, expt_tp=tp, dp_cp=dp, expt_dp=dp, tp_dp_cp=dist.group.WORLD)
    return dealt(rank, ranks), dealt(rank % 2, 2, groups, share_over_dp=True)


@pytest.mark.wide
def test_factors_and_work_are_shared_by_all_ranks_that_hold_some():
    # gradient and both moments of nine matrices go to others, a quarter of each; of three the update and the second
    # moment come from here, three quarters of each. Of copies, those of three matrices go to the other rank that has
    # half of this one, and what is made of three comes back to three ranks, by a call for each copy. All have 192.
    sent = (2, 4 * (3 * 9 * 48 + 2 * 3 * 144)), (3, 4 * 96 * (3 * 3 + 3 * 3 * 2))
    ranks = run_ranks(over_four, 4)
    for index, (rows, cols) in enumerate(shape for shape, _ in MODEL):
        kept = [of_tp[0][index] for of_tp, _ in ranks]
        assert sorted(kept) == [((0, 0),) * 4] * 3 + [((rows, rows), (rows, rows), (cols, cols), (cols, cols))]
    for of_rank in ranks:
        for (sides, exchanged, schemes, said), expected in zip(of_rank, sent, strict=True):
            assert [sum(of_one[0] != (0, 0) for of_one in some) for some in (sides[:8], sides[8:])] == [2, 1]
            assert exchanged["all_to_all"] == expected
            assert exchanged.keys() == {"all_to_all", "agree"}
            assert schemes == {"owner"}
            assert "has shape (0, 0), expected" in said
            assert "ranks had dealt matrices otherwise: group parameters as before" in said
