"""State of DTensors: torch's distributed checkpoints save all of it, and load it on any number of ranks."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron_eopt import TensorParallelAdaptiveMuon
from megatron_eopt.matrices import experts
from megatron_eopt.optimizers.spectron import Spectron, factor_pairs
from megatron_eopt.step.parameters import local
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import marked, message_of, whole
from tests.optimizers import field
from tests.plain.made import assert_same

pytestmark = pytest.mark.wide

STEPS = 4
FULL = StateDictOptions(full_state_dict=True)
QKV = [4, 2, 2]

# On four ranks rows and columns are cut unevenly, and one rank holds nothing of "few" and "narrow".
CASES = {
    "tall_by_rows": ((10, 7), Shard(0)),
    "tall_by_columns": ((10, 7), Shard(1)),
    "wide_by_rows": ((7, 10), Shard(0)),
    "wide_by_columns": ((7, 10), Shard(1)),
    "few": ((3, 9), Shard(0)),
    "narrow": ((9, 3), Shard(1)),
    "fused_by_rows": ((32, 6), Shard(0)),
    "fused_by_columns": ((16, 10), Shard(1)),
    "replicated": ((8, 6), Replicate()),
}
PAIRS = {
    "up": ((10, 3), Shard(0)),
    "down": ((7, 3), Replicate()),
    "up_transposed": ((3, 9), Shard(1)),
    "other": ((6, 3), Shard(0)),
}
ALL = {**CASES, **PAIRS}


class Model(nn.Module):
    """Parameters as FSDP2 leaves them, or whole ones where there is no mesh."""

    def __init__(self, mesh=None):
        super().__init__()
        self.mesh = mesh
        generator = torch.Generator().manual_seed(0)
        for name, (shape, placement) in ALL.items():
            parameter = nn.Parameter(self.spread(torch.randn(shape, generator=generator), placement))
            if name.startswith("fused"):
                parameter.qkv_split_shapes = QKV
            self.register_parameter(name, parameter)

    def spread(self, x, placement):
        return x if self.mesh is None else distribute_tensor(x, self.mesh, [placement], src_data_rank=None)

    def train_by(self, optimizer, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(1 + step)
            for name, (shape, placement) in ALL.items():
                self.get_parameter(name).grad = self.spread(torch.randn(shape, generator=generator), placement)
            optimizer.step()
        optimizer.zero_grad()

    def whole(self):
        return {name: whole(p) for name, p in self.named_parameters()}


SPLIT = {"split_qkv": True, "is_qkv_fn": lambda p: hasattr(p, "qkv_split_shapes"), "fp32_matmul_prec": "highest"}


def spectron(model):
    matrices = [model.get_parameter(name) for name in CASES]
    pairs = [model.get_parameter(name) for name in PAIRS]
    groups = [{"params": matrices}, factor_pairs(zip(pairs[::2], pairs[1::2], strict=True), lr=0.1)]
    return Spectron(groups, lr=0.05, rank=2, momentum_beta=0.8, tp_mode="auto", **SPLIT)


def full_state(model, optimizer):
    # what is whole on every rank is given out as it is, and training goes on
    return copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL)["state"])


def save(model, optimizer, folder):
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def load(model, optimizer, folder):
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def trained(mesh=None, steps=STEPS):
    made = Model(mesh)
    optimizer = spectron(made)
    made.train_by(optimizer, range(steps))
    return made, optimizer


def on_four(rank, ranks, folder):
    """Save after two steps; each rank's part of the state is what its description says."""
    mesh = init_device_mesh("cpu", (4,))
    model, optimizer = trained(mesh, steps=2)
    for parameter, state in optimizer.state.items():
        for tensor in optimizer.state_tensors(parameter):
            if tensor.dims is not None:
                part = tuple(local(state[tensor.key]).shape)
                assert part == tensor.local_shape(optimizer.matrix_layouts(parameter)), tensor
    save(model, optimizer, folder / "4")
    return full_state(model, optimizer), refused(mesh, init_device_mesh("cpu", (2, 2)))


def refused(line, square):
    def parameter(mesh, placements, shape=(16, 8), **attributes):
        return marked(distribute_tensor(torch.ones(shape), mesh, placements, src_data_rank=None), **attributes)

    fused = parameter(line, [Shard(0)], qkv_split_shapes=QKV)
    both = parameter(square, [Shard(0), Shard(1)])
    stack = parameter(line, [Shard(0)], (3, 8, 6), logical_matrices=experts(3))
    same = nn.Parameter(torch.ones(16, 8))
    plain, cut = (Spectron([("weight", p)], rank=2) for p in (same, parameter(line, [Shard(0)])))
    plain.init_state()
    cut.init_state()
    return [
        message_of(call)
        for call in (
            lambda: Spectron([("fused", fused)], rank=2, **SPLIT),
            lambda: TensorParallelAdaptiveMuon([("fused", fused)], moment2_method="normuon", **SPLIT),
            lambda: Spectron([("both", both)], rank=2),
            lambda: TensorParallelAdaptiveMuon([("both", both)], moment2_method="normuon"),
            lambda: cut.load_state_dict(plain.state_dict()),
            lambda: plain.load_state_dict(cut.state_dict()),
            lambda: Spectron([("experts", stack)], rank=2),
        )
    ]


def on_two(rank, ranks, folder):
    """What four ranks saved, and that after a step, which is saved again."""
    mesh = init_device_mesh("cpu", (2,))
    model = Model(mesh)
    optimizer = spectron(model)
    load(model, optimizer, folder / "4")
    loaded = full_state(model, optimizer)
    model.train_by(optimizer, range(2, 3))
    save(model, optimizer, folder / "2")
    saved, again = full_state(model, optimizer), spectron(model)
    set_optimizer_state_dict(model, again, get_optimizer_state_dict(model, optimizer, options=FULL), options=FULL)
    assert_same(full_state(model, again), saved)
    return loaded, saved


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What four ranks found, and where they saved."""
    folder = tmp_path_factory.mktemp("saved")
    return run_ranks(on_four, 4, folder), folder


def test_what_four_ranks_saved_goes_on_with_two_and_one(ran):
    four, folder = ran
    straight, _ = trained()
    two = run_ranks(on_two, 2, folder)
    assert_same([loaded for loaded, _ in two], [four[0][0]] * 2)
    model = Model()
    optimizer = spectron(model)
    load(model, optimizer, folder / "2")
    assert_same(full_state(model, optimizer), two[0][1])
    model.train_by(optimizer, range(3, STEPS))
    for key, p in model.whole().items():
        field.assert_close(p, straight.get_parameter(key).detach(), what=key)


def test_what_cannot_be_saved_is_refused_on_every_rank(ran):
    put = "(16, 2), of which placements (Shard(dim=0),) put (4, 2) on this rank"
    for _, messages in ran[0]:
        for message, key in zip(messages, ("factor_A_0", "moment2_buffer_0"), strict=False):
            assert "fused is a DTensor of shape (16, 8) with placements (Shard(dim=0),), which cut its" in message
            assert f"no placement says that of '{key}', and it could not" in message
        assert "Spectron takes matrices that are cut along their rows or along their columns, but both" in messages[2]
        assert "need one of them whole, but both, a matrix (16, 8), is cut along both" in messages[3]
        assert f"'factor_A' has shape (16, 2), expected {put} for the parameter of shape (16, 8)" in messages[4]
        assert "load a whole state into DTensors by torch's set_optimizer_state_dict" in messages[4]
        assert f"'factor_A' has shape {put}, expected (16, 2) for" in messages[5]
        assert "experts is a DTensor of shape (3, 8, 6) with placements (Shard(dim=0),), which cut its" in messages[6]
