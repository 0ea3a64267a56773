"""SOAP at TP=k takes the steps of one rank, and keeps each factor and basis on one of them where a matrix is cut."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.matrices import GATE_UP, experts
from megatron_eopt.optimizers import whole_matrices
from megatron_eopt.optimizers.nonfinite import NonFinite
from megatron_eopt.optimizers.soap import SOAP
from megatron_eopt.parallel.collectives import counters
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, grid, groups_of, message_of, placed, shard, sharded
from tests.optimizers.field import assert_close

STEPS = 7
MAX_DIM = 48
CASES = {
    "in fp64": ((24, 8), sharded(0)),
    **{
        f"{kind} along dim {dim}": (shape, sharded(dim))
        for kind, shape in {"square": (24, 24), "tall": (48, 20), "wide": (20, 48)}.items()
        for dim in (0, 1)
    },
    "long side cut": ((60, 8), sharded(0)),
    "short side cut": ((60, 8), sharded(1)),
    "no factor": ((60, 52), sharded(0)),
    "fused qkv": ((4 * 16, 24), sharded(0, qkv_split_shapes=[8, 4, 4])),
    "fused qkv along columns": ((4 * 16, 24), sharded(1, qkv_split_shapes=[8, 4, 4])),
    # shards end inside the group, and some hold nothing of k or v
    "one query group": ((48, 20), sharded(0, qkv_split_shapes=[32, 8, 8])),
    "q without factor": ((64, 52), sharded(0, qkv_split_shapes=[56, 4, 4])),
    "gate and up": ((32, 12), sharded(0, logical_matrices=GATE_UP)),
    "stacked experts": ((2, 16, 20), sharded(1, logical_matrices=experts(2))),
    "expert": ((20, 48), {"partition_dim": 1, "expert_tp": True}),
    "replicated": ((20, 12), {}),
    "bias": ((24,), sharded(0)),
    "scale": ((5,), {}),
}
VARIANTS = [
    {},
    {"basis_method": "eigh", "fp32_matmul_prec": "high"},
    {"use_kl_shampoo": True},
    {"use_kl_shampoo": True, "weight_norm": "hold"},
    {"use_kl_shampoo": True, "basis_of": "current", "maximize": True, "sort_bases": "after"},
]


def drawn(seed):
    """Random entries of every whole parameter."""
    generator = torch.Generator().manual_seed(seed)
    xs = {name: torch.randn(shape, generator=generator) for name, (shape, _) in CASES.items()}
    return {name: x.double() if name == "in fp64" else x for name, x in xs.items()}


def made(rank, world_size):
    return {name: placed(x, CASES[name][1], rank, world_size) for name, x in drawn(0).items()}


def built(parameters, world_size, groups=None, **settings):
    several = list(parameters.items())
    return SOAP(
        [{"params": several[:7], "weight_decay": 0.2}, {"params": several[7:], "lr": 0.1, "precondition_frequency": 3}],
        lr=0.05,
        precondition_frequency=2,
        max_dim=MAX_DIM,
        split_qkv=True,
        is_qkv_fn=lambda p: hasattr(p, "qkv_split_shapes"),
        pg_collection=groups or groups_of(world_size),
        **settings,
    )


def set_gradients(parameters, rank, world_size, step):
    for name, x in drawn(100 + step).items():
        parameters[name].grad = cut(x, CASES[name][1], rank, world_size)


def trained(rank, world_size, settings, numbers=range(STEPS), bad=None):
    """A model after some steps; at the fourth the last rank has bad gradients for the parameters of these names."""
    parameters = made(rank, world_size)
    optimizer = built(parameters, world_size, **settings)
    for step in numbers:
        set_gradients(parameters, rank, world_size, step)
        if bad and step == 3 and rank == world_size - 1:
            for name in bad:
                parameters[name].grad.view(-1)[0] = torch.nan
        optimizer.step()
    return optimizer, parameters


def result(optimizer, parameters):
    return {name: (p.detach(), dict(optimizer.state[p])) for name, p in parameters.items()}


BAD = ["tall along dim 0", "fused qkv", "bias"]


def on_ranks(rank, world_size):
    found = [result(*trained(rank, world_size, settings)) for settings in VARIANTS]
    optimizer, parameters = trained(rank, world_size, {}, bad=BAD)
    return found, result(optimizer, parameters), optimizer.skipped_steps()


def on_two(rank, world_size):
    most, report = whole_matrices.MOST_BYTES, NonFinite._report
    counters.reset()
    trained(rank, world_size, {}, range(1))
    calls = dict(counters.calls)
    whole_matrices.MOST_BYTES = 4 * 3 * 48 * 20 * 2
    counters.reset()
    in_small_buckets = result(*trained(rank, world_size, {}))
    exchanges = counters.calls["all_to_all"]
    whole_matrices.MOST_BYTES = most
    refused = without_gradients(rank, world_size, ["tall along dim 0"] if rank else [])
    NonFinite._report = lambda self: None  # as on a GPU, where what happened is known two steps later
    later = without_gradients(rank, world_size, ["tall along dim 0"] if rank else [])
    nowhere = without_gradients(rank, world_size, ["tall along dim 0", "expert"])
    NonFinite._report = report
    return on_ranks(rank, world_size), calls, (in_small_buckets, exchanges), refused, later, nowhere, no_group()


MODEL = [((16, 12), 0)] * 8 + [((8, 24), 1)] * 4
"""Shapes, and the dimension that is cut."""


def dealt(rank, world_size, groups=None, **settings):
    """What a rank keeps of the sides of equal matrices, and what it sends in a step."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape, dim in MODEL:
        x, gradient = torch.randn(2, *shape, generator=generator).chunk(world_size, dim + 1)[rank]
        parameters.append(shard(x.clone(), dim))
        parameters[-1].grad = gradient.contiguous()
    optimizer = SOAP(parameters[:8], pg_collection=groups or groups_of(), **settings)
    optimizer.init_state()
    first = [optimizer.state[p]["L"].numel() for p in parameters[:8]]
    optimizer.add_param_group({"params": parameters[8:]})
    for _ in range(2):
        counters.reset()
        optimizer.step()
    sides = [tuple(optimizer.state[p][key].shape for key in ("L", "Q_L", "R", "Q_R")) for p in parameters]
    assert [left[0].numel() for left in sides[:8]] == first  # a further group moves nothing
    schemes = {each.scheme for of_one in optimizer.described_matrices().values() for each in of_one}
    return sides, dict(counters.calls), counters.bytes["all_to_all"], schemes, refusals(optimizer, parameters)


def refusals(optimizer, parameters):
    """A state as each rank had it whole loads; one with nothing where this rank computes does not."""
    state = optimizer.state_dict()
    earlier, emptied = ({**state, "state": {i: dict(each) for i, each in state["state"].items()}} for _ in range(2))
    for each, (shape, _) in zip(earlier["state"].values(), MODEL, strict=True):
        for key, n in zip(("L", "Q_L", "R", "Q_R"), [shape[0]] * 2 + [shape[1]] * 2, strict=True):
            each[key] = each[key] if each[key].numel() else torch.ones(n, n)
    optimizer.load_state_dict(earlier)
    for index, p in enumerate(parameters):
        assert all(torch.equal(x, state["state"][index][key]) for key, x in optimizer.state[p].items())
    for each in emptied["state"].values():
        each["L"] = torch.empty(0, 0)
    return message_of(lambda: optimizer.load_state_dict(emptied))


def without_gradients(rank, world_size, names):
    """What two steps without some of the gradients leave of a model, and what they say."""
    optimizer, parameters = trained(rank, world_size, {}, range(2))
    said = ""
    for step in (2, 3):
        set_gradients(parameters, rank, world_size, step)
        for name in names:
            parameters[name].grad = None
        try:
            optimizer.step()
        except RuntimeError as error:
            said = str(error)
            break
    return result(optimizer, parameters), said


def no_group():
    """What is said of shards that no group completes; a vector needs none."""
    optimizer = SOAP([shard(torch.ones(4))])
    return message_of(lambda: optimizer.add_param_group({"params": [shard(torch.ones(4, 3))]}))


def assert_equals(found, expected, rank, world_size, what):
    """Parameters and state of a rank are its parts of those of one rank."""
    for name, (_, attributes) in CASES.items():
        (p, state), (whole, of_whole) = found[name], expected[name]
        assert_close(p, cut(whole, attributes, rank, world_size), what=(what, rank, name))
        assert set(state) == set(of_whole)
        for key, value in of_whole.items():
            value = cut(value, attributes, rank, world_size) if key.startswith("exp_avg") else value
            if state[key].numel() or key[0] not in "LRQ":
                assert_close(state[key], value, what=(what, rank, name, key))


def assert_kept_by_one_or_all(ranks):
    """One rank keeps the sides of what is cut; all have the rest, the same to the bit."""
    for name, (_, state) in ranks[0].items():
        for key in (key for key in state if not key.startswith("exp_avg")):
            having = [found[name][1][key] for found in ranks if found[name][1][key].numel()]
            assert len(having) == (1 if key[0] in "LRQ" and name != "replicated" else len(ranks)), (name, key)
            assert all(torch.equal(having[0], other) for other in having[1:]), (name, key)


def assert_ranks_equal_one(of_ranks, world_size):
    for place, settings in enumerate(VARIANTS):
        expected = result(*trained(0, 1, settings))
        for rank, (found, _, _) in enumerate(of_ranks):
            assert_equals(found[place], expected, rank, world_size, settings)
        assert_kept_by_one_or_all([found[place] for found, _, _ in of_ranks])
    expected = result(*trained(0, 1, {}, bad=BAD))
    for rank, (_, found, skipped) in enumerate(of_ranks):
        assert_equals(found, expected, rank, world_size, "bad")
        assert skipped == dict.fromkeys(BAD, 1)


def test_two_ranks_step_as_one():
    found = run_ranks(on_two, 2)
    assert_ranks_equal_one([of_rank[0] for of_rank in found], 2)
    straight, two = (result(*trained(0, 1, {}, range(steps))) for steps in (STEPS, 2))
    four = result(*trained(0, 1, {}, range(4)))
    for rank, (_, calls, (in_small_buckets, exchanges), refused, later, nowhere, no_group) in enumerate(found):
        # one for each group of ranks and dtype, since the first gradients bring no updates back; and for each group, in
        # the first step alone, one that tells whose gradients are zero, and one that compares settings
        assert calls == {"all_to_all": 3, "agree": 2 + 2, "all_reduce": 2}
        assert exchanges > 2 * 3 * STEPS
        assert_equals(in_small_buckets, straight, rank, 2, "small buckets")
        assert "parameter 0 of group 1, of shape (4, 3) is marked as sharded, but no process group" in no_group
        model, said = refused
        assert "tall along dim 0 has a gradient on some of the ranks that share it, none on others" in said
        assert_equals(model, two, rank, 2, "refused")
        for (model, said), names in ((later, ["tall along dim 0"]), (nowhere, ["tall along dim 0", "expert"])):
            assert not said
            assert_equals(model, {**four, **{name: two[name] for name in names}}, rank, 2, names)


def by_strips(rank, world_size):
    """Of a matrix that is cut, with a factor large enough for strips."""
    generator = torch.Generator().manual_seed(0)
    p, *gradients = (placed(x, sharded(0), rank, world_size) for x in torch.randn(4, 520, 24, generator=generator))
    optimizer = SOAP([p], pg_collection=groups_of(world_size), symmetric_products="blocked")
    for gradient in gradients:
        p.grad = gradient.detach()
        optimizer.step()
    return optimizer.state[p]["L"], p.detach(), optimizer.param_groups[0]["symmetric_products"]


def test_a_kernel_of_factors_serves_on_two_ranks_as_on_one():
    whole, weight, _ = by_strips(0, 1)
    of_ranks = run_ranks(by_strips, 2)
    assert {kernel for *_, kernel in of_ranks} == {"blocked"}
    (kept,) = (factor for factor, *_ in of_ranks if factor.numel())
    assert torch.equal(kept, whole)
    assert torch.equal(torch.cat([shard for _, shard, _ in of_ranks]), weight)


def on_four(rank, world_size):
    return on_ranks(rank, world_size), dealt(rank, world_size)


@pytest.mark.wide
def test_four_ranks_step_as_one_and_share_factors_and_work():
    found = run_ranks(on_four, 4)
    assert_ranks_equal_one([of_rank for of_rank, _ in found], 4)
    shares = [of_rank[1] for of_rank in found]
    for index, (shape, _) in enumerate(MODEL):
        rows, cols = [(shape[0],) * 2] * 2, [(shape[1],) * 2] * 2
        kept = [sides[index] for sides, *_ in shares]
        assert sorted(kept) == [((0, 0),) * 4] * 3 + [(*rows, *cols)]
    for sides, calls, sent, schemes, said in shares:
        assert sum(of_one[0] != (0, 0) for of_one in sides[:8]) == 2
        assert sum(of_one[0] != (0, 0) for of_one in sides[8:]) == 1
        # gradient and both moments of nine matrices go to others, a quarter of each; of three the update and the second
        # moment come from here, three quarters of each; all have 192 entries
        assert sent == 4 * (3 * 9 * 48 + 2 * 3 * 144)
        assert calls == {"all_to_all": 2, "agree": 1}
        assert schemes == {"owner"}
        assert "has shape (0, 0), expected" in said
        assert "ranks had dealt matrices otherwise: group parameters as before" in said


def on_a_grid(rank, world_size):
    tp, dp = grid(rank)
    groups = SimpleNamespace(tp=tp, expt_tp=tp, dp_cp=dp, expt_dp=dp, tp_dp_cp=dist.group.WORLD)
    found = []
    for settings in VARIANTS:
        parameters = made(rank % 2, 2)
        optimizer = built(parameters, 2, groups, share_over_dp=True, **settings)
        for step in range(STEPS):
            set_gradients(parameters, rank % 2, 2, step)
            optimizer.step()
        found.append(result(optimizer, parameters))
    schemes = {name: optimizer.described_matrices()[p][0].scheme for name, p in parameters.items() if p.ndim > 1}
    return found, schemes, dealt(rank % 2, 2, groups, share_over_dp=True)


@pytest.mark.wide
def test_data_parallel_ranks_share_factors_and_work():
    ranks = run_ranks(on_a_grid, 4)
    for place, settings in enumerate(VARIANTS):
        expected, found = result(*trained(0, 1, settings)), [of_rank[0][place] for of_rank in ranks]
        for rank, of_rank in enumerate(found):
            assert_equals(of_rank, expected, rank % 2, 2, settings)
        for name, (p, state) in found[0].items():
            assert torch.equal(p, found[2][name][0])
            for key in (key for key in state if key[0] in "LRQ"):
                having = [rank for rank in range(4) if found[rank][name][1][key].numel()]
                # of a copy each, where no group has the ranks of both
                of_each = {"replicated": [[0, 1], [2, 3]], "expert": [[0, 2], [1, 3]]}.get(name)
                assert len(having) == 1 if of_each is None else having in of_each, (name, key, having)
    for _, schemes, (sides, calls, sent, dealt_schemes, _) in ranks:
        assert (schemes["tall along dim 0"], schemes["replicated"], schemes["expert"]) == ("owner", "share", "owner")
        assert dealt_schemes == {"owner"}
        assert sum(of_one[0] != (0, 0) for of_one in sides) == 3
        # gradient and both moments of three matrices go to the other rank that has half of this copy; of three the
        # update and the second moment come from here, to three ranks
        assert sent == 4 * 96 * (3 * 3 + 3 * 3 * 2)
        assert calls == {"all_to_all": 2, "agree": 1}
