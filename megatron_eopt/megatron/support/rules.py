"""What Megatron would compute wrongly in silence: refused at start."""

from collections.abc import Callable
from typing import NamedTuple

from megatron_eopt.megatron.support.facts import Run, on
from megatron_eopt.registry import takes_matrices


class Rule(NamedTuple):
    """Why something fails, and the nearest that works."""

    what: str
    instead: str
    applies: Callable[[Run], bool]


RULES = (
    Rule(
        "where gradient buffers are laid out for whole matrices, Megatron-Core's distributed optimizer of all that is "
        "no matrix asks for a count of steps, of which lion keeps none",
        "take --muon-scalar-optimizer adam, --no-use-layer-wise-param-layout, or leave --use-distributed-optimizer "
        "away",
        lambda run: run.laid_out and run.scalar == "lion",
    ),
    Rule(
        "ckpt_format 'torch' has no file for the distributed optimizer of all that is no matrix, which is one of its "
        "own where Megatron-Core lays gradient buffers out for whole matrices",
        "take --ckpt-format torch_dist, --no-use-layer-wise-param-layout, or leave --use-distributed-optimizer away",
        lambda run: run.laid_out and getattr(run.args, "ckpt_format", None) == "torch" and on(run.args, "save", "load"),
    ),
    Rule(
        "{run.cut_twice} is cut a second time, along its rows, and each shard would be taken for a matrix",
        "set --tensor-parallel-num-weight-shards and --expert-tensor-parallel-num-weight-shards to 1",
        lambda run: run.cut_twice is not None,
    ),
    Rule(
        "{run.grouped_experts} holds what is several experts', and Megatron-Core saves each expert by itself and would "
        "not find the optimizer state that belongs to it",
        "leave --moe-single-grouped-weight and --moe-single-grouped-bias away: each expert has parameters of its own",
        lambda run: any(map(takes_matrices, run.names)) and run.grouped_experts is not None,
    ),
    Rule(
        "the model is wrapped with use_distributed_optimizer in its DistributedDataParallelConfig, so its gradients "
        "are laid out for shards that cut matrices (data-parallel ranks: {run.data_parallel})",
        "wrap it by megatron.training's wrap_model_chunks_with_ddp with use_layer_wise_distributed_optimizer, "
        "or without use_distributed_optimizer",
        lambda run: (
            on(run.ddp, "use_distributed_optimizer")
            and not run.megatron_fsdp
            and (not run.whole_matrices if run.layer_wise else run.data_parallel > 1)
        ),
    ),
    Rule(
        "{run.expert_vector} is expert-parallel and no matrix, which Megatron-Core's layer-wise distributed optimizer "
        "has no place for beside matrices in shards of their own",
        "take --disable-bias-linear, --no-use-layer-wise-param-layout, or leave --use-distributed-optimizer away",
        lambda run: (
            run.leaves_scalars
            and run.expert_vector is not None
            and run.layer_wise
            and on(run.ddp, "use_distributed_optimizer")
        ),
    ),
    Rule(
        "{run.optimizer!r} has parameters that are no matrices, for which Megatron-Core's layer-wise distributed "
        "optimizer has no place beside matrices in shards of their own",
        "take --no-use-layer-wise-param-layout, or leave --use-distributed-optimizer away",
        lambda run: not run.leaves_scalars and run.laid_out and run.data_parallel > 1,
    ),
    Rule(
        "num_distributed_optimizer_instances is {run.ddp.num_distributed_optimizer_instances}, but whole matrices are "
        "shared out over all data-parallel ranks, and an instance has the gradients of some of them only",
        "set --num-distributed-optimizer-instances to 1",
        lambda run: getattr(run.ddp, "num_distributed_optimizer_instances", 1) > 1 and not run.megatron_fsdp,
    ),
    Rule(
        "data_parallel_sharding_strategy 'no_shard' of Megatron-FSDP leaves whole parameters on each rank",
        "take optim, optim_grads or optim_grads_params, or leave --use-megatron-fsdp away",
        lambda run: run.megatron_fsdp and getattr(run.ddp, "data_parallel_sharding_strategy", "") == "no_shard",
    ),
    Rule(
        "{run.ddp.num_distributed_optimizer_instances} instances of Megatron-FSDP sum their gradients in megatron-core "
        "0.19 where it overlaps the reduction alone, and would train apart",
        "add --overlap-grad-reduce",
        lambda run: run.hybrid_fsdp and not on(run.ddp, "overlap_grad_reduce"),
    ),
    Rule(
        "outer_dp_sharding_strategy {run.ddp.outer_dp_sharding_strategy!r} of Megatron-FSDP clips by another norm than "
        "that of the gradients in megatron-core 0.19, with Adam too",
        "set --outer-dp-sharding-strategy to no_shard",
        lambda run: run.hybrid_fsdp and getattr(run.ddp, "outer_dp_sharding_strategy", "no_shard") != "no_shard",
    ),
    Rule(
        "Megatron-FSDP that shards gradients sums those of experts on one data-parallel rank wrongly over "
        "micro-batches in megatron-core 0.19, with Adam too",
        "take --data-parallel-sharding-strategy optim, or a smaller --expert-model-parallel-size",
        lambda run: (
            run.megatron_fsdp
            and run.expert_data_parallel == 1
            and run.data_parallel > 1
            and run.accumulates
            and getattr(run.ddp, "data_parallel_sharding_strategy", "") in ("optim_grads", "optim_grads_params")
        ),
    ),
    Rule(
        "Megatron-FSDP saves layers by their numbers within a pipeline stage, and those of two stages have the same",
        "set --pipeline-model-parallel-size to 1, or leave --save and --load away",
        lambda run: (
            run.megatron_fsdp
            and on(run.args, "save", "load")
            and getattr(run.args, "pipeline_model_parallel_size", 1) > 1
        ),
    ),
    Rule(
        "{run.unsaved} has shards that Megatron-Core cannot save under torch FSDP2: experts, rows that "
        "{run.data_parallel} data-parallel ranks do not divide, or gate and up in one shard",
        "take another number of data-parallel ranks, or leave --use-torch-fsdp2 or --save away",
        lambda run: run.unsaved is not None and on(run.args, "save"),
    ),
    Rule(
        "--async-save reads optimizer state in host memory (optimizer_cpu_offload) while later steps write to it",
        "leave one of the two away",
        lambda run: on(run.config, "optimizer_cpu_offload") and on(run.args, "async_save"),
    ),
    Rule(
        "optimizer_momentum_dtype {run.config.optimizer_momentum_dtype} is for momenta that are orthogonalized, and "
        "{run.without_momentum_dtype} has another state",
        "leave it away, or take muon or one of its relatives",
        lambda run: (
            getattr(run.config, "optimizer_momentum_dtype", "fp32") != "fp32" and run.without_momentum_dtype is not None
        ),
    ),
    Rule(
        "optimizer_cuda_graph replays the step with the learning rate of the iteration in which it was captured, "
        "since {run.optimizer!r} gets it as a number",
        "leave it away; muon and its relatives have --muon-cuda-graphs",
        lambda run: on(run.config, "optimizer_cuda_graph"),
    ),
    Rule(
        "loss_scale {run.config.loss_scale} is applied or undone for the parameters of the scalar optimizer alone, "
        "so that the gradient norm is wrong",
        "leave it away: bf16 needs no loss scale",
        lambda run: (
            run.leaves_scalars
            and on(run.config, "bf16")
            and getattr(run.config, "loss_scale", None) not in (None, 0, 1)
        ),
    ),
    Rule(
        "with --fp8-param-gather or --fp4-param-gather, Megatron-Core {run.release} starts the fp32 parameters of "
        "{run.optimizer!r} from rounded weights, and its layer-wise distributed optimizer gathers their bytes without "
        "the scales, or rounds once more than the rank that updated them: ranks would train different models",
        "leave --fp8-param-gather and --fp4-param-gather away; --fp8-format without them computes in fp8",
        lambda run: run.quantized,
    ),
    Rule(
        "schedule_free_adamw evaluates and saves at the average of each parameter, which a data-parallel rank of the "
        "distributed optimizer, or of Megatron-FSDP, has of its own parameters only",
        "leave --use-distributed-optimizer and --use-megatron-fsdp away",
        lambda run: run.averages and (run.layer_wise or run.megatron_fsdp),
    ),
    Rule(
        "schedule_free_adamw saves the average as the model and goes on from its state, which this run would not save",
        "leave --no-save-optim away, and take --ckpt-format torch_dist",
        lambda run: run.averages and (on(run.args, "no_save_optim") or getattr(run.args, "ckpt_format", "") == "torch"),
    ),
    Rule(
        "with --sft and --context-parallel-size, each rank's loss is a mean over its own tokens, so that gradients are "
        "weighed by how masks fall on ranks (MLM 7452, finding 9)",
        "add --calculate-per-token-loss",
        lambda run: (
            on(run.args, "sft")
            and getattr(run.model, "context_parallel_size", 1) > 1
            and not on(run.model, "calculate_per_token_loss")
        ),
    ),
)


def unsupported(run: Run) -> list[Rule]:
    """The rules that apply to a run, in their order."""
    return [rule for rule in RULES if rule.applies(run)]


def refuse_unsupported(run: Run) -> None:
    """Raise a ``ValueError`` with all reasons against a run."""
    reasons = [f"{rule.what}: {rule.instead}".format(run=run) for rule in unsupported(run)]
    if len(reasons) > 1:
        first = f"this run cannot work with optimizer {run.optimizer!r}, for {len(reasons)} reasons:"
        reasons = ["\n- ".join([first, *reasons])]
    if reasons:
        raise ValueError(reasons[0])
