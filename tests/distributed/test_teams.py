"""Matrices of one rank that a team works on: the steps of one process, whatever a rank of the team has to step."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist

from megatron_eopt import TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.matrices import ATTRIBUTE, GATE_UP
from megatron_eopt.metrics import Sampler
from megatron_eopt.optimizers.lent import Team
from megatron_eopt.optimizers.parameters import NAME
from megatron_eopt.parallel.collectives import counters
from tests.distributed.ranks import run_ranks
from tests.optimizers.family import build
from tests.optimizers.field import assert_close, drawn

SHAPES = {"tall": (41, 12), "wide": (12, 37), "gate and up": (48, 16), "of one rank": (24, 10)}
HANDS = (["tall", "gate and up", "of one rank"], ["wide"], [], [])  # of each rank
LENT = frozenset(SHAPES) - {"of one rank"}
STEPS = 5
RELATIVES = [name for name, row in OPTIMIZERS.items() if issubclass(row.cls, TensorParallelMuon)]


def made(names, device="cpu"):
    parameters = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        if name in names:
            parameters[name] = torch.nn.Parameter(drawn(shape, number).to(device))
            setattr(parameters[name], NAME, name)
            if name == "gate and up":
                setattr(parameters[name], ATTRIBUTE, GATE_UP)
    return parameters


def give_gradients(parameters, step, without=None, not_finite=None):
    for number, name in enumerate(SHAPES):
        if name in parameters:
            parameters[name].grad = drawn(SHAPES[name], 10 * step + number + 100)
    if step == 1 and without in parameters:
        parameters[without].grad = None
    if step == 2 and not_finite in parameters:
        parameters[not_finite].grad[0, 0] = torch.nan


def train(optimizer, parameters, steps=range(STEPS), **faults):
    for step in steps:
        give_gradients(parameters, step, **faults)
        optimizer.step()
    return {name: p.detach().clone() for name, p in parameters.items()}


def on_team(rank, name, **settings):
    """An optimizer of this rank's hand, which with those of the others is a team."""
    parameters = made(HANDS[rank])
    optimizer = build(name, [{"params": list(parameters.values())}], fp32_matmul_prec="highest", **settings)
    optimizer._session.team = Team(dist.group.WORLD, LENT, torch.device("cpu"))
    if parameters:
        optimizer.prepare()
    optimizer._session.team.plan(optimizer)
    return optimizer, parameters


def stepped(rank, world_size, names, settings, faults):
    return [train(*on_team(rank, name, **settings), **faults) for name in names]


def alone(name, faults=None, **settings):
    parameters = made(SHAPES)
    optimizer = build(name, list(parameters.values()), fp32_matmul_prec="highest", **settings)
    return train(optimizer, parameters, **(faults or {}))


def together(of_ranks):
    return {name: x for of_rank in of_ranks for name, x in of_rank.items()}


@pytest.mark.parametrize("mode", ["gram", pytest.param("auto", marks=pytest.mark.wide)])
def test_relatives_step_as_on_one_rank(mode):
    found = run_ranks(stepped, 4, RELATIVES, {"tp_mode": mode}, {})
    for number, name in enumerate(RELATIVES):
        expected, of_team = alone(name), together(of_rank[number] for of_rank in found)
        assert of_team.keys() == expected.keys()
        for which, x in expected.items():
            # five steps, each of whose factors is off by what test_schemes allows of gram
            assert_close(of_team[which], x, 1e-5 * STEPS, (name, which))


@pytest.mark.parametrize("lacking", ["wide", "tall"])
def test_nobody_waits_for_a_gradient(lacking):
    """Missing in one step, and not finite in the next; the other matrices step all the same."""
    faults = {"without": lacking, "not_finite": lacking}
    found = together(x for (x,) in run_ranks(stepped, 4, ["muon"], {"tp_mode": "gram"}, faults))
    expected = alone("muon", faults)
    for which, x in expected.items():
        assert_close(found[which], x, 1e-5 * STEPS, which)


def changed(rank, world_size):
    """More steps of the iteration from the third step on, and state that is loaded after the fourth."""
    optimizer, parameters = on_team(rank, "muon", tp_mode="gram")
    train(optimizer, parameters, range(2))
    optimizer.param_groups[0]["num_ns_steps"] = 10
    train(optimizer, parameters, range(2, 4))
    saved, weights = deepcopy(optimizer.state_dict()), {name: p.detach().clone() for name, p in parameters.items()}
    straight = train(optimizer, parameters, range(4, 6))
    optimizer, parameters = on_team(rank, "muon", tp_mode="gram", num_ns_steps=10)
    for name, p in parameters.items():
        p.data.copy_(weights[name])
    optimizer.load_state_dict(saved)
    return straight, train(optimizer, parameters, range(4, 6))


def test_settings_hold_from_the_next_step_on_and_loaded_state_goes_on_bit_by_bit():
    parameters = made(SHAPES)
    expected = TensorParallelMuon(list(parameters.values()), lr=0.01, fp32_matmul_prec="highest")
    train(expected, parameters, range(2))
    expected.param_groups[0]["num_ns_steps"] = 10
    train(expected, parameters, range(2, 6))
    for straight, resumed in run_ranks(changed, 4):
        for name, x in straight.items():
            assert torch.equal(resumed[name], x)
            assert_close(x, parameters[name].detach(), 6e-5, name)


def counted(rank, world_size):
    optimizer, parameters = on_team(rank, "muon", tp_mode="gram")
    give_gradients(parameters, 0)
    counters.reset()
    optimizer.step()
    explained = optimizer.explain()
    schemes = [x.scheme for of_one in optimizer.described_matrices().values() for x in of_one]
    return counters.calls["all_to_all"], counters.bytes["all_to_all"], explained, schemes


def test_what_is_handed_over_and_said_of_it():
    found = run_ranks(counted, 4)
    entries = {name: rows * cols for name, (rows, cols) in SHAPES.items()}
    for hand, (calls, sent, explained, schemes) in zip(HANDS, found, strict=True):
        assert calls == 2  # there and back
        mine = sum(entries[name] for name in hand if name in LENT)
        of_others = sum(entries[name] for name in LENT) - mine
        # three of four shards of what is its, and its shard of what is not; these differ by a row or column
        assert sent / 4 == pytest.approx(0.75 * mine + of_others / 4, abs=3 * 16)
        assert "4 ranks of a node" in explained
        assert "2 of 24 x 16" in explained
        of_team = "gram replicated over 4 of a node"
        expected = {"tall": [of_team], "gate and up": [of_team] * 2, "of one rank": ["local"], "wide": [of_team]}
        assert schemes == [scheme for name in hand for scheme in expected[name]]


def measured(rank, world_size, hands):
    """The figures of a step that ranks with these hands make together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.HANDS", hands)
        optimizer, parameters = on_team(rank, "muon", tp_mode="gram")
    sampler = Sampler([optimizer], torch.device("cpu"))
    give_gradients(parameters, 0)
    sampler.begin()
    optimizer.step()
    (figures,) = sampler.end({id(optimizer): 1.0} if parameters else {}).values()
    return figures


def test_figures_are_the_same_whichever_rank_has_the_matrices():
    first, last = ([*some, *others] for some, others in ((HANDS[:2], HANDS[2:]), (HANDS[2:], HANDS[:2])))
    expected, found = (run_ranks(measured, 4, hands)[0] for hands in (first, last))
    assert expected["grad_norm"] == pytest.approx(2**0.5)
    for key in ("effective_rank", "residual", "largest_residual", "update_rms", "grad_norm", "learning_rate"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key
