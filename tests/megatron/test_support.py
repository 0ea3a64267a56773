"""What cannot work is refused in one error before anything is changed; the table of what works is what docs show."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from support_matrix import RELEASES

import megatron_eopt.megatron.overrides  # noqa: F401  Run asks which parameters are no matrices, in Megatron's ParamKey
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.support.facts import Run
from megatron_eopt.megatron.support.rules import RULES, refuse_unsupported, unsupported
from megatron_eopt.registry import takes_matrices
from tests.megatron.runs import MUON, refused
from tests.parallel.test_layout import Group

DISTRIBUTED = DistributedDataParallelConfig(use_distributed_optimizer=True)
FSDP = DistributedDataParallelConfig(use_megatron_fsdp=True, data_parallel_sharding_strategy="optim")


def config(optimizer="muon", **fields):
    """Megatron's config; fields that its constructor would refuse with another optimizer than adam are set later."""
    made = OptimizerConfig(optimizer=optimizer, lr=1e-3, bf16=True)
    for name, value in fields.items():
        assert hasattr(made, name), name
        setattr(made, name, value)
    return made


def run(optimizer="muon", release="0.19.2", *, settings=None, own=None, **facts):
    """Facts of a run; ``own`` are fields of the config that flags of this package add."""
    made = config(optimizer, **(settings or {}))
    vars(made).update(own or {})
    return Run(optimizer, release, made, **facts)


LION = {"optimizer": "lion", "leaves_scalars": False}
AVERAGING = LION | {"optimizer": "schedule_free_adamw"}
DEALT = {"layer_wise": True, "ddp": DISTRIBUTED, "data_parallel": 2, "whole_matrices": True}
# In the order of the rules.
REFUSED = {
    "lion beside matrices whose buffers are apart": (
        run(**DEALT, settings={"muon_scalar_optimizer": "lion"}),
        r"steps, of which lion keeps none: take --muon-scalar-optimizer adam, --no-use-layer-wise-param-layout",
    ),
    "files of the torch format where buffers are apart": (
        run(**DEALT, args=SimpleNamespace(ckpt_format="torch", load="a folder")),
        r"ckpt_format 'torch' has no file for .*: take --ckpt-format torch_dist, --no-use-layer-wise-param-layout",
    ),
    "weights cut a second time": (
        run("lion", cut_twice="mlp.linear_fc1.weight"),
        r"mlp\.linear_fc1\.weight is cut a second time.*: set --tensor-parallel-num-weight-shards",
    ),
    "experts in one parameter": (
        run(grouped_experts="mlp.experts.linear_fc1.weight"),
        r"linear_fc1\.weight holds what is several experts'.*leave --moe-single-grouped-weight and .*-bias away",
    ),
    "gradients scattered without regard to matrices": (
        run(ddp=DISTRIBUTED, data_parallel=2),
        r"gradients are laid out for shards that cut matrices \(data-parallel ranks: 2\): .*wrap_model_chunks_with_ddp",
    ),
    "experts' biases under the layer-wise distributed optimizer": (
        run(**DEALT, expert_vector="mlp.experts.linear_fc1.bias0"),
        r"mlp\.experts\.linear_fc1\.bias0 is expert-parallel and no matrix.*--disable-bias-linear",
    ),
    "an optimizer of all parameters under the layer-wise distributed optimizer": (
        run(**LION, **DEALT),
        r"'lion' has parameters that are no matrices.*--no-use-layer-wise-param-layout",
    ),
    "several instances of the distributed optimizer": (
        run(ddp=DistributedDataParallelConfig(num_distributed_optimizer_instances=2)),
        r"num_distributed_optimizer_instances is 2, .*set --num-distributed-optimizer-instances to 1",
    ),
    "Megatron-FSDP that shards nothing": (
        run(ddp=DistributedDataParallelConfig(use_megatron_fsdp=True, data_parallel_sharding_strategy="no_shard")),
        r"'no_shard' of Megatron-FSDP leaves whole parameters.*: take optim, optim_grads or optim_grads_params",
    ),
    "instances of Megatron-FSDP whose gradients would not be summed": (
        run(ddp=replace(FSDP, num_distributed_optimizer_instances=2)),
        r"2 instances of Megatron-FSDP sum their gradients.*: add --overlap-grad-reduce",
    ),
    "instances of Megatron-FSDP that share optimizer state": (
        run(
            ddp=replace(
                FSDP,
                num_distributed_optimizer_instances=2,
                overlap_grad_reduce=True,
                outer_dp_sharding_strategy="optim",
            )
        ),
        r"outer_dp_sharding_strategy 'optim' of Megatron-FSDP clips by another norm.*to no_shard",
    ),
    "experts of one data-parallel rank whose gradients Megatron-FSDP would sum wrongly": (
        run(
            ddp=replace(FSDP, data_parallel_sharding_strategy="optim_grads"),
            data_parallel=2,
            expert_data_parallel=1,
            args=SimpleNamespace(
                global_batch_size=8, micro_batch_size=2, data_parallel_size=2, ckpt_format="fsdp_dtensor"
            ),
        ),
        r"sums those of experts on one data-parallel rank wrongly over micro-batches.*-strategy optim, or a smaller",
    ),
    "checkpoints of Megatron-FSDP with several pipeline stages": (
        run(ddp=FSDP, args=SimpleNamespace(pipeline_model_parallel_size=2, save="ck", ckpt_format="fsdp_dtensor")),
        r"saves layers by their numbers within a pipeline stage.*: set --pipeline-model-parallel-size to 1",
    ),
    "torch FSDP2 with what Megatron cannot save": (
        run(unsaved="a.weight", data_parallel=3, args=SimpleNamespace(save="a folder")),
        r"a\.weight has shards that Megatron-Core cannot save under torch FSDP2.*3 data-parallel ranks",
    ),
    "--async-save of what is in host memory": (
        run(settings={"optimizer_cpu_offload": True}, args=SimpleNamespace(async_save=True)),
        r"--async-save reads optimizer state in host memory.*: leave one of the two away",
    ),
    "a momentum in bf16 of an optimizer that has none": (
        run("soap", own={"optimizer_momentum_dtype": "bf16"}),
        r"optimizer_momentum_dtype bf16 is for momenta that are orthogonalized, and soap has another state: leave",
    ),
    "optimizer_cuda_graph": (
        run(settings={"optimizer_cuda_graph": True}),
        r"replays the step with the learning rate of the iteration in which it was captured",
    ),
    "a loss scale in bf16": (run(settings={"loss_scale": 1024.0}), r"loss_scale 1024\.0 is applied or undone"),
    "parameters in fp8 or fp4": (
        run(ddp=DistributedDataParallelConfig(fp8_param_gather=True), model=SimpleNamespace(fp4_param=True)),
        r"with --fp8-param-gather or --fp4-param-gather, Megatron-Core 0\.19\.2 starts the fp32 parameters of 'muon' "
        r"from rounded weights, .*gathers their bytes without the scales.*: leave --fp8-param-gather and",
    ),
    "Schedule-Free under the distributed optimizer": (
        run("muon", layer_wise=True, assigned=frozenset({"muon", "schedule_free_adamw"})),
        r"schedule_free_adamw evaluates and saves at the average.*leave --use-distributed-optimizer and",
    ),
    "Schedule-Free whose average could not be saved beside what it trains": (
        run(**AVERAGING, args=SimpleNamespace(no_save_optim=True)),
        r"goes on from its state, which this run would not save: leave --no-save-optim away",
    ),
    "instructions over context-parallel ranks without the loss of each token": (
        run(args=SimpleNamespace(sft=True), model=SimpleNamespace(context_parallel_size=2)),
        r"weighed by how masks fall on ranks.*: add --calculate-per-token-loss",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_with_what_works_instead(name):
    refused, message = REFUSED[name]
    assert unsupported(refused) == [dict(zip(REFUSED, RULES, strict=True))[name]]
    with pytest.raises(ValueError, match=message) as error:
        refuse_unsupported(refused)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "works",
    [
        run(ddp=DistributedDataParallelConfig(), model=SimpleNamespace(fp8_param=False), data_parallel=8),
        run(settings={"bf16": False, "loss_scale": 1024.0}),  # Megatron's fp32 optimizer has no loss scale
        *(run(release=each, layer_wise=True, data_parallel=2, settings={"bf16": False}) for each in RELEASES),
        run(settings={"decoupled_weight_decay": False, "loss_scale": 1.0}),
        run("adaptive_muon", settings={"muon_scalar_optimizer": "lion"}),
        run(**LION, layer_wise=True, data_parallel=2),  # the way of 0.19's scripts: whole gradients on every rank
        run(**DEALT, settings={"overlap_param_gather": True}),
        run(**DEALT, expert_data_parallel=1, settings={"overlap_param_gather": True}),
        run(ddp=DISTRIBUTED),  # one rank has all of every gradient
        run(**DEALT | {"data_parallel": 1}),
        run(release="0.20.0", ddp=SimpleNamespace(use_megatron_fsdp=True, megatron_fsdp_version=1)),
        run(wrapper="TorchFullyShardedDataParallel", release="0.20.0"),
        run(**LION, grouped_experts="mlp.experts.linear_fc1.weight"),  # element by element, whosever they are
        run(args=SimpleNamespace(ckpt_format="torch")),
    ],
)
def test_what_works_is_not_refused(works):
    assert unsupported(works) == []
    refuse_unsupported(works)


def test_one_error_names_all_that_was_found():
    args = SimpleNamespace(ckpt_format="torch", save="a")
    with pytest.raises(ValueError, match="cannot work") as error:
        refuse_unsupported(run(**DEALT, args=args, settings={"loss_scale": 2.0, "optimizer_cuda_graph": True}))
    first, *reasons = str(error.value).splitlines()
    assert first == "this run cannot work with optimizer 'muon', for 3 reasons:"
    for word, reason in zip(("torch", "optimizer_cuda_graph", "loss_scale"), reasons, strict=True):
        assert word in reason


class Model(torch.nn.Module):
    def __init__(self, ddp_config=None):
        super().__init__()
        self.config, self.ddp_config = SimpleNamespace(fp8_param=False), ddp_config
        self.linear = torch.nn.Linear(4, 4)
        self.experts = torch.nn.Linear(4, 4)


def groups(dp=1, **more):
    return SimpleNamespace(dp_cp=Group(dp), **more)


def test_facts_are_read_from_the_model_and_its_configs():
    model = Model(DISTRIBUTED)
    for parameter in model.experts.parameters():
        parameter.allreduce = False
    settings = config("dist_muon")
    found = Run.of(settings, [model], groups(2, expt_dp=Group(1)))
    assert found == Run(
        optimizer="muon",
        release=releases.version(),
        config=settings,
        ddp=DISTRIBUTED,
        model=model.config,
        layer_wise=True,
        data_parallel=2,
        expert_data_parallel=1,
        wrapper="Model",
        expert_vector="experts.bias",
    )
    model.linear.weight.is_managed_by_layer_wise_optimizer = False  # as on a pipeline stage with an embedding alone
    model.experts.bias.requires_grad = False
    found = Run.of(config("lion"), [model], groups(2))
    assert (found.layer_wise, takes_matrices(found.optimizer), found.leaves_scalars) == (False, False, False)
    assert found.whole_matrices
    assert found.expert_vector is None
    assert Run.of(config(use_layer_wise_distributed_optimizer=True), [model], groups()).layer_wise
    assert Run.of(config(), [model], groups(), layer_wise=True).layer_wise


def test_weights_that_are_cut_a_second_time_are_found():
    """Experts are told apart later only, so both groups count."""
    model = Model()
    assert Run.of(config(), [model], groups(gtp_remat=Group(2))).cut_twice is None
    model.linear.weight.is_gtp_weight_remat = True
    assert Run.of(config(), [model], groups(gtp_remat=Group(1))).cut_twice is None
    for name in ("gtp_remat", "expt_gtp_remat"):
        assert Run.of(config(), [model], groups(**{name: Group(2)})).cut_twice == "linear.weight"


def grouped_experts(single):
    """Four experts as Transformer Engine 2.14 makes them: a weight or a bias of all, and of each what else there is."""
    experts = torch.nn.Module()
    experts.num_gemms = 4
    experts.single_grouped_weight, experts.single_grouped_bias = single == "weight", single == "bias"
    for name, shape in (("weight", (6, 8)), ("bias", (6,))):
        if name == single:
            experts.register_parameter(name, torch.nn.Parameter(torch.ones(4, *shape)))
        for expert in range(4):
            own = None if name == single else torch.nn.Parameter(torch.ones(shape))
            experts.register_parameter(f"{name}{expert}", own)
    for parameter in experts.parameters():
        parameter.allreduce = False
    return experts


@pytest.mark.parametrize("single", ["weight", "bias"])
def test_experts_in_one_parameter_are_refused(single):
    model = Model()
    model.experts = grouped_experts(single)
    with pytest.raises(ValueError, match=rf"experts\.{single} holds what is several experts'.*--moe-single-grouped"):
        refuse_unsupported(Run.of(config("soap"), [model], groups()))
    getattr(model.experts, single).requires_grad = False
    refuse_unsupported(Run.of(config("muon"), [model], groups()))
    model.experts = grouped_experts(None)
    refuse_unsupported(Run.of(config("muon"), [model], groups()))


def test_a_run_is_refused_at_start():
    flags = ["--bf16", "--use-distributed-optimizer", "--fp8-format", "hybrid", "--fp8-param-gather"]
    said = refused("--num-layers", 1, "--train-iters", 1, *MUON, *flags)
    assert "leave --fp8-param-gather and" in said, said[-3000:]
