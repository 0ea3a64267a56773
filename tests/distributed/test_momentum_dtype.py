"""Momenta in bf16 and in 8 bits have the same bits wherever their entries lie: tensor parallelism, DTensors, copies."""

from functools import partial
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron_eopt import TensorParallelMuon
from megatron_eopt.matrices import ATTRIBUTE, GATE_UP, query_key_value, transposed
from megatron_eopt.optimizers.parameters import ROWS
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, groups_of, message_of, placed, sharded, whole
from tests.distributed.test_dtensor_state import CASES as OF_DTENSORS
from tests.distributed.test_dtensor_state import MESHES, SPLIT, Model, load, save
from tests.distributed.test_dtensor_state import trained as trained_model
from tests.optimizers.field import drawn

STEPS = 4
BF16, INT8 = torch.bfloat16, torch.int8
KEYS = {BF16: ("momentum_buffer",), INT8: ("momentum_codes", "momentum_scales")}
rounded = pytest.mark.parametrize("kept", [BF16, INT8], ids=["bf16", "int8"])
TP_MODES = ("duplicated", "distributed", "owner", "gram", "auto", "blockwise")
QKV = query_key_value([8, 4, 4])

CASES = {
    "rows": ((48, 20), sharded(0)),
    "columns": ((20, 512), sharded(1)),  # at most four ranks, so that a block is whole
    "query, key and value": ((64, 12), sharded(0, **{ATTRIBUTE: QKV})),
    "heads": ((64, 12), sharded(0, **{ATTRIBUTE: query_key_value([8, 4, 4], per_head=True)})),
    "gate and up": ((32, 12), sharded(0, **{ATTRIBUTE: GATE_UP})),
    "gate and up as one": ((32, 12), sharded(0, **{ROWS: GATE_UP})),
    "whole": ((12, 150), {}),
}


def of_step(shape, step):
    return drawn(shape, shape[0] + 1000 * step)


def trained(rank, ranks, tp_mode, kept):
    """The momenta of all cases on a rank, by name and key."""
    named = {name: placed(of_step(shape, 0), attributes, rank, ranks) for name, (shape, attributes) in CASES.items()}
    optimizer = TensorParallelMuon(
        named.items(), lr=0.01, pg_collection=groups_of(ranks), tp_mode=tp_mode, momentum_dtype=kept
    )
    for step in range(STEPS):
        for name, (shape, attributes) in CASES.items():
            named[name].grad = cut(of_step(shape, 1 + step), attributes, rank, ranks)
        optimizer.step()
    assert optimizer.state[named["rows"]][KEYS[kept][0]].dtype == kept
    return {(name, key): optimizer.state[p][key] for name, p in named.items() for key in KEYS[kept]}


def tensor_parallel(rank, ranks, kept):
    found = {tp_mode: trained(rank, ranks, tp_mode, kept) for tp_mode in TP_MODES}
    copies = dist.group.WORLD if ranks > 1 else None
    shared = TensorParallelMuon(
        [("w", nn.Parameter(of_step((10, 6), 0)))], momentum_dtype=kept, data_parallel_group=copies
    )
    (p,) = shared.param_groups[0]["params"]
    for step in range(STEPS):
        p.grad = of_step((10, 6), 1 + step)
        shared.step()
    return found, [shared.state[p][key] for key in KEYS[kept]]


@rounded
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_tensor_parallel_momenta_have_the_bits_of_one_rank(ranks, kept):
    found = run_ranks(tensor_parallel, ranks, kept)
    of_one, of_copies = tensor_parallel(0, 1, kept)
    for rank, (of_rank, shared) in enumerate(found):
        assert all(map(torch.equal, shared, of_copies))
        for tp_mode, momenta in of_rank.items():
            for (name, key), x in of_one["auto"].items():
                expected = cut(x, CASES[name][1], rank, ranks)
                assert torch.equal(momenta[name, key], expected), (tp_mode, name, key, rank)


class InBlocks(Model):
    """What lies along columns has a whole number of blocks of 128 on each of up to four ranks, but for the last."""

    cases = MappingProxyType(
        {
            **{name: case for name, case in OF_DTENSORS.items() if case[1] != Shard(1)},
            "long_by_rows": ((9, 300), Shard(0)),
            "even_by_columns": ((3, 512), Shard(1)),
            "fused_by_columns": ((16, 511), Shard(1)),
            "replicated_long": ((4, 200), Replicate()),
        }
    )


def built(model):
    kept = INT8 if isinstance(model, InBlocks) else BF16
    return TensorParallelMuon(model.named_parameters(), lr=0.01, tp_mode="auto", momentum_dtype=kept, **SPLIT)


def momenta(model, optimizer):
    kept = optimizer.momentum_dtype
    found = {(name, key): optimizer.state[p][key] for name, p in model.named_parameters() for key in KEYS[kept]}
    assert {x.dtype for (_, key), x in found.items() if key == KEYS[kept][0]} == {kept}
    return {each: whole(x) for each, x in found.items()}


def of_dtensors(rank, ranks, folder, kept):
    line, of = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",)), {BF16: Model, INT8: InBlocks}[kept]
    model, optimizer = trained_model(built, line, steps=2, of=of)
    save(model, optimizer, folder)
    model.train_by(optimizer, range(2, STEPS))
    found = [momenta(model, optimizer)]
    if ranks == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        found += [momenta(*trained_model(built, square, along, steps=STEPS, of=of)) for along in MESHES.values()]
    return found


@rounded
@pytest.mark.wide
@pytest.mark.parametrize("ranks", [2, 4])
def test_momenta_of_dtensors_have_the_bits_of_one_rank(ranks, kept, tmp_path):
    of = {BF16: Model, INT8: InBlocks}[kept]
    expected = momenta(*trained_model(built, steps=STEPS, of=of))
    for of_rank in run_ranks(of_dtensors, ranks, tmp_path, kept):
        for of_mesh in of_rank:
            for name, momentum in of_mesh.items():
                assert torch.equal(momentum, expected[name]), name

    # and one rank goes on from the checkpoint of several
    model = of()
    optimizer = built(model)
    load(model, optimizer, tmp_path)
    assert optimizer.param_groups[0]["momentum_steps"] == 2
    model.train_by(optimizer, range(2, STEPS))
    for name, momentum in momenta(model, optimizer).items():
        assert torch.equal(momentum, expected[name]), name


def of_cut_blocks(rank, ranks):
    """What is refused where ranks share a block."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    shard, turned = placed(torch.ones(4, 128), sharded(1), rank, ranks), nn.Parameter(torch.ones(300, 4))
    turned = nn.Parameter(distribute_tensor(turned.detach(), mesh, [Shard(0)], src_data_rank=None))
    turned.logical_matrices = transposed()
    settings = {"momentum_dtype": INT8, "pg_collection": groups_of(ranks)}
    return [message_of(partial(TensorParallelMuon, [("w", p)], **settings)) for p in (shard, turned)]


def test_ranks_that_share_a_block_refuse_it():
    for found in run_ranks(of_cut_blocks, 2):
        for message, where in zip(
            found, ("(4, 128), is cut at column 64", "(4, 300), is cut at column 150"), strict=True
        ):
            assert f"w, a matrix {where}, and a momentum in int8 has" in message
            assert "at multiples of 128, or take momentum_dtype bf16" in message
