"""Groups with settings of their own at TP=2 do what they do at TP=1, where each is what an optimizer alone would be."""

import contextlib
import inspect
import typing
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_eopt import Spectron, TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron_eopt.family import CLASSES
from megatron_eopt.parallel.agreement import versions
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, groups_of, message_of, placed, sharded
from tests.optimizers.field import assert_close, drawn

EXACT = ("duplicated", "distributed", "owner", "gram", "auto", "normuon", "adamuon")
OWN = [
    {"num_ns_steps": 7, "coefficient_type": "polar_express"},
    {"scale_mode": "unit_rms_norm", "extra_scale_factor": 0.5},
    {},
]
# of every group
SHAPES = [
    *(((48, 20), sharded(0)), ((48, 20), sharded(0)), ((20, 48), sharded(1)), ((24, 24), sharded(0))),
    ((32, 20), sharded(0, qkv_split_shapes=(4, 2, 2))),
    ((12, 10), {}),
]
STEPS = 2
MATRICES = len(OWN) * (len(SHAPES) + 2)


def optimizer(groups, mode, collection=None, **settings):
    settings = {
        "lr": 0.1,
        "fp32_matmul_prec": "highest",
        "split_qkv": True,
        "is_qkv_fn": lambda p: hasattr(p, "qkv_split_shapes"),
        "pg_collection": collection,
        **settings,
    }
    if mode in ("normuon", "adamuon"):
        return TensorParallelAdaptiveMuon(groups, moment2_method=mode, tp_mode="auto", **settings)
    return TensorParallelMuon(groups, tp_mode=mode, **settings)


def parameters(number, rank=0, ranks=1):
    return [
        placed(drawn(shape, 10 * number + i), attributes, rank, ranks) for i, (shape, attributes) in enumerate(SHAPES)
    ]


def assert_all_close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b)


def stepped(made, rank=0, ranks=1):
    for seed in range(STEPS):
        for group in made.param_groups:
            for p, (shape, attributes) in zip(group["params"], SHAPES, strict=True):
                p.grad = cut(drawn(shape, 100 + seed), attributes, rank, ranks)
        made.step()
    return [p.detach() for group in made.param_groups for p in group["params"]]


def on_ranks(rank, ranks):
    results = {}
    for mode in (*EXACT, "blockwise"):
        groups = [{"params": parameters(number, rank, ranks), **own} for number, own in enumerate(OWN)]
        made = optimizer(groups, mode, groups_of())
        results[mode] = (stepped(made, rank, ranks), made.newton_schulz_calls, made.matrices_per_step)
    groups = [{"params": parameters(number), **own} for number, own in enumerate(OWN)]
    made = optimizer(groups, "auto", groups_of(), data_parallel_group=dist.group.WORLD)
    results["data parallel"] = (stepped(made), made.newton_schulz_calls, made.matrices_per_step)
    return results


@pytest.fixture(scope="module")
def results():
    return run_ranks(on_ranks, 2)


@pytest.mark.parametrize("mode", EXACT)
def test_the_update_of_every_group_is_that_of_an_optimizer_alone_on_one_rank(results, mode):
    alone = [optimizer(parameters(number), mode, **own) for number, own in enumerate(OWN)]
    expected = [p for made in alone for p in stepped(made)]
    for rank, result in enumerate(results):
        shards = [cut(p, each, rank, 2) for p, (_, each) in zip(expected, SHAPES * len(OWN), strict=True)]
        assert_all_close(result[mode][0], shards)


def test_blockwise_treats_every_shard_as_an_optimizer_alone_would(results):
    for rank, result in enumerate(results):
        alone = [optimizer(parameters(number, rank, 2), "blockwise", **own) for number, own in enumerate(OWN)]
        assert_all_close(result["blockwise"][0], [p for made in alone for p in stepped(made, rank, 2)])


def test_ranks_that_share_the_work_have_the_update_of_one_rank(results):
    alone = [optimizer(parameters(number), "auto", **own) for number, own in enumerate(OWN)]
    expected = [p for made in alone for p in stepped(made)]
    for result in results:
        assert_all_close(result["data parallel"][0], expected)


@pytest.mark.parametrize("mode", [*EXACT, "blockwise", "data parallel"])
def test_ranks_count_the_matrices_that_they_share(results, mode):
    for result in results:
        assert result[mode][1:] == (STEPS * MATRICES, MATRICES)


# of both ranks: settings of two groups
LONGER = {"num_ns_steps": 10}
DIFFERENT = [([LONGER, {}], [{}, LONGER]), ([{}, {}], [{}, LONGER])]


def with_different_settings(rank, ranks):
    return [
        message_of(lambda made=made: stepped(made, rank, ranks))
        for of_ranks in DIFFERENT
        for groups in [[{"params": parameters(n, rank, ranks), **own} for n, own in enumerate(of_ranks[rank])]]
        for made in [optimizer(groups, "duplicated", groups_of())]
    ]


def test_ranks_with_other_settings_of_a_group_are_told_so():
    for messages in run_ranks(with_different_settings, 2):
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
    found = {}
    for kind, name, value in differing:
        given = OF_KIND.get(kind, {}) | ({name: value} if rank else {})
        made = kind(parameters(0, rank, ranks), pg_collection=groups_of(), **given)
        before = [p.detach().clone() for p in made.param_groups[0]["params"]]
        found[kind.__name__, name] = said = message_of(lambda made=made: stepped(made, rank, ranks))
        assert said is None or all(map(torch.equal, made.param_groups[0]["params"], before))
    return found


def test_each_argument_that_differs_between_ranks_is_refused():
    for found in run_ranks(with_a_different_argument, 2, list(differing_arguments())):
        assert {kind for kind, _ in found} == set(CLASSES)
        assert len(found) > 90
        assert {name for (_, name), message in found.items() if message is None} == HARMLESS.keys()
        for (_, name), message in found.items():
            if name not in HARMLESS:
                named = f"of shape (24, 20)' has {name} " in message
                assert named or PLANNED.get(name, "nothing of it") in message, (name, message)


def with_a_later_change(rank, ranks):
    """What each rank says where rank 1 alone changes a setting of a group before the third step."""
    groups = SimpleNamespace(tp=dist.new_group(timeout=timedelta(seconds=2)))
    made = optimizer(parameters(0, rank, ranks), "distributed", groups, coefficient_type="quintic", num_ns_steps=5)
    (group,) = made.param_groups
    for p in group["params"]:
        p.grad = torch.ones_like(p)
    made.step()
    made.step()
    if rank == 1:
        group["num_ns_steps"] = 10
    return message_of(made.step, RuntimeError)


def test_a_setting_that_changes_on_one_rank_ends_the_step_with_its_name():
    waiting, changed = run_ranks(with_a_later_change, 2)
    for message in (waiting, changed):
        assert "step 3 of TensorParallelMuon began last" in message
        assert "a setting of a group changed on it alone" in message
    assert "plan" in changed
    assert "plan" not in waiting


def with_other_versions(rank, ranks):
    made = optimizer(parameters(0, rank, ranks), "distributed", SimpleNamespace(tp=dist.group.WORLD))
    found = []
    for package in versions():
        with patch.dict(versions(), {package: "of another kind"} if rank else {}):
            found.append(message_of(made.prepare))
    return found


def test_ranks_with_other_versions_are_told_so():
    for of_torch, of_ours in run_ranks(with_other_versions, 2):
        assert f": torch is {torch.__version__} in the one and of another kind in the other" in of_torch
        assert "megatron_eopt is " in of_ours
