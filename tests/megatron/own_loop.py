"""A training loop of a user's own, on Megatron-Core without megatron.training: run by test_layouts.py on one rank."""

import pytest
import torch

import megatron_eopt
import megatron_eopt.cpu

megatron_eopt.cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402


def main():
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), 64, 16, position_embedding_type="rope")
    optimizer = megatron_eopt.get_megatron_optimizer(
        OptimizerConfig(optimizer="muon", lr=1e-2, muon_extra_scale_factor=0.2), [model]
    )
    tokens = torch.arange(16).expand(2, 16)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(tokens, tokens, torch.ones(1, 1, 16, 16).tril() < 0.5, labels=tokens).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses
    with pytest.raises(ValueError, match=r"unknown optimizer 'mun' \(did you mean 'muon'\?\)"):
        megatron_eopt.get_megatron_optimizer(OptimizerConfig(optimizer="mun", lr=1e-2), [model])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
