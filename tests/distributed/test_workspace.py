"""A small workspace cuts a step into many chunks, and changes no update."""

import pytest
import torch

from megatron_eopt import Execution, MuonHyperball, PolarGrad, TensorParallelAdaptiveMuon, TensorParallelMuon
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, groups_of, placed, sharded

# rows, columns and the dimension that is cut; query groups of 8 + 4 + 4 rows are split
SHAPES = {"qkv": (64, 48, 0), "proj": (48, 48, 1), "fc1": (96, 48, 0), "fc2": (48, 96, 1), "router": (16, 48, None)}
LAYERS, STEPS = 3, 3
OPTIMIZERS = {
    "muon": TensorParallelMuon,
    "normuon": lambda *args, **settings: TensorParallelAdaptiveMuon(*args, moment2_method="normuon", **settings),
    "namo": lambda *args, **settings: TensorParallelAdaptiveMuon(*args, moment2_method="namo", **settings),
    "hyperball": MuonHyperball,
    "polargrad": PolarGrad,
}
CASES = [
    *(("muon", mode) for mode in ("duplicated", "owner", "gram", "distributed", "blockwise")),
    *((name, "owner") for name in OPTIMIZERS if name != "muon"),
]


def parameters_of(rank, ranks):
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for layer in range(LAYERS):
        for name, (rows, cols, dim) in SHAPES.items():
            x, *gradients = torch.randn(1 + STEPS, rows, cols, generator=generator)
            attributes = {} if dim is None else sharded(dim)
            parameter = placed(x, attributes | {"fused": name == "qkv"}, rank, ranks)
            parameters.append((f"{layer}.{name}", parameter, [cut(x, attributes, rank, ranks) for x in gradients]))
    return parameters


def stepped(make, rank, ranks, **settings):
    """Parameters, and the optimizer of them that made some steps."""
    named = parameters_of(rank, ranks)
    optimizer = make(
        [(each, parameter) for each, parameter, _ in named],
        lr=0.1,
        pg_collection=groups_of(),
        split_qkv=True,
        is_qkv_fn=lambda parameter: parameter.fused,
        qkv_split_shapes=(8, 4, 4),
        **settings,
    )
    for step in range(STEPS):
        for i, (_, parameter, gradients) in enumerate(named):
            parameter.grad = gradients[step].clone()
            if (step, i) == (1, 2):
                parameter.grad[0, 0] = torch.nan  # both ranks skip the step
            if (step, i) == (2, 5):
                parameter.grad = None
        optimizer.step()
    return [parameter for _, parameter, _ in named], optimizer


def in_chunks(name, mode, workspace, rank, ranks):
    """The parameters after some steps, and the number of chunks."""
    settings = {"tp_mode": mode, "execution": Execution(workspace=workspace), "fp32_matmul_prec": "highest"}
    parameters, optimizer = stepped(OPTIMIZERS[name], rank, ranks, **settings)
    return [parameter.detach() for parameter in parameters], 1 + max(b.chunk for b in optimizer.engine.plan.buckets)


def run(rank, ranks, cases):
    sizes = (1, 2**17, 2**31)
    return {(*case, size): in_chunks(*case, size, rank, ranks) for case in cases for size in sizes}


@pytest.fixture(scope="module")
def found(selected):
    return run_ranks(run, 2, selected("case"))


@pytest.mark.parametrize("case", CASES)
def test_a_small_workspace_changes_no_update(found, case):
    for of_rank in found:
        (whole, one), (some, few), (each, many) = (of_rank[*case, size] for size in (2**31, 2**17, 1))
        assert one == 1 < few < many == LAYERS * len(SHAPES)
        for expected, *others in zip(whole, some, each, strict=True):
            for other in others:
                torch.testing.assert_close(other, expected, rtol=1e-5, atol=1e-6)
