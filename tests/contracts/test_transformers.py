"""Mixtures of experts of transformers, small and with random weights: who has which parameter, and what it does."""

import logging

import pytest
import torch

from megatron_eopt.plain import OptimizerConfig, build_optimizer
from tests.contracts.test_hugging_face import EXACT, assert_orthogonal

pytestmark = pytest.mark.wide

LR = 0.01
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
MODELS = {
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 16},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
}
OF_ADAMW = ("embed_tokens.weight", "lm_head.weight", "bias")


def model_of(name):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name]})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def stacks_of(model):
    return [module for module in model.modules() if getattr(module, "gate_up_proj", None) is not None]


def matrices_of(stack):
    """Gate, up and down of each expert, as the class's own forward takes them."""
    found = []
    for gate_up, down in zip(stack.gate_up_proj, stack.down_proj, strict=True):
        if type(stack).__name__ == "GptOssExperts":
            found += [gate_up[:, ::2], gate_up[:, 1::2], down]
        else:
            found += [*gate_up.chunk(2), down]
    return [x.detach().clone() for x in found]


def losses_of(model, optimizer, steps):
    """The losses before steps, all with the same tokens."""
    tokens = torch.randint(64, (4, 24), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_matrices_and_train(name, caplog):
    model = model_of(name)
    with caplog.at_level(logging.INFO):
        optimizer = build_optimizer(
            model, OptimizerConfig(name="muon", lr=LR, weight_decay=0.0, muon_ns_steps=10, options=EXACT)
        )
    matrices = {p for group in optimizer.matrices.param_groups for p in group["params"]}
    hidden = {p for key, p in model.named_parameters() if p.ndim > 1 and not key.endswith(OF_ADAMW)}
    assert matrices == hidden
    stacks = stacks_of(model)
    assert len(stacks) == (1 if name == "DeepseekV3" else 2)
    but_embeddings = sum(p.numel() for key, p in model.named_parameters() if not key.endswith(OF_ADAMW[:2]))
    assert sum(p.numel() for p in matrices) > 0.9 * but_embeddings
    assert "experts, gate, up" in caplog.text

    before = [matrices_of(stack) for stack in stacks]
    first = losses_of(model, optimizer, 1)
    for old, stack in zip(before, stacks, strict=True):
        for matrix, moved in zip(old, matrices_of(stack), strict=True):
            assert_orthogonal(matrix, moved, LR)
    assert losses_of(model, optimizer, 9)[-1] < first[0]
