"""Groups with settings of their own at TP=2 do what they do at TP=1, where each is what an optimizer alone would be."""

import contextlib
import inspect
import typing
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_eopt import Spectron, TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron_eopt.family import CLASSES
from tests.distributed.ranks import run_ranks

EXACT = ("duplicated", "distributed", "owner", "gram", "auto", "normuon", "adamuon")
OWN = [
    {"num_ns_steps": 7, "coefficient_type": "polar_express"},
    {"scale_mode": "unit_rms_norm", "extra_scale_factor": 0.5},
    {},
]
# of every group: global shape, and the dimension that is cut
SHAPES = [((48, 20), 0), ((48, 20), 0), ((20, 48), 1), ((24, 24), 0), ((32, 20), 0), ((12, 10), None)]
FUSED = 4
STEPS = 2
MATRICES = len(OWN) * (len(SHAPES) + 2)


def optimizer(groups, mode, collection=None, **settings):
    settings = {
        "lr": 0.1,
        "fp32_matmul_prec": "highest",
        "split_qkv": True,
        "is_qkv_fn": lambda p: hasattr(p, "is_fused"),
        "qkv_split_shapes": (4, 2, 2),
        "pg_collection": collection,
        **settings,
    }
    if mode in ("normuon", "adamuon"):
        return TensorParallelAdaptiveMuon(groups, moment2_method=mode, tp_mode="auto", **settings)
    return TensorParallelMuon(groups, tp_mode=mode, **settings)


def part(x, dim, rank, ranks):
    return x if dim is None else x.chunk(ranks, dim)[rank].contiguous()


def parameters(number, rank=0, ranks=1):
    made = []
    for place, (shape, dim) in enumerate(SHAPES):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(10 * number + place))
        p = torch.nn.Parameter(part(x, dim, rank, ranks))
        if dim is not None:
            p.tensor_model_parallel, p.partition_dim = True, dim
        if place == FUSED:
            p.is_fused = True
        made.append(p)
    return made


def whole(made):
    """The same, on every rank as a whole."""
    for p in made:
        p.tensor_model_parallel = False
    return made


def stepped(made, rank=0, ranks=1):
    for seed in range(STEPS):
        for group in made.param_groups:
            for p, (shape, dim) in zip(group["params"], SHAPES, strict=True):
                whole = torch.randn(shape, generator=torch.Generator().manual_seed(100 + seed))
                p.grad = part(whole, dim, rank, ranks)
        made.step()
    return [p.detach() for group in made.param_groups for p in group["params"]]


def on_ranks(rank, ranks):
    collection = SimpleNamespace(tp=dist.group.WORLD, expt_tp=dist.group.WORLD)
    results = {}
    for mode in (*EXACT, "blockwise"):
        groups = [{"params": parameters(number, rank, ranks), **own} for number, own in enumerate(OWN)]
        made = optimizer(groups, mode, collection)
        results[mode] = (stepped(made, rank, ranks), made.newton_schulz_calls, made.matrices_per_step)
    groups = [{"params": whole(parameters(number)), **own} for number, own in enumerate(OWN)]
    made = optimizer(groups, "auto", collection, data_parallel_group=dist.group.WORLD)
    results["data parallel"] = (stepped(made), made.newton_schulz_calls, made.matrices_per_step)
    return results


@pytest.fixture(scope="module")
def results():
    return run_ranks(on_ranks, 2)


def assert_close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("mode", EXACT)
def test_the_update_of_every_group_is_that_of_an_optimizer_alone_on_one_rank(results, mode):
    alone = [optimizer(parameters(number), mode, **own) for number, own in enumerate(OWN)]
    expected = [p for made in alone for p in stepped(made)]
    for rank, result in enumerate(results):
        shards = [part(p, dim, rank, 2) for p, (_, dim) in zip(expected, SHAPES * len(OWN), strict=True)]
        assert_close(result[mode][0], shards)


def test_blockwise_treats_every_shard_as_an_optimizer_alone_would(results):
    for rank, result in enumerate(results):
        alone = [optimizer(parameters(number, rank, 2), "blockwise", **own) for number, own in enumerate(OWN)]
        assert_close(result["blockwise"][0], [p for made in alone for p in stepped(made, rank, 2)])


def test_ranks_that_share_the_work_have_the_update_of_one_rank(results):
    alone = [optimizer(whole(parameters(number)), "auto", **own) for number, own in enumerate(OWN)]
    expected = [p for made in alone for p in stepped(made)]
    for result in results:
        assert_close(result["data parallel"][0], expected)


@pytest.mark.parametrize("mode", [*EXACT, "blockwise", "data parallel"])
def test_ranks_count_the_matrices_that_they_share(results, mode):
    for result in results:
        assert result[mode][1:] == (STEPS * MATRICES, MATRICES)


# of both ranks: settings of two groups
LONGER = {"num_ns_steps": 10}
DIFFERENT = [([LONGER, {}], [{}, LONGER]), ([{}, {}], [{}, LONGER])]


def with_different_settings(rank, ranks):
    collection = SimpleNamespace(tp=dist.group.WORLD, expt_tp=dist.group.WORLD)
    messages = []
    for of_ranks in DIFFERENT:
        groups = [{"params": parameters(n, rank, ranks), **own} for n, own in enumerate(of_ranks[rank])]
        try:
            stepped(optimizer(groups, "duplicated", collection), rank, ranks)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_ranks_with_other_settings_of_a_group_are_told_so():
    for messages in run_ranks(with_different_settings, 2):
        assert len(messages) == 2
        assert "plan differs between ranks 0 and 1 of group 'tp': 'parameter 0 of group 0" in messages[0]
        assert "has num_ns_steps 10 in the one and None in the other" in messages[0]
        assert "has num_ns_steps None in the one and 10 in the other" in messages[1]


PLANNED = {"num_ns_steps": "has the iteration", "offload_fraction": "bucket 0 has the matrices"}
OF_KIND = {Spectron: {"rank": 5}}
HARMLESS = {
    "workspace": "what differs is in the plan, if anything does",
    "share_over_dp": "no effect without a data-parallel group; with one it is in the plan",
}


def differing_arguments():
    """Class, argument, and the value of the second of two ranks: of every optimizer, all numbers, flags and choices."""
    for kind in CLASSES.values():
        hints, arguments = typing.get_type_hints(kind.__init__), inspect.signature(kind).parameters
        for name, default in ((name, each.default) for name, each in arguments.items()):
            choices = [x for x in typing.get_args(hints.get(name)) if isinstance(x, str) and x != default]
            for value in choices or other_values(default):
                with contextlib.suppress(ValueError):
                    kind(parameters(0), **(OF_KIND.get(kind, {}) | {name: value}))
                    yield kind, name, value
                    break


def other_values(default):
    match default:
        case bool():
            return [not default]
        case int():
            return [default + 1, default - 1]
        case float():
            return [default / 2 or 0.25, default + 0.25]
        case tuple():
            return [tuple(each / 2 for each in default)]
    return []


def with_a_different_argument(rank, ranks, differing):
    """What is said of each, and whether any parameter had moved by then."""
    collection, found = SimpleNamespace(tp=dist.group.WORLD, expt_tp=dist.group.WORLD), {}
    for kind, name, value in differing:
        given = OF_KIND.get(kind, {}) | ({name: value} if rank else {})
        made = kind(parameters(0, rank, ranks), pg_collection=collection, **given)
        before = [p.detach().clone() for p in made.param_groups[0]["params"]]
        try:
            stepped(made, rank, ranks)
        except ValueError as error:
            assert all(map(torch.equal, made.param_groups[0]["params"], before))
            found[kind.__name__, name] = str(error)
        else:
            found[kind.__name__, name] = None
    return found


def test_each_argument_that_differs_between_ranks_is_refused():
    for found in run_ranks(with_a_different_argument, 2, list(differing_arguments())):
        assert {kind for kind, _ in found} == set(CLASSES)
        assert len(found) > 90
        assert {name for (_, name), message in found.items() if message is None} == HARMLESS.keys()
        for (_, name), message in found.items():
            if name not in HARMLESS:
                told = PLANNED.get(name, f"of shape (24, 20)' has {name} ")
                assert told in message, (name, message)
