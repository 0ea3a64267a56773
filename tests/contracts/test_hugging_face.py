"""Models as users of Hugging Face have them: adapters by peft's names, GPT-2's Conv1D, and patterns of names."""

import logging

import pytest
import torch
from torch import nn

from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.matrices import concatenated, declare, undeclare
from megatron_eopt.plain import OptimizerConfig, build_optimizer
from tests.optimizers.family import options


def config(name="muon", **fields):
    return OptimizerConfig(name=name, lr=0.01, **fields)


def warnings_of(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def matrices_of(model, **fields):
    """Name -> shape."""
    found = build_optimizer(model, config(**fields)).matrices.proposed().plan.matrices
    return {each.name: each.shape for each in found}


class Adapted(nn.Module):
    """A linear layer with an adapter, by peft's names."""

    def __init__(self, rank):
        super().__init__()
        self.base_layer = nn.Linear(48, 48).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(48, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, 48, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize(("name", "rank", "told"), [("muon", 8, 1), ("muon", 4, 0), ("adamw", 8, 0), ("muon", 32, 0)])
def test_adapters_of_small_rank_get_one_line_of_advice(caplog, name, rank, told):
    build_optimizer(nn.Sequential(Adapted(rank), Adapted(rank)), config(name))
    messages = [message for message in warnings_of(caplog) if "adapters of small rank" in message]
    assert len(messages) == told
    for message in messages:
        assert message.startswith(
            "0.lora_A.default.weight, 0.lora_B.default.weight, 1.lora_A.default.weight, 1.lora_B."
        )
        assert "spectron_factor_pairs" in message
        assert "is_embedding_or_output_parameter" in message


def test_a_declaration_that_fits_no_name_is_told(caplog):
    """Of a compiled model, whose names have a prefix."""
    model = nn.Sequential()
    model.add_module("attention", nn.Linear(8, 24))
    pattern, right = "layers.*.attention.weigth", "attention.weight"
    for name in (pattern, right):
        declare(name, concatenated(q=8, k=8, v=8))
    build_optimizer(torch.compile(model), config())
    for name in (pattern, right):
        undeclare(name)
    message = warnings_of(caplog)[-1]
    assert message.startswith(f"{pattern!r} is declared, but matches no trainable parameter: the nearest names are ")
    assert "'attention.weight'" in message


class Conv1D(nn.Module):
    """As ``transformers.pytorch_utils`` has it: a linear layer whose weight is (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"


class Block(nn.Module):
    """The layers of GPT-2's block, and those of its cross attention."""

    def __init__(self, make):
        super().__init__()
        self.attn = nn.ModuleDict({"c_attn": make(24, 8), "c_proj": make(8, 8)})
        self.crossattention = nn.ModuleDict({"c_attn": make(16, 8), "q_attn": make(8, 8)})
        self.mlp = nn.ModuleDict({"c_fc": make(32, 8), "c_proj": make(8, 32)})

    def forward(self, x):
        q, k, v = self.attn["c_attn"](x).chunk(3, -1)
        x = x + self.attn["c_proj"](q * k + v)
        k, v = self.crossattention["c_attn"](x).chunk(2, -1)
        x = x + self.crossattention["q_attn"](x) * k + v
        return x + self.mlp["c_proj"](self.mlp["c_fc"](x).relu())


def alike():
    """A model of Conv1D, and the same one of Linear, its fused projections declared."""
    torch.manual_seed(0)
    theirs, ours = Block(Conv1D), Block(lambda out, of: nn.Linear(of, out))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            ours.get_parameter(name).copy_(parameter.t() if parameter.ndim == 2 else parameter)
    ours.attn["c_attn"].weight.logical_matrices = concatenated(q=8, k=8, v=8)
    ours.crossattention["c_attn"].weight.logical_matrices = concatenated(k=8, v=8)
    return theirs, ours


def trained(model, optimizer, steps=4):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(32, 8, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
    return {
        name: p.t() if isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D) else p
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("name", [row.name for row in OPTIMIZERS.values()])
def test_conv1d_is_read_as_the_linear_layer_that_it_is(name):
    theirs, ours = alike()
    found, wanted = (
        trained(model, build_optimizer(model, config(name, options=options(name, max_dim=16))))
        for model in (theirs, ours)
    )
    for key, parameter in wanted.items():
        torch.testing.assert_close(found[key], parameter, rtol=1e-4, atol=1e-5)


def test_the_matrices_of_conv1d_are_those_of_its_outputs(caplog):
    with caplog.at_level(logging.INFO):
        matrices = matrices_of(Block(Conv1D))
    assert {name: shape for name, shape in matrices.items() if name.startswith("attn")} == {
        "attn.c_attn.weight[q]": (8, 8),
        "attn.c_attn.weight[k]": (8, 8),
        "attn.c_attn.weight[v]": (8, 8),
        "attn.c_proj.weight": (8, 8),
    }
    assert matrices["mlp.c_fc.weight"] == (32, 8)
    assert "q, k, v one behind the other, (in, out)" in caplog.text


def test_a_long_conv1d_is_adamws():
    def shapes(*modules):
        return [*matrices_of(nn.ModuleList(modules)).values()]

    assert shapes(Conv1D(8, 8), Conv1D(4, 44)) == [(8, 8)]
    linear = type("Conv1D", (nn.Linear,), {})
    assert shapes(nn.Conv1d(8, 8, 1), nn.Conv1d(8, 16, 1), linear(8, 16)) == [(16, 8), (16, 8)]


class Experts(nn.Module):
    """As Hugging Face stacks experts of Qwen3-MoE, Mixtral and others: (out, in), gate over up."""

    transposed = by_turns = False

    def __init__(self, count=3, hidden=8, inner=6):
        super().__init__()
        up, down = (count, 2 * inner, hidden), (count, hidden, inner)
        if self.transposed:
            up, down = (count, hidden, 2 * inner), (count, inner, hidden)
        self.gate_up_proj = nn.Parameter(0.2 * torch.randn(up))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(count, 2 * inner))
        self.down_proj = nn.Parameter(0.2 * torch.randn(down))

    def matrices(self):
        """Gate, up and down of each expert, (out, in)."""
        found = []
        for gate_up, down in zip(self.gate_up_proj, self.down_proj, strict=True):
            if self.transposed:
                gate_up, down = gate_up.t(), down.t()
            gate, up = (gate_up[::2], gate_up[1::2]) if self.by_turns else gate_up.chunk(2)
            found.append((gate, up, down))
        return found

    def forward(self, x):
        """Every expert takes every token."""
        for (gate, up, down), bias in zip(self.matrices(), self.gate_up_proj_bias, strict=True):
            x = x + (x @ gate.t()).sigmoid() * (x @ up.t() + bias.chunk(2)[0]) @ down.t()
        return x


class Llama4TextExperts(Experts):
    transposed = True


class GptOssExperts(Experts):
    transposed = by_turns = True


class ShardedGptOss(GptOssExperts):
    """FSDP2 makes such a class."""


class Newer(Experts):
    """A class of later releases, which says how its rows lie."""

    by_turns = True
    is_concatenated = False


EXACT = {"fp32_matmul_prec": "highest", "coefficient_type": "polar_express", "scale_mode": "spectral"}


def assert_orthogonal(before, after, lr):
    """The update of a matrix is Muon's: an orthogonal factor, of entries of the size 1."""
    update = (before - after) / lr
    values = torch.linalg.svdvals(update) / max(update.shape) ** 0.5
    torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=0.05)


@pytest.mark.parametrize("kind", [Experts, Llama4TextExperts, ShardedGptOss, Newer])
def test_gate_up_and_down_of_each_expert_are_matrices(kind, caplog):
    torch.manual_seed(0)
    model = nn.ModuleList([kind(), kind()])
    before = [[x.detach().clone() for x in expert] for module in model for expert in module.matrices()]
    with caplog.at_level(logging.INFO):
        optimizer = build_optimizer(model, config(weight_decay=0.0, muon_ns_steps=10, options=EXACT))
    x = torch.randn(32, 8)
    (model[1](model[0](x)) - x.roll(1, 1)).square().mean().backward()
    optimizer.step()
    after = [expert for module in model for expert in module.matrices()]
    assert optimizer.matrices.matrices_per_step == 2 * 3 * 3
    for old, new in zip(before, after, strict=True):
        for matrix, moved in zip(old, new, strict=True):
            assert_orthogonal(matrix, moved.detach(), 0.01)
    of_adamw = [p for group in optimizer.adamw.param_groups for p in group["params"]]
    assert {id(p) for p in of_adamw} == {id(module.gate_up_proj_bias) for module in model}
    turns = "by turns" if kind.by_turns else "one behind the other"
    sides = ", (in, out)" if kind.transposed else ""
    assert f"\nexperts, gate, up {turns}{sides} " in caplog.text
    assert f"\nexperts{sides} " in caplog.text


class Apart(nn.Module):
    """Gate and up in parameters of their own; of Nemotron-H there is no gate."""

    def __init__(self, names, hidden=8, inner=6, is_transposed=False):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(3, inner, hidden)))
        self.down_proj = nn.Parameter(torch.randn(3, hidden, inner))
        if is_transposed:
            self.is_transposed = True


@pytest.mark.parametrize("names", [("gate_proj", "up_proj"), ("up_proj",)])
def test_gate_and_up_may_be_apart(names):
    found = matrices_of(Apart(names))
    assert len(found) == 3 * (len(names) + 1)
    assert found["up_proj[expert 2]"] == (6, 8)
    assert found["down_proj[expert 0]"] == (8, 6)
    # the shapes of (in, out) are the same: 6 rows in, 8 out
    assert matrices_of(Apart(names, is_transposed=True))["up_proj[expert 2]"] == (8, 6)


def test_other_parameters_of_these_names_are_none():
    model = nn.ModuleDict({"other": Experts(), "experts": Experts(), "linear": nn.Linear(8, 8)})
    model["other"].down_proj = nn.Parameter(torch.randn(3, 8, 5))
    del model["experts"].down_proj
    with_others = matrices_of(model, name="polargrad")
    assert with_others == {"linear.weight": (8, 8)}
