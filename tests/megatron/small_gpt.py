"""A small GPT of Megatron-Core's, without ``megatron.training``: for programs of their own, on the CPU."""

import atexit

import torch

import megatron_eopt.tools.cpu

megatron_eopt.tools.cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

TOKENS = torch.arange(16).expand(2, 16)
MASK = torch.ones(1, 1, 16, 16).tril() < 0.5


def begin(**sizes):
    """Groups of ranks, and random numbers, as Megatron's scripts make them; alone where nobody started ranks."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        # a thread of gloo that still runs at the end aborts the process
        atexit.register(torch.distributed.destroy_process_group)
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)


def gpt(layers=1, **settings):
    """The model, or this rank's stage of it."""
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **settings,
    )
    stages = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    layer = get_gpt_layer_local_spec(config.num_moe_experts)
    return GPTModel(config, layer, 64, 16, *stages, position_embedding_type="rope")


def steps(model, optimizer, count=3):
    """Train some steps; their losses."""
    losses = []
    for _ in range(count):
        if wrapped := hasattr(model, "finish_grad_sync"):
            model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(TOKENS, TOKENS, MASK, labels=TOKENS).float().mean()
        loss.backward()
        if wrapped:
            model.finish_grad_sync()
        assert optimizer.step()[0]
        losses.append(loss.item())
    return losses
