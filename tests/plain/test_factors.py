"""build_optimizer for models that hold the factors of their weights, as in Spectron's paper."""

import copy

import pytest
import torch
from torch import nn

from megatron_eopt import Spectron, factor_pairs
from megatron_eopt.plain import OptimizerConfig, build_optimizer
from tests.plain.made import gradients, run

PAIRS = [("blocks.*.A", "blocks.*.B")]


class Factored(nn.Module):
    """A layer of low rank, ``x B A^T``."""

    def __init__(self, inputs, outputs, rank):
        super().__init__()
        self.A = nn.Parameter(torch.randn(outputs, rank) / rank**0.5)
        self.B = nn.Parameter(torch.randn(inputs, rank) / inputs**0.5)

    def forward(self, x):
        return x @ self.B @ self.A.T


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 12)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": Factored(12, 20, 3), "down": Factored(20, 12, 3)}) for _ in range(2)
        )
        self.mixer = nn.Linear(12, 12, bias=False)
        self.lm_head = nn.Linear(12, 11, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block["down"](block["up"](x).relu())
        return self.lm_head(self.mixer(x))


def build(model, pairs=PAIRS, **fields):
    config = OptimizerConfig(name="spectron", lr=0.05, spectron_factor_pairs=pairs, options={"rank": 3}, **fields)
    return build_optimizer(model, config)


def test_pairs_have_the_order_of_the_patterns():
    """By it the state of a checkpoint is numbered."""
    model = Model()
    pairs, *_ = build(model, [(f"blocks.*.{name}.A", f"blocks.*.{name}.B") for name in ("up", "down")]).param_groups
    expected = [getattr(block[name], of) for name in ("up", "down") for block in model.blocks for of in "AB"]
    assert [id(p) for p in pairs["params"]] == [id(p) for p in expected]


def test_factors_take_the_steps_of_spectrons_pairs():
    model = Model()
    other = copy.deepcopy(model)
    optimizer = build(model, weight_decay=0.3)
    layers = [layer for block in other.blocks for layer in block.values()]
    reference = Spectron([factor_pairs([(layer.A, layer.B) for layer in layers])], lr=0.05, weight_decay=0.3)
    params, others = list(model.parameters()), list(other.parameters())
    steps = gradients(params, 3)
    run(optimizer, params, steps)
    run(reference, others, steps)
    for layer, its in zip([x for block in model.blocks for x in block.values()], layers, strict=True):
        assert torch.equal(layer.A, its.A)
        assert torch.equal(layer.B, its.B)


def test_factors_that_are_linear_layers_are_paired_by_name():
    model = nn.ModuleDict(
        {f"layer_{i}": nn.ModuleDict({"down": nn.Linear(12, 3), "up": nn.Linear(3, 20)}) for i in range(2)}
    )
    (pairs,) = build(model, pairs=[("*.down.weight", "*.up.weight")]).matrices.param_groups
    expected = [model[f"layer_{i}"][which].weight for i in range(2) for which in ("down", "up")]
    assert all(p is q for p, q in zip(pairs["params"], expected, strict=True))
    one, *others = build(Model(), pairs=[("blocks.0.up.A", "blocks.0.up.B")]).matrices.param_groups
    assert len(one["params"]) == 2
    assert sum(len(group["params"]) for group in others) == 7


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("layers.*.A", "layers.*.B")], r"no parameter is called 'layers\.\*\.A', of which factors are to be paired"),
        ([("blocks.*.A", "blocks.*.C")], r"'blocks\.0\.up\.A' and 'blocks\.0\.up\.C' are no pair of factors"),
        ([("blocks.*", "blocks.*")], "are no pair of factors"),
        ([*PAIRS, ("*.0.up.B", "*.0.up.A")], r"'blocks\.0\.up\.B' and 'blocks\.0\.up\.A' are no pair"),
        ([("blocks.0.up.A", "lm_head.weight")], r"blocks\.0\.up\.A and lm_head\.weight are no factors of one weight"),
    ],
)
def test_patterns_that_do_not_pair_are_refused(pairs, message):
    with pytest.raises(ValueError, match=message):
        build(Model(), pairs=pairs)
