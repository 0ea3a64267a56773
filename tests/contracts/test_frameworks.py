"""Frameworks above Megatron-Core, by the blocks of ``docs/frameworks.md`` and the calls that follow them.

The page says which release of which framework makes each call. Where a framework is found, its own functions make them
too (``own``). A script runs in a process of its own.
"""

import importlib.util
import json

import pytest

from tests.contracts.scripts import block, run_script

MODEL = """
import dataclasses
import importlib
from types import SimpleNamespace
import torch
import megatron_eopt
from tests.contracts.scripts import block, own, words
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


def with_own(package):
    """Cases without a framework, and with its own functions."""
    found = importlib.util.find_spec(package)
    missing = pytest.mark.skipif(found is None, reason=f"needs {package}: of a wheel, pip install --no-deps will do")
    return pytest.mark.parametrize(
        "is_own", [pytest.param(False, id="calls"), pytest.param(True, id="own", marks=[pytest.mark.full, missing])]
    )


@pytest.fixture
def my_optimizers(tmp_path):
    """The folder of the file that the page tells users to write."""
    (tmp_path / "my_optimizers.py").write_text(block("Above Megatron-Core"))
    return tmp_path


@pytest.mark.wide
@with_own("megatron.bridge")
def test_megatron_bridge_and_nemo_rl(is_own):
    """A config of a class of its own, made before or after activate(), and Megatron's old name of the builder.

    NeMo-RL, which activates after its imports, gives the keys of a YAML file to the constructor.
    """
    run(
        f"OWN = {is_own}\n"
        + """
import yaml
from megatron.core.utils import get_model_config

def config_class():
    if OWN:
        around = {**globals(), "MCoreOptimizerConfig": OptimizerConfig, "dataclass": dataclasses.dataclass}
        return own("megatron.bridge", "training/config.py", "OptimizerConfig", **around)[0]

    @dataclasses.dataclass
    class Config(OptimizerConfig):
        def __post_init__(self):
            pass

        def finalize(self):
            super().__post_init__()

    return Config

def set_up(config, model):
    overrides = get_standard_config_overrides(config=config)
    if OWN:
        provider = SimpleNamespace(build_config_overrides=lambda context: overrides)
        around = {
            **globals(), "OptimizerConfigOverrideProvider": lambda: provider,
            "OptimizerConfigOverrideProviderContext": lambda *of: of, "_get_scheduler": lambda *of: None,
        }
        (set_up_optimizer,) = own("megatron.bridge", "training/optim.py", "setup_optimizer", **around)
        return set_up_optimizer(config, None, [model])[0]
    more = {"config_overrides": overrides, "use_gloo_process_groups": False, "pg_collection": None}
    if "muon" not in config.optimizer and "soap" not in config.optimizer:
        return get_megatron_optimizer(config=config, model_chunks=[model], **more)
    return get_megatron_muon_optimizer(
        config=config, model_chunks=[model], layer_wise_distributed_optimizer=False, **more
    )

base = {"lr": 1e-2, "min_lr": 0.0, "bf16": True, "params_dtype": torch.bfloat16}
Early = config_class()
megatron_eopt.activate()
for kind in (Early, config_class()):
    cfg = SimpleNamespace(optimizer=kind(optimizer="adam", muon_tp_mode="blockwise", muon_momentum=0.8, **base))
    cfg.ddp = SimpleNamespace(use_distributed_optimizer=True)
    exec(block("Megatron-Bridge"))
    assert not cfg.ddp.use_distributed_optimizer
    cfg.optimizer.finalize()
    model = make_model()
    optimizer = set_up(cfg.optimizer, model)
    muon = muon_of(optimizer)
    assert muon.tp_mode == "auto"
    assert {group["momentum"] for group in muon.param_groups} == {0.8}
    assert {group["extra_scale_factor"] for group in muon.param_groups} == {0.2}
    trains(model, optimizer)

for name, wanted in (("adaptive_muon", megatron_eopt.TensorParallelAdaptiveMuon), ("soap", megatron_eopt.SOAP)):
    optimizer = set_up(kind(optimizer=name, **base), make_model())
    assert type(optimizer.chained_optimizers[0].optimizer) is wanted

keys = yaml.safe_load(block("NeMo-RL"))["policy"]["megatron_cfg"]["optimizer"]
config = Early(**keys, **base)
config.finalize()
muon = muon_of(set_up(config, make_model()))
assert {group["extra_scale_factor"] for group in muon.param_groups} == {0.2}
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
import yaml
from megatron.core.optimizer import get_megatron_optimizer as native

def named_by_verl(**more):
    fields = {
        "optimizer": "muon", "lr": 1e-2, "min_lr": 0.0, "clip_grad": 1.0, "weight_decay": 0.01,
        "use_distributed_optimizer": False, "use_layer_wise_distributed_optimizer": False, "muon_momentum": 0.95,
        "muon_nesterov": False, "muon_split_qkv": True, "muon_scale_mode": "spectral",
        "muon_coefficient_type": "quintic", "muon_num_ns_steps": 5, "muon_tp_mode": "blockwise",
        "muon_fp32_matmul_prec": "medium", "muon_extra_scale_factor": 1.0, "muon_scalar_optimizer": "adam",
        "bf16": True, "params_dtype": torch.bfloat16,
    }
    return OptimizerConfig(**fields | more)

said = dict(word.split("=", 1) for word in words("verl") if "=" in word)
importlib.import_module(said.pop("VERL_USE_EXTERNAL_MODULES"))
of_page = {key.rpartition(".")[2]: yaml.safe_load(value) for key, value in said.items()}
"""


@pytest.mark.wide
def test_verl(my_optimizers, tmp_path):
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

config = named_by_verl(**of_page, optimizer_overrides={str(overrides)!r}, matrix_lr=2e-2)
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
""",
        my_optimizers,
    )


@pytest.mark.wide
def test_what_verl_and_ms_swift_take_to_the_host(my_optimizers):
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
""",
        my_optimizers,
    )


@pytest.mark.wide
@with_own("swift")
def test_ms_swift(is_own, my_optimizers):
    """Every field of Megatron's config that its arguments have; a learning rate of Muon's by Megatron's own key."""
    run(
        f"OWN = {is_own}\n"
        + """
import contextlib, logging, yaml
from megatron.core.optimizer import AdamOptimizerConfig, ParamKey, ParamPredicate
from megatron.core.optimizer.layer_wise_optimizer import is_managed_by_layer_wise_optimizer

flags = words("ms-swift")[2:]
said = {flag.removeprefix("--"): yaml.safe_load(value) for flag, value in zip(flags[::2], flags[1::2], strict=True)}
importlib.import_module(said.pop("external_plugins").removesuffix(".py"))
args = SimpleNamespace(
    **said, lr=1e-2, min_lr=0.0, weight_decay=0.1, bf16=True, params_dtype=torch.bfloat16,
    muon_preset="keller",  # does not reach the config
    use_distributed_optimizer=False, muon_nesterov=said["muon_use_nesterov"], muon_scalar_optimizer="adam",
    muon_lr=3e-2, muon_min_lr=3e-3, vit_lr=None, aligner_lr=None, apply_wd_to_qk_layernorm=False,
)
model = make_model()
if OWN:
    names = "get_optimizer_and_scheduler", "_needs_own_param_groups", "_get_muon_config_overrides"
    around = {
        **globals(), "mcore_016": True, "nullcontext": contextlib.nullcontext, "logger": logging.getLogger(),
        "get_optimizer_param_scheduler": lambda *of: None,
    }
    trainer = type("Trainer", (), dict(zip(names, own("swift", "megatron/trainers/base.py", *names, **around))))()
    trainer.args, trainer.wrapped_models = args, [model]
    optimizer, _ = trainer.get_optimizer_and_scheduler()
else:
    fields = [field.name for field in dataclasses.fields(AdamOptimizerConfig) if hasattr(args, field.name)]
    config = AdamOptimizerConfig(**{name: getattr(args, name) for name in fields})
    matrices = ParamKey(predicate=ParamPredicate(name="muon_managed_matrix", fn=is_managed_by_layer_wise_optimizer))
    overrides = get_standard_config_overrides(config)
    overrides[matrices] = {"max_lr": args.muon_lr, "min_lr": args.muon_min_lr}
    optimizer = get_megatron_muon_optimizer(
        config, [model], layer_wise_distributed_optimizer=False, config_overrides=overrides
    )
muon = muon_of(optimizer)
assert muon.tp_mode == "duplicated"
assert {(group["max_lr"], group["min_lr"], group["nesterov"]) for group in muon.param_groups} == {(3e-2, 3e-3, True)}
assert {group["extra_scale_factor"] for group in muon.param_groups} == {0.2}
assert muon.param_groups[0]["scale_mode"] == "spectral"
assert {group["max_lr"] for group in optimizer.chained_optimizers[1].param_groups} == {1e-2}
trains(model, optimizer)
""",
        my_optimizers,
    )


SLIME_PARSES = """
import logging, os, pickle, sys
import megatron_eopt.tools.cpu
megatron_eopt.tools.cpu.install()
import my_optimizers
from megatron.training.arguments import parse_args, validate_args
from tests.contracts.scripts import own, words
from tests.megatron.runs import SMALL_GPT

def of_slime(parser):
    parser.add_argument("--custom-megatron-init-path")
    parser.add_argument("--hf-checkpoint")
    parser.set_defaults(actor_num_nodes=1, actor_num_gpus_per_node=size, num_rollout=10, use_stateless_adam=False)
    return parser

for size in (1, 2):
    of_hugging_face = ["--hf-checkpoint", "model", "--load", "model"]
    sys.argv[1:] = [*words("slime")[2:], "--num-layers", "1", *SMALL_GPT, *of_hugging_face, "--sglang-tp", "8"]
    if OWN:
        path = "backends/megatron_utils/arguments.py"
        names = "megatron_parse_args", "validate_args", "_set_default_megatron_args"
        around = {
            "_megatron_parse_args": parse_args, "_megatron_validate_args": validate_args,
            "_vocab_size_with_padding": lambda size, args: 128, "logger": logging.getLogger(),
        }
        parse, validate, _ = own("slime", path, *names, **around)
        args = parse(of_slime, skip_hf_validate=True)
    else:
        args, validate = parse_args(extra_args_provider=of_slime, ignore_unknown_args=True), validate_args
        args.rank, args.world_size = 0, size
        args.use_distributed_optimizer = args.enable_gloo_process_groups = args.bf16 = True
    args.train_iters = 10
    validate(args)
    with open(os.path.join(os.environ["FOLDER"], f"{size}.pickle"), "wb") as file:
        pickle.dump(args, file)
"""

SLIME_TRAINS = """
import json, os, pickle
from contextlib import nullcontext
from megatron.core.enums import ModelType
from megatron.training.global_vars import set_args
from megatron.training.training import get_model

def provider(*given, **named):
    return small_gpt.gpt(bf16=True, params_dtype=torch.bfloat16)

rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
with open(os.path.join(os.environ["FOLDER"], f"{size}.pickle"), "rb") as file:
    args = pickle.load(file)
args.rank = rank
set_args(args)
module, _, function = args.custom_megatron_init_path.rpartition(".")
getattr(importlib.import_module(module), function)(args)

if OWN:
    around = {
        **globals(), "get_model_provider_func": lambda args, role: provider, "StatelessAdam": None,
        "get_optimizer_param_scheduler": lambda *of: None,
    }
    (set_up,) = own("slime", "backends/megatron_utils/model.py", "setup_model_and_optimizer", **around)
    (model,), optimizer, _ = set_up(args)
else:
    (model,) = get_model(provider, ModelType.encoder_or_decoder)
    fields = [field.name for field in dataclasses.fields(OptimizerConfig) if hasattr(args, field.name)]
    config = OptimizerConfig(**{name: getattr(args, name) for name in fields})
    config.timers = None
    optimizer = get_megatron_optimizer(
        config=config, model_chunks=[model], use_gloo_process_groups=args.enable_gloo_process_groups
    )
muon = muon_of(optimizer)
assert {(group["momentum"], group["nesterov"], group["extra_scale_factor"]) for group in muon.param_groups} == {
    (0.95, True, 0.2)
}
losses = steps(model, optimizer)
assert losses[-1] < losses[0], losses
with open(os.path.join(os.environ["FOLDER"], f"{rank} of {size}.json"), "w") as file:
    json.dump([losses, len(muon.state)], file)
"""


@pytest.mark.wide
@with_own("slime")
def test_slime(is_own, my_optimizers):
    """Arguments that one process parses, ours among them, and ranks that build by the config's fields of them."""
    start, folder = f"OWN = {is_own}\n", {"FOLDER": str(my_optimizers)}
    run_script(start + SLIME_PARSES, my_optimizers, **folder)
    for ranks in (1, 2):
        begin = "import torch.distributed\ntorch.distributed.init_process_group('gloo')\n" if ranks > 1 else ""
        run_script(start + begin + MODEL + SLIME_TRAINS, my_optimizers, ranks=ranks, **folder)
    (alone, of_one), (first, of_first), (second, of_second) = (
        json.loads((my_optimizers / f"{each}.json").read_text()) for each in ("0 of 1", "0 of 2", "1 of 2")
    )
    assert first == second == pytest.approx(alone, rel=1e-4)
    assert of_first + of_second == of_one == 4  # whole matrices are dealt
    assert of_first > 0 < of_second


INSTALLED = all(importlib.util.find_spec(name) for name in ("verl", "ray", "tensordict", "transformers"))


@pytest.mark.full
@pytest.mark.skipif(
    not INSTALLED,
    reason="needs verl itself: pip install --no-deps verl==0.9.1, then pip install ray 'tensordict<=0.10' "
    "'transformers<5.11' omegaconf hydra-core pandas codetiming torchdata",
)
def test_verls_own_builder(my_optimizers):
    """verl imports a module of the user's that calls activate(), in every process that imports verl."""
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
        my_optimizers,
        VERL_USE_EXTERNAL_MODULES="my_optimizers",
    )
