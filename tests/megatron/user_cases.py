"""pretrain.py after something that users do, or that breaks, was done to Megatron. Run by the tests of users' cases.

DO names functions below, separated by blanks; what follows a colon is the function's argument.
"""

import json
import math
import os
import re
import runpy
from pathlib import Path
from unittest import mock

import megatron.core.optimizer as core_optimizer
import megatron.training.training as training
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_tensor_model_parallel_region,
)
from torch import nn

from megatron_eopt.megatron.qk_clip import attentions
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.routing.selectors import unwrapped
from tests.megatron.faulty import replaced

_steps = []  # one entry for each step of the optimizer that is over


def freeze(pattern):
    """Parameters whose names have the pattern require no gradient, as soon as the model is there."""

    @replaced(GPTModel, "__init__")
    def init(real, self, *args, **kwargs):
        real(self, *args, **kwargs)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(re.search(pattern, name) is None)


def unused():
    """The model has a linear layer and a vector that its forward pass leaves out."""

    @replaced(GPTModel, "__init__")
    def init(real, self, *args, **kwargs):
        real(self, *args, **kwargs)
        self.aside = nn.Linear(8, 4)


def mamba():
    """A mixer of Megatron's Mamba layers beside the decoder's layers, whose input projection the loss depends on.

    What follows the projection needs kernels for a GPU, so it is left out.
    """
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    mamba_mixer.HAVE_MAMBA_SSM = mamba_mixer.HAVE_EINOPS = mamba_context_parallel.HAVE_EINOPS = True
    linears = mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)

    @replaced(GPTModel, "__init__")
    def init(real, self, *args, **kwargs):
        real(self, *args, **kwargs)
        config, groups = self.config, self.pg_collection
        config.mamba_state_dim, config.mamba_head_dim, config.mamba_num_groups = 8, 16, 2
        config.mamba_num_heads = 8
        how = {"rmsnorm": False, "layer_number": 1, "pg_collection": groups}
        self.decoder.mixer = mamba_mixer.MambaMixer(config, linears, config.hidden_size, **how)

    @replaced(GPTModel, "forward")
    def forward(real, self, tokens, *args, **kwargs):
        projected, _ = self.decoder.mixer.in_proj(self.embedding(tokens, None))
        projected = gather_from_tensor_model_parallel_region(projected)
        return real(self, tokens, *args, **kwargs) + projected.square().mean()


def forget_one():
    """Megatron leaves the last parameter out of the groups that it makes."""

    @replaced(core_optimizer, "_get_param_groups")
    def groups(real, *args):
        found = real(*args)
        found[-1]["params"].pop()
        return found


def update_twice():
    """Megatron puts Adam's first matrix into Muon's group, too."""

    @replaced(core_optimizer, "_get_param_groups")
    def groups(real, *args):
        found = real(*args)
        muons = next(group for group in found if "optimizer" not in group)
        adams = (parameter for group in found if group is not muons for parameter in group["params"])
        muons["params"].append(next(parameter for parameter in adams if parameter.ndim == 2))
        return found


def skip_a_matrix():
    """Muon passes over its first parameter in silence."""

    @replaced(TensorParallelMuon, "_inputs")
    def inputs(real, self, *args, **kwargs):
        stepping = [False, *self._stepping[1:]]
        with mock.patch.object(TensorParallelMuon, "_stepping", stepping):
            return real(self, *args, **kwargs)


def even_sinks():
    """Attention sinks begin with zero, and without random numbers, of which each number of ranks would take others."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    @replaced(DotProductAttention, "__init__")
    def init(real, self, *args, **kwargs):
        state = torch.get_rng_state()
        real(self, *args, **kwargs)
        torch.set_rng_state(state)
        torch.nn.init.zeros_(self.softmax_offset)


def multiply_loss(factor, only_in=None):
    """The loss is so many times larger, or nan; in all steps, or in one."""

    @replaced(GPTModel, "forward")
    def forward(real, *args, **kwargs):
        losses = real(*args, **kwargs)
        return losses * float(factor) if only_in in (None, str(_step())) else losses


def multiply_gradient(pattern, factor, only_in):
    """The gradients of parameters whose names have the pattern are so many times larger, or nan, in one step."""

    @replaced(GPTModel, "__init__")
    def init(real, self, *args, **kwargs):
        real(self, *args, **kwargs)
        for name, parameter in self.named_parameters():
            if re.search(pattern, name):
                parameter.register_hook(lambda gradient: gradient * (float(factor) if only_in == str(_step()) else 1))


def show_logits():
    """The largest logit of each head is printed before every clip."""

    @replaced(training, "clip_qk")
    def clip(real, model, **kwargs):
        paths = {module: unwrapped(path) for chunk in model for path, module in chunk.named_modules()}
        for module in attentions(model):
            # of a pipeline stage the layers are numbered from 0, those of multi-token prediction are all on the last
            name = re.sub(r"^decoder.layers.\d+", f"decoder.layers.{module.layer_number - 1}", paths[module])
            said = {"name": name, "logits": module.core_attention.current_max_attn_logits.tolist()}
            print(f"\nlargest {json.dumps(said)}", flush=True)
        return real(model, **kwargs)


def coupled_decay():
    """Adam's weight decay is part of the gradient; Megatron has a setting for that, and no flag."""

    @replaced(training, "get_megatron_optimizer_config")
    def config(real, args):
        found, overrides = real(args)
        found.decoupled_weight_decay = False
        return found, overrides


def skip_above(norm):
    """Megatron leaves out the steps with a larger norm of the gradient; it has no flag for that."""

    @replaced(training, "get_megatron_optimizer_config")
    def config(real, args):
        found, overrides = real(args)
        found.grad_norm_skip_threshold = float(norm)
        return found, overrides


def _step():
    """The number of the step that is made, from 1."""
    return len(_steps) + 1


def main():
    for each in os.environ["DO"].split():
        name, *arguments = each.split(":")
        globals()[name](*arguments)

    @replaced(ChainedOptimizer, "step")
    def step(real, self):
        updated, norm, zeros = real(self)
        _steps.append(True)
        return updated, math.nan if norm is None else norm, zeros  # None: of a step that was not finite

    runpy.run_path(str(Path(__file__).with_name("pretrain.py")), run_name="__main__")


if __name__ == "__main__":
    main()
