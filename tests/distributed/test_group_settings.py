"""Settings that differ between ranks are refused at start; one that changes on a rank alone ends the step."""

import contextlib
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_eopt import Spectron, TensorParallelMuon
from megatron_eopt.family import CLASSES
from megatron_eopt.parallel.agreement import versions
from megatron_eopt.settings.execution import gathered
from megatron_eopt.settings.of_class import settings_of
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, groups_of, message_of, placed, sharded
from tests.optimizers.field import drawn

SHAPES = [
    *(((48, 20), sharded(0)), ((48, 20), sharded(0)), ((20, 48), sharded(1)), ((24, 24), sharded(0))),
    ((32, 20), sharded(0, qkv_split_shapes=(4, 2, 2))),
    ((12, 10), {}),
]


def parameters(number, rank=0, ranks=1):
    return [
        placed(drawn(shape, 10 * number + i), attributes, rank, ranks) for i, (shape, attributes) in enumerate(SHAPES)
    ]


def muon(groups, collection=None, **settings):
    return TensorParallelMuon(groups, lr=0.1, fp32_matmul_prec="highest", pg_collection=collection, **settings)


def stepped(made, rank=0, ranks=1):
    for group in made.param_groups:
        for p, (shape, attributes) in zip(group["params"], SHAPES, strict=True):
            p.grad = cut(drawn(shape, 100), attributes, rank, ranks)
    made.step()


PLANNED = {"num_ns_steps": "the iteration of "}
OF_KIND = {Spectron: {"rank": 5}}
OF_EXECUTION = {"momentum_dtype": torch.bfloat16, "offload_fraction": 0.5}


def differing_arguments():
    """Class, argument, and the value of the second of two ranks: of every optimizer, all numbers, flags and choices."""
    for kind in CLASSES.values():
        known = settings_of(kind)
        if "execution" in known:
            yield from ((kind, name, value) for name, value in OF_EXECUTION.items())
        for name in sorted(known.keys() - {"symmetric_products"}):  # refused where it cannot serve, before ranks agree
            setting = known[name]
            default = setting.default
            choices = [x for x in setting.choices if x != default]
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
        made = kind(parameters(0, rank, ranks), pg_collection=groups_of(), **gathered(kind, given))
        before = [p.detach().clone() for p in made.param_groups[0]["params"]]
        found[kind.__name__, name] = said = message_of(lambda made=made: stepped(made, rank, ranks))
        assert said is None or all(map(torch.equal, made.param_groups[0]["params"], before))
    return found


def with_other_groups(rank, ranks):
    """What is said where a second group has more steps on rank 1 alone."""
    groups = [{"params": parameters(0, rank, ranks)}, {"params": parameters(1, rank, ranks)}]
    if rank:
        groups[1]["num_ns_steps"] = 10
    return message_of(lambda: stepped(muon(groups, groups_of()), rank, ranks))


def with_other_versions(rank, ranks):
    made = muon(parameters(0, rank, ranks), groups_of())
    found = {}
    for package in versions():
        with patch.dict(versions(), {package: "of another kind"} if rank else {}):
            found[package] = message_of(made.prepare)
    return found


def with_a_later_change(rank, ranks):
    """What each rank says where rank 1 alone changes a setting of a group before the third step."""
    groups = SimpleNamespace(tp=dist.new_group(timeout=timedelta(seconds=2)))
    made = muon(parameters(0, rank, ranks), groups, tp_mode="distributed")
    for _ in range(2):
        stepped(made, rank, ranks)
    if rank == 1:
        made.param_groups[0]["num_ns_steps"] = 10
    return message_of(lambda: stepped(made, rank, ranks), RuntimeError)


def on_ranks(rank, ranks, differing):
    kinds = (with_other_groups, with_other_versions, with_a_later_change)
    return with_a_different_argument(rank, ranks, differing), *(each(rank, ranks) for each in kinds)


@pytest.fixture(scope="module")
def said():
    return run_ranks(on_ranks, 2, list(differing_arguments()))


def test_each_argument_that_differs_between_ranks_is_refused(said):
    for found, *_ in said:
        assert {kind for kind, _ in found} == set(CLASSES)
        assert len(found) > 90
        assert not [name for name, message in found.items() if message is None]
        for (_, name), message in found.items():
            named = f": {name} of 'parameter 0 of group 0, of shape (24, 20)' is " in message
            assert named or PLANNED.get(name, "nothing of it") in message, (name, message)


def test_other_groups_and_versions_are_refused(said):
    for _, groups, packages, _ in said:
        assert "plan differs between ranks of group 'tp': num_ns_steps of 'parameter 0 of group 1" in groups
        assert "is 5 on rank 0 and 10 on rank 1" in groups
        for package, message in packages.items():
            assert f": the version of {package} is {versions()[package]!r} on rank 0 and 'of another kind'" in message


def test_a_setting_that_changes_on_one_rank_ends_the_step(said):
    (*_, waiting), (*_, changed) = said
    for message in (waiting, changed):
        assert "step 3 of TensorParallelMuon began last" in message
        assert "a setting of a group changed on it alone" in message
