"""Weights that Megatron 0.19 cuts a second time, along their rows: the update is that of one process.

Ranks lie as Megatron numbers them: those of tensor parallelism follow one another, and those of ``gtp_remat`` share one
of its shards, with padding behind the last rows of it.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from megatron_eopt import Lion, TensorParallelMuon
from megatron_eopt.matrices import Part, Split
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, grid, marked, message_of, sharded
from tests.optimizers.field import assert_close, drawn

EXACT = ("duplicated", "distributed", "owner", "gram", "auto")
TP, GTP = 2, 2
PADDING = 7.0
GATED = Split((Part("gate"), Part("up")), order="per_shard")


@dataclass(frozen=True)
class Case:
    """A weight: its shape, the dimension that tensor parallelism cuts, and rows of padding of each of its shards."""

    name: str
    shape: tuple[int, int]
    dim: int | None
    padding: int = 0
    attributes: dict = field(default_factory=dict)
    split: tuple[int, ...] | None = None


EXPERT = {"allreduce": False}
CASES = [
    Case("rows", (48, 20), 0),
    Case("rows, wide", (24, 60), 0),
    Case("columns", (36, 48), 1),
    Case("neither", (32, 24), None),
    Case("padded rows", (42, 20), 0, 3),
    Case("padded columns", (23, 48), 1, 1),
    Case("padded, in one group", (29, 24), None, 3),
    Case("a rank of padding alone", (6, 16), 0, 5),
    Case("query, key and value", (4 * 16, 40), 0, 0, {}, (8, 4, 4)),
    Case("padded query, key and value", (2 * 18, 40), 0, 2, {}, (10, 4, 4)),
    Case("gate and up", (56, 24), 0, 0, {"logical_matrices": GATED}),
    Case("padded gate and up", (52, 24), 0, 6, {"logical_matrices": GATED}),
    Case("gate and up in one group", (54, 24), None, 2, {"logical_matrices": GATED}),
    Case("expert rows", (48, 20), 0, 4, EXPERT),
    Case("expert columns", (20, 36), 1, 0, EXPERT),
    Case("expert gate and up", (48, 24), 0, 0, EXPERT | {"logical_matrices": GATED}),
]


BLOCKWISE = ("padded rows", "a rank of padding alone")


def whole(case, seed=0):
    return drawn(case.shape, len(case.name) + 100 * seed)


def of_case(case):
    return case.attributes if case.dim is None else case.attributes | sharded(case.dim)


def shard_of(case, x, tp, gtp):
    """What one rank has, with its padding."""
    padded = torch.nn.functional.pad(cut(x, of_case(case), tp, TP), (0, 0, 0, case.padding), value=PADDING)
    return padded.chunk(GTP)[gtp].contiguous()


def of_rank(case, x):
    return marked(x.clone(), **of_case(case), is_gtp_weight_remat=True, pad_length=case.padding)


def of_one(case, x):
    return marked(x.clone(), **case.attributes)


def muon(p, case, groups, tp_mode):
    return TensorParallelMuon(
        [p],
        lr=0.1,
        weight_decay=0.0,
        split_qkv=case.split is not None,
        is_qkv_fn=lambda parameter: True,
        qkv_split_shapes=case.split,
        fp32_matmul_prec="highest",
        pg_collection=groups,
        tp_mode=tp_mode,
    )


def stepped(optimizer, p, gradients):
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
    return p.detach()


def megatrons_groups(rank):
    """Of tensor parallelism, ranks that follow one another; of experts, the other way round."""
    near, far = grid(rank)
    return SimpleNamespace(tp=near, gtp_remat=far, expt_tp=far, expt_gtp_remat=near)


def at(case, rank):
    """Where a rank lies along both axes."""
    near, far = rank % 2, rank // 2
    return (far, near) if "allreduce" in case.attributes else (near, far)


def muons(rank):
    groups = megatrons_groups(rank)
    results = {}
    for case in CASES:
        for tp_mode in (*EXACT, "blockwise"):
            if tp_mode == "blockwise" and case.name not in BLOCKWISE:
                continue
            x, *gradients = (shard_of(case, whole(case, seed), *at(case, rank)) for seed in range(3))
            p = of_rank(case, x)
            results[case.name, tp_mode] = stepped(muon(p, case, groups, tp_mode), p, gradients)
    return results


def left_out(rank):
    """Whether a gradient that is not finite on one rank leaves all as it was, of Muon and of Lion."""
    groups, case = megatrons_groups(rank), CASES[0]
    results = []
    for make in (lambda p: muon(p, case, groups, "auto"), lambda p: Lion([p], pg_collection=groups)):
        x, gradient = (shard_of(case, whole(case, seed), *at(case, rank)) for seed in range(2))
        p = of_rank(case, x)
        results.append(torch.equal(stepped(make(p), p, [gradient if rank else gradient / 0]), x))
    return results


def refusals(rank):
    """What cannot be laid out, and what no group completes."""
    groups, case = megatrons_groups(rank), CASES[0]
    x = shard_of(case, whole(case), *at(case, rank))
    wrong = {
        "stack": (torch.zeros(2, 4, 6), {"is_gtp_weight_remat": True}, groups),
        "padding": (x, {"is_gtp_weight_remat": True, "pad_length": 2 * len(x) + 1}, groups),
        "no group": (x, {"is_gtp_weight_remat": True}, SimpleNamespace(tp=groups.tp, expt_tp=groups.tp)),
        "no group of experts": (x, {"is_gtp_weight_remat": True} | EXPERT, SimpleNamespace(tp=groups.tp, expt_tp=None)),
    }
    said = {}
    for name, (data, attributes, of_ranks) in wrong.items():
        p = marked(data, **attributes, logical_matrices=Split(stacked=2) if name == "stack" else None)
        said[name] = message_of(lambda p=p, groups=of_ranks: TensorParallelMuon([p], pg_collection=groups))
    return said


def on_ranks(rank, ranks):
    return muons(rank), left_out(rank), refusals(rank)


@pytest.fixture(scope="module")
def ran():
    return run_ranks(on_ranks, TP * GTP)


@pytest.fixture(scope="module")
def results(ran):
    return [of_muon for of_muon, *_ in ran]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_update_equals_that_of_one_process(results, case):
    x, *gradients = (whole(case, seed) for seed in range(3))
    p = of_one(case, x)
    expected = stepped(muon(p, case, None, "duplicated"), p, gradients)
    assert (expected - x).abs().max() > 0.01
    for rank, result in enumerate(results):
        for tp_mode in EXACT:
            assert_close(result[case.name, tp_mode], shard_of(case, expected, *at(case, rank)), what=tp_mode)


@pytest.mark.parametrize("case", [case for case in CASES if case.padding], ids=lambda case: case.name)
def test_padding_gets_no_update_whatever_it_and_its_gradient_hold(results, case):
    held = [shard_of(case, torch.zeros(case.shape), *at(case, rank)) == PADDING for rank in range(TP * GTP)]
    assert any(mask.any() for mask in held)
    for result, mask in zip(results, held, strict=True):
        assert all((result[case.name, tp_mode][mask] == PADDING).all() for tp_mode in EXACT)


@pytest.mark.parametrize("name", BLOCKWISE)
def test_blockwise_takes_the_rows_of_a_rank_for_a_matrix(results, name):
    case = next(case for case in CASES if case.name == name)
    for rank, result in enumerate(results):
        x, *gradients = (shard_of(case, whole(case, seed), *at(case, rank)) for seed in range(3))
        rows = int((x != PADDING).all(1).sum())
        alone = torch.nn.Parameter(x[:rows].clone())
        expected = stepped(muon(alone, case, None, "duplicated"), alone, [each[:rows] for each in gradients])
        torch.testing.assert_close(result[name, "blockwise"][:rows], expected)
        assert (result[name, "blockwise"][rows:] == PADDING).all()


def test_a_gradient_that_is_not_finite_on_one_rank_leaves_the_step_out_on_all_four(ran):
    assert [same for _, same, _ in ran] == [[True, True]] * 4


def test_what_cannot_be_laid_out_is_refused(ran):
    for *_, said in ran:
        assert "a stack of matrices (2, 4, 6) cannot be cut a second time" in said["stack"]
        assert "padding of 2 shards of 12 rows is from 0 to 24 rows, got 25" in said["padding"]
        assert "no process group completes it: pass a pg_collection that has 'gtp_remat'" in said["no group"]
        assert "pass a pg_collection that has 'expt_gtp_remat'" in said["no group of experts"]
