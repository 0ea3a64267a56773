"""Frameworks above Megatron-Core: what their calls of it build, and their own builders where they are installed.

``docs/frameworks.md`` says which release of which framework makes each of these calls. A script runs in a process of
its own, on one rank.
"""

import importlib.util

import pytest

from tests.contracts.scripts import run_script

MODEL = """
import dataclasses
import torch
import megatron_eopt
from tests.megatron import small_gpt
from tests.megatron.small_gpt import steps
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.muon import get_megatron_muon_optimizer
from megatron.core.transformer.module import Float16Module

small_gpt.begin()

def make_model(seed=1):
    torch.manual_seed(seed)
    model = small_gpt.gpt(bf16=True, params_dtype=torch.bfloat16)
    wrapped = DistributedDataParallelConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=True)
    return DistributedDataParallel(model.config, wrapped, Float16Module(model.config, model))

def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

def trains(model, optimizer):
    before = weights(model)
    losses = steps(model, optimizer)
    assert losses[-1] < losses[0], losses
    assert all(not torch.equal(before[name], value) for name, value in weights(model).items())

def muon_of(optimizer):
    found = [each.optimizer for each in optimizer.chained_optimizers]
    assert [type(each) for each in found[:1]] == [megatron_eopt.TensorParallelMuon], found
    return found[0]
"""


def run(script, *folders, **more):
    run_script(MODEL + script, *folders, **more)


@pytest.mark.wide
def test_megatron_bridge_and_nemo_rl():
    """A config of a class of their own, made before or after activate(), and Megatron's old name of the builder."""
    run(
        """
@dataclasses.dataclass
class Early(OptimizerConfig):
    def __post_init__(self):
        pass

    def finalize(self):
        super().__post_init__()

megatron_eopt.activate()

@dataclasses.dataclass
class Late(OptimizerConfig):
    def __post_init__(self):
        pass

    def finalize(self):
        super().__post_init__()

for kind in (Early, Late):
    assert kind(optimizer="muon", lr=1e-2, muon_tp_mode="blockwise").muon_tp_mode == "blockwise"
    config = kind(optimizer="muon", lr=1e-2, min_lr=0.0, bf16=True, params_dtype=torch.bfloat16, muon_momentum=0.8)
    config.muon_preset = "match_adamw"
    config.finalize()
    model = make_model()
    optimizer = get_megatron_muon_optimizer(
        config=config,
        model_chunks=[model],
        config_overrides=get_standard_config_overrides(config=config),
        use_gloo_process_groups=False,
        layer_wise_distributed_optimizer=False,
        pg_collection=None,
    )
    muon = muon_of(optimizer)
    assert muon.tp_mode == "auto"
    assert {group["momentum"] for group in muon.param_groups} == {0.8}
    assert {group["extra_scale_factor"] for group in muon.param_groups} == {0.2}
    trains(model, optimizer)

assert Early(optimizer="muon", lr=1e-2, muon_preset="match_adamw").muon_preset == "match_adamw"
config = Late(optimizer="adaptive_muon", lr=1e-2, min_lr=0.0, bf16=True, params_dtype=torch.bfloat16)
optimizer = get_megatron_muon_optimizer(config=config, model_chunks=[make_model()], config_overrides=None)
assert type(optimizer.chained_optimizers[0].optimizer) is megatron_eopt.TensorParallelAdaptiveMuon
"""
    )


@pytest.mark.wide
def test_nemo_rl_moves_the_state_to_the_host_and_back():
    """It replaces every tensor of the state by a copy elsewhere, and later by one on the GPU."""
    run(
        """
megatron_eopt.activate()
config = OptimizerConfig(optimizer="muon", lr=1e-2, min_lr=0.0, bf16=True, params_dtype=torch.bfloat16)
models = [make_model(), make_model()]
optimizers = [get_megatron_optimizer(config, [model]) for model in models]
for model, optimizer in zip(models, optimizers):
    steps(model, optimizer)
moved = 0
for _, state in optimizers[1].state.items():
    for key, value in state.items():
        if torch.is_tensor(value):
            state[key] = value.clone()
            value.fill_(float("nan"))
            moved += key == "momentum_buffer"
assert moved == 4, moved
assert steps(models[0], optimizers[0]) == steps(models[1], optimizers[1])
a, b = weights(models[0]), weights(models[1])
assert all(torch.equal(a[name], b[name]) for name in a)
"""
    )


VERL = """
from megatron.core.optimizer import get_megatron_optimizer as native

def named_by_verl(**more):
    return OptimizerConfig(
        optimizer="muon", lr=1e-2, min_lr=0.0, clip_grad=1.0, weight_decay=0.01, use_distributed_optimizer=False,
        use_layer_wise_distributed_optimizer=False, muon_momentum=0.95, muon_nesterov=False, muon_split_qkv=True,
        muon_scale_mode="spectral", muon_coefficient_type="quintic", muon_num_ns_steps=5,
        muon_fp32_matmul_prec="medium", muon_extra_scale_factor=1.0, muon_scalar_optimizer="adam", bf16=True,
        params_dtype=torch.bfloat16, **{"muon_tp_mode": "blockwise", **more},
    )
megatron_eopt.activate()
"""


@pytest.mark.wide
def test_verl(tmp_path):
    """Every setting by name, ours among them; its state is saved and loaded without the model."""
    overrides = tmp_path / "overrides.yaml"
    overrides.write_text("- select: linear_fc2.weight\n  optimizer: adaptive_muon\n")
    run(
        VERL
        + f"""
assert muon_of(native(config=named_by_verl(), model_chunks=[make_model()])).tp_mode == "blockwise"
try:
    named_by_verl(muon_prest="match_adamw")
except TypeError as error:
    assert "muon_prest" in str(error)
else:
    raise AssertionError("a mistyped setting was taken")

config = named_by_verl(
    muon_tp_mode="auto", muon_preset="match_adamw", optimizer_overrides={str(overrides)!r}, matrix_lr=2e-2
)
model = make_model()
optimizer = native(config=config, model_chunks=[model])
muon = muon_of(optimizer)
assert muon.tp_mode == "auto"
assert {{(group["extra_scale_factor"], group["max_lr"]) for group in muon.param_groups}} == {{(0.2, 2e-2)}}
names = [type(each.optimizer).__name__ for each in optimizer.chained_optimizers]
assert sorted(names) == ["AdamW", "TensorParallelAdaptiveMuon", "TensorParallelMuon"], names
trains(model, optimizer)

metadata = {{"singleton_local_shards": False, "chained_optim_avoid_prefix": True}}
def request(model, optimizer, is_loading):
    of_model = {{"model": model.module.sharded_state_dict(metadata=dict(metadata))}}
    return {{"optimizer": optimizer.sharded_state_dict(of_model, is_loading=is_loading, metadata=dict(metadata))}}
folder = {str(tmp_path / "saved")!r}
import os
os.mkdir(folder)
dist_checkpointing.save(request(model, optimizer, False), folder)
other = make_model(seed=2)
other.load_state_dict(model.state_dict())
resumed = native(config=config, model_chunks=[other])
resumed.load_state_dict(dist_checkpointing.load(request(other, resumed, True), folder)["optimizer"])
assert steps(model, optimizer) == steps(other, resumed)
"""
    )


@pytest.mark.wide
def test_what_verl_and_ms_swift_take_to_the_host():
    """They know Adam's moments by their names; of ours they find none, and say nothing."""
    run(
        VERL
        + """
optimizer = native(config=named_by_verl(), model_chunks=[model := make_model()])
steps(model, optimizer)
kept, taken = [], []
for each in optimizer.chained_optimizers:
    assert not hasattr(each, "shard_fp32_from_float16_groups")
    for state in each.optimizer.state.values():
        for key, value in state.items():
            if torch.is_tensor(value) and value.dim() > 0:
                (taken if key in ("exp_avg", "exp_avg_sq", "master_param") else kept).append(key)
assert set(taken) == {"exp_avg", "exp_avg_sq"}, taken
assert kept == ["momentum_buffer"] * 4, kept
"""
    )


@pytest.mark.wide
def test_ms_swift():
    """Every field of Megatron's config that its arguments have; a learning rate of Muon's by Megatron's own key."""
    run(
        """
from types import SimpleNamespace
from megatron.core.optimizer import AdamOptimizerConfig, ParamKey, ParamPredicate
from megatron.core.optimizer.layer_wise_optimizer import is_managed_by_layer_wise_optimizer
megatron_eopt.activate()
args = SimpleNamespace(
    optimizer="muon", lr=1e-2, min_lr=0.0, weight_decay=0.1, bf16=True, params_dtype=torch.bfloat16, muon_momentum=0.9,
    muon_nesterov=True, muon_tp_mode="distributed", use_distributed_optimizer=False, muon_preset="match_adamw",
)
fields = dataclasses.fields(AdamOptimizerConfig)
config = AdamOptimizerConfig(**{field.name: getattr(args, field.name) for field in fields if hasattr(args, field.name)})
overrides = get_standard_config_overrides(config)
matrices = ParamPredicate(name="muon_managed_matrix", fn=is_managed_by_layer_wise_optimizer)
overrides[ParamKey(predicate=matrices)] = {"max_lr": 3e-2, "min_lr": 3e-3}
model = make_model()
optimizer = get_megatron_muon_optimizer(
    config, [model], layer_wise_distributed_optimizer=False, config_overrides=overrides
)
muon = muon_of(optimizer)
assert muon.tp_mode == "distributed"
assert {(group["max_lr"], group["min_lr"], group["nesterov"]) for group in muon.param_groups} == {(3e-2, 3e-3, True)}
assert muon.param_groups[0]["extra_scale_factor"] == 1.0  # a flag of ours, which is no field
assert {group["max_lr"] for group in optimizer.chained_optimizers[1].param_groups} == {1e-2}
trains(model, optimizer)
"""
    )


INSTALLED = all(importlib.util.find_spec(name) for name in ("verl", "ray", "tensordict", "transformers"))


@pytest.mark.full
@pytest.mark.skipif(
    not INSTALLED,
    reason="needs verl itself: pip install --no-deps verl==0.9.1, then pip install ray 'tensordict<=0.10' "
    "'transformers<5.11' omegaconf hydra-core pandas codetiming torchdata",
)
def test_verls_own_builder(tmp_path):
    """verl imports a module of the user's that calls activate(), in every process that imports verl."""
    (tmp_path / "my_optimizers.py").write_text("import megatron_eopt\n\nmegatron_eopt.activate()\n")
    run(
        """
import verl.utils.megatron.optimizer as builder
from verl.utils.megatron_utils import load_megatron_optimizer, offload_megatron_optimizer
from verl.workers.config.optimizer import McoreOptimizerConfig

ours = {"muon_tp_mode": "auto", "muon_preset": "match_adamw", "matrix_lr": 2e-2}
in_host_memory = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
more = {"lr": 1e-2, "lr_decay_steps": 100, "lr_warmup_init": 1e-3, "lr_warmup_steps": 1, "total_training_steps": 100}
for config in (
    McoreOptimizerConfig(optimizer="muon", override_optimizer_config=ours, **more),
    McoreOptimizerConfig(optimizer="muon", muon_tp_mode="auto", override_optimizer_config=in_host_memory, **more),
    McoreOptimizerConfig(optimizer="soap", **more),
):
    of_megatron = builder.init_megatron_optim_config(config, use_distributed_optimizer=False, bf16=True)
    model = make_model()
    optimizer = builder.get_megatron_optimizer(model=[model], config=of_megatron)
    first = optimizer.chained_optimizers[0].optimizer
    if config.optimizer == "soap":
        assert type(first) is megatron_eopt.SOAP, first
    else:
        assert muon_of(optimizer).tp_mode == "auto"
        named = config.override_optimizer_config == ours
        assert first.param_groups[0]["extra_scale_factor"] == (0.2 if named else 1.0)
        assert first.execution.offload_fraction == (0.0 if named else 1.0)
        largest = 2e-2 if named else 1e-2
        largest_rates = {group["max_lr"] for group in first.param_groups}
        assert largest_rates == {largest}, largest_rates
        scheduler = builder.get_megatron_optimizer_param_scheduler(optimizer, config)
        scheduler.step(1)
        rates = [group["lr"] for group in first.param_groups]
        assert all(abs(rate - largest) < 1e-9 for rate in rates), rates
    trains(model, optimizer)
    offload_megatron_optimizer(optimizer)
    load_megatron_optimizer(optimizer)
    trains(model, optimizer)
""",
        tmp_path,
        VERL_USE_EXTERNAL_MODULES="my_optimizers",
    )
