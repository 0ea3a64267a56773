"""A training loop of a user's own, on Megatron-Core without megatron.training: run by test_users.py on one rank."""

import copy

import pytest
import torch

import megatron_eopt
from tests.megatron import small_gpt
from tests.megatron.small_gpt import MASK, TOKENS

from megatron.core.optimizer import OptimizerConfig, _get_param_groups, get_standard_config_overrides  # isort: skip
from megatron.core.optimizer.optimizer_config import ParamKey  # isort: skip


def main():
    torch.distributed.init_process_group("nccl")
    small_gpt.begin()
    model, other = (small_gpt.gpt(layers=2) for _ in range(2))
    model.aside = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = megatron_eopt.get_megatron_optimizer(
        OptimizerConfig(optimizer="muon", lr=1e-2, muon_extra_scale_factor=0.2), [model]
    )
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(TOKENS, TOKENS, MASK, labels=TOKENS).mean() + 0 * model.aside.sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses
    overrides_from_python(other)
    rates_where_the_config_has_no_smallest_one(other)
    torch.distributed.destroy_process_group()


def overrides_from_python(model):
    """Megatron's keys and this package's beside one another, one of them for another optimizer."""
    config = OptimizerConfig(optimizer="muon", lr=1e-2, min_lr=1e-3, weight_decay=0.1)
    config.optimizer_overrides = {"layers.1.mlp.linear_fc1.weight": {"lr_mult": 0.5}}
    overrides = {
        **get_standard_config_overrides(config),
        ParamKey(name="*linear_proj.weight"): {"optimizer": "adam", "betas": (0.8, 0.9)},
        "shape:embedding": {"wd_mult": 0.5},
    }
    optimizer = megatron_eopt.get_megatron_optimizer(config, [model], overrides)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {
        names[id(parameter)]: (type(each.optimizer).__name__, group)
        for each in optimizer.chained_optimizers
        for group in each.optimizer.param_groups
        for parameter in group["params"]
    }
    owners = {name: owner for name, (owner, _) in groups.items()}
    assert {owners[f"decoder.layers.{i}.self_attention.linear_proj.weight"] for i in (0, 1)} == {"AdamW"}
    assert {owners[f"decoder.layers.{i}.self_attention.linear_qkv.weight"] for i in (0, 1)} == {"TensorParallelMuon"}
    assert groups["decoder.layers.0.self_attention.linear_proj.weight"][1]["betas"] == (0.8, 0.9)
    rates = {name: (group["max_lr"], group["min_lr"]) for name, (_, group) in groups.items()}
    assert rates["decoder.layers.1.mlp.linear_fc1.weight"] == (5e-3, 5e-4)
    assert rates["decoder.layers.0.mlp.linear_fc1.weight"] == (1e-2, 1e-3)
    decays = {name: group["wd_mult"] for name, (_, group) in groups.items()}
    assert decays["embedding.word_embeddings.weight"] == 0.5
    assert decays["decoder.final_layernorm.weight"] == 0.0
    with pytest.raises(ValueError, match=r"config_overrides\['linear_c1.weight'\]: select: .* did you mean"):
        megatron_eopt.get_megatron_optimizer(config, [model], {"linear_c1.weight": {"lr": 1.0}})


def rates_where_the_config_has_no_smallest_one(model):
    """Each way to a rate of its own, beside the groups that Megatron's own builder makes of the same."""
    rated, rate = {ParamKey(name="*.linear_fc1.weight"): {"max_lr": 5e-3}}, (5e-3, None)
    config = OptimizerConfig(optimizer="muon", lr=1e-2)
    assert config.min_lr is None
    name = {id(parameter): name for name, parameter in model.named_parameters()}

    def rates(groups):
        return {name[id(p)]: (group["max_lr"], group["min_lr"]) for group in groups for p in group["params"]}

    def ours(overrides=None, **settings):
        changed = copy.copy(config)
        vars(changed).update(settings)
        optimizer = megatron_eopt.get_megatron_optimizer(changed, [model], overrides)
        return rates(group for each in optimizer.chained_optimizers for group in each.optimizer.param_groups)

    theirs = rates(_get_param_groups([model], config, rated))
    assert theirs["decoder.layers.0.mlp.linear_fc1.weight"] == rate
    assert set(theirs.values()) == {rate, (1e-2, None)}
    assert ours(rated) == theirs
    assert ours(optimizer_overrides={"linear_fc1.weight": {"lr_mult": 0.5}}) == theirs
    matrices = {name for name, of_matrix in ours(matrix_lr=5e-3).items() if of_matrix == rate}
    assert matrices == {name for name in theirs if "linear" in name and name.endswith("weight")}


if __name__ == "__main__":
    main()
