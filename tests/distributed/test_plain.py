"""Plain torch: every registered optimizer trains under FSDP2 as one process does."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import cross_entropy

from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.matrices import experts
from megatron_eopt.optimizers.with_adamw import Muon
from megatron_eopt.plain import OptimizerConfig, build_optimizer
from megatron_eopt.settings.presets import TO_BEGIN_WITH
from tests.contracts.test_hugging_face import Experts, GptOssExperts
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import message_of, whole
from tests.optimizers.family import options

pytestmark = pytest.mark.wide

VOCABULARY, WIDTH, INNER = 17, 12, 20
STEPS = 6
NAMES = ["adamw", *OPTIMIZERS]
CONVOLUTIONS = ("muon", "soap", "dion2")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    """An embedding, two blocks and an output layer, of lengths that two ranks cannot halve."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def sharded(mesh, model=None):
    model = model or Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def optimizer_of(model, name, **further):
    # the longer side of a gradient has more directions than the gradient, and which basis these get is up to rounding
    settings = options(name, fp32_matmul_prec="highest", max_dim=WIDTH, **further)
    return build_optimizer(model, name, lr=3e-3 * TO_BEGIN_WITH[name].rate, options=settings)


def batch(step):
    tokens = torch.randint(VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(step))
    return tokens, (tokens * 3 + 1) % VOCABULARY


def train(model, optimizer, steps):
    """The losses over all ranks, each of which has its share of the batch."""
    losses = []
    for step in steps:
        tokens, targets = batch(step)
        if dist.is_initialized():
            tokens, targets = (x.chunk(dist.get_world_size())[dist.get_rank()] for x in (tokens, targets))
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(mean.item())
    return losses


def on_ranks(rank, ranks, names):
    mesh, losses = init_device_mesh("cpu", (ranks,)), {}
    for name in names:
        model = sharded(mesh)
        losses[name] = train(model, optimizer_of(model, name), range(STEPS))
    return losses


def of_stacks(rank, ranks):
    """Losses with convolutions, and with experts, on two ranks and on one; and what is refused of both."""
    mesh = init_device_mesh("cpu", (ranks,))
    convolutions = [(train_convolutions(name, mesh), train_convolutions(name, None)) for name in CONVOLUTIONS]
    return convolutions, (train_experts(mesh), train_experts(None)), refusal(mesh)


def losses_of(optimizer, loss_of):
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_convolutions(name, mesh):
    """A convolution that two ranks cannot halve, between two layers, on the same images everywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 7, 2), nn.ReLU(), nn.Flatten(), nn.Linear(7, 9))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model, name)
    images = torch.randn(8, 3, 4, 4)
    losses = losses_of(optimizer, lambda: cross_entropy(model(images), torch.arange(8)))
    assert optimizer.matrices.matrices_per_step == 2
    return losses


def train_experts(mesh):
    """Three experts a layer, on the same tokens everywhere: two ranks have two and one of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Experts(), GptOssExperts(), nn.Linear(8, 8))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(model, OptimizerConfig(name="muon", lr=0.02, options={"fp32_matmul_prec": "highest"}))
    tokens = torch.randn(16, 8)
    losses = losses_of(optimizer, lambda: (model(tokens) - tokens.roll(1, 1)).square().mean())
    plan = optimizer.matrices.prepare().plan
    of_experts = {bucket.scheme for bucket in plan.buckets if "expert" in plan.one_of(bucket).name}
    assert of_experts == {"local" if mesh is None else "owner"}  # two ranks have two and one: the busier one hands over
    return losses, [whole(p) for p in model.parameters()]


def refusal(mesh):
    """What Muon says of a convolution whose kernels are cut, and of experts that are."""
    stack = nn.Parameter(distribute_tensor(torch.ones(3, 4, 6), mesh, [Shard(1)], src_data_rank=None))
    stack.logical_matrices = experts(3)
    of_stack = message_of(lambda: Muon([stack], []))
    images = nn.Parameter(distribute_tensor(torch.ones(4, 4, 3, 3), mesh, [Shard(2)], src_data_rank=None))
    return message_of(lambda: Muon([images], [])), of_stack


@pytest.fixture(scope="module")
def runs(selected):
    """Losses of one process, of four ranks and of two."""
    names, alone = selected("name"), {}
    for name in names:
        model = Model()
        alone[name] = train(model, optimizer_of(model, name), range(STEPS))
    return alone, *(run_ranks(on_ranks, ranks, names)[0] for ranks in (4, 2))


@pytest.mark.parametrize("name", NAMES)
def test_fsdp2_trains_to_the_losses_of_one_process(runs, name):
    alone, four, two = (losses[name] for losses in runs)
    assert four == pytest.approx(alone, rel=1e-5)
    assert two == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0]


def test_convolutions_and_experts_train_as_on_one_process():
    """Rows of a convolution times the rest are a matrix, and experts stay where they are."""
    convolutions, experts, refused = run_ranks(of_stacks, 2)[0]
    (of_experts, found), (losses, expected) = experts
    for sharded_losses, of_one in (*convolutions, (of_experts, losses)):
        assert sharded_losses == pytest.approx(of_one, rel=1e-5)
        assert of_one[-1] < of_one[0]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert "a rank holds several separate parts of the matrix (4, 36)" in refused[0]
    assert "a stack of shape (3, 4, 6) with placements (Shard(dim=1),), which may cut its matrices" in refused[1]


def under_fsdp1(rank, world_size):
    """What is said of a model that FSDP1 wraps before the optimizer is built, and after."""
    said = {}
    for name in NAMES:
        wrapped = FullyShardedDataParallel(Model(), use_orig_params=True, device_id=torch.device("cpu"))
        model = Model()
        optimizer = optimizer_of(model, name)
        later = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        before = message_of(partial(optimizer_of, wrapped, name))
        said[name] = before, message_of(partial(train, later, optimizer, range(1)))
    return said


def test_fsdp1_is_refused_before_and_after():
    for said in run_ranks(under_fsdp1, 2):
        for name, (before, after) in said.items():
            assert "take fully_shard (FSDP2)" in before
            row = OPTIMIZERS.get(name)
            if row is not None and row.owns == "matrices":
                assert "take fully_shard (FSDP2)" in after, name
            else:  # it works by entries, and so on shards as on the whole
                assert after is None, name
