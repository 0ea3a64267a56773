"""Which features work, by release of Megatron-Core."""

from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.support.buffers import against_layout, without_layout
from megatron_eopt.megatron.support.facts import Run
from megatron_eopt.megatron.support.rules import unsupported
from megatron_eopt.registry import takes_matrices

RELEASES = (releases.MAIN, releases.SUPPORTED)


class Row(NamedTuple):
    """A feature in one release, in the user's words."""

    feature: str
    works: Literal["yes", "no"]
    note: str  # where it does not, what to take instead; else what is worth knowing


class Feature(NamedTuple):
    """A feature, as differences from plain Muon in bf16."""

    name: str
    facts: dict[str, Any] = {}  # noqa: RUF012  it is not changed; fields of Run, or of its config, ddp and args
    note: str = ""  # what is worth knowing where it works
    distributed: bool = False  # whether the run has --use-distributed-optimizer


def _of(optimizer: str) -> dict[str, Any]:
    return {"optimizer": optimizer, "leaves_scalars": takes_matrices(optimizer)}


_AVERAGING = _of("schedule_free_adamw")
_FSDP = {"ddp.use_megatron_fsdp": True}
_TORCH_FSDP2 = {"wrapper": "TorchFullyShardedDataParallel"}
_INSTANCES = _FSDP | {"ddp.num_distributed_optimizer_instances": 2, "ddp.overlap_grad_reduce": True}
_OFFLOAD = {"config.optimizer_cpu_offload": True}
_WHOLE = "whole matrices are shared out over data-parallel ranks"

FEATURES = (
    *(Feature(f"--optimizer {name}", _of(name)) for name in OPTIMIZERS),
    Feature("--muon-scalar-optimizer lion", {"config.muon_scalar_optimizer": "lion"}),
    Feature("fp32", {"config.bf16": False}),
    Feature("--bf16"),
    Feature("--fp8-param-gather, --fp4-param-gather", {"ddp.fp8_param_gather": True}),
    Feature("--loss-scale with --bf16", {"config.loss_scale": 1024.0}),
    Feature("tensor, pipeline (also interleaved) and data parallelism"),
    Feature("context parallelism", note="these ranks are data-parallel ranks to an optimizer"),
    Feature("expert parallelism", note="every expert's matrices are matrices of their own"),
    Feature("--moe-single-grouped-weight, --moe-single-grouped-bias (unproven)", {"grouped_experts": "a weight"}),
    Feature("--tensor-parallel-num-weight-shards", {"cut_twice": "a weight"}),
    Feature("--use-distributed-optimizer with --bf16", {}, _WHOLE, distributed=True),
    Feature("--use-distributed-optimizer in fp32", {"config.bf16": False}, _WHOLE, distributed=True),
    Feature("--use-distributed-optimizer with lion", _of("lion"), distributed=True),
    Feature("--use-distributed-optimizer with schedule_free_adamw", _AVERAGING, distributed=True),
    Feature(
        "--use-distributed-optimizer with biases in experts",
        {"expert_vector": "a bias"},
        "without the layout for whole matrices (--no-use-layer-wise-param-layout)",
        distributed=True,
    ),
    Feature("--optimizer dist_muon with --bf16", {"layer_wise": True}, _WHOLE),
    Feature(
        "--overlap-param-gather", {}, "with --use-distributed-optimizer and --overlap-grad-reduce", distributed=True
    ),
    Feature("--num-distributed-optimizer-instances above 1", {"ddp.num_distributed_optimizer_instances": 2}),
    Feature("--use-megatron-fsdp", _FSDP, "optim, optim_grads and optim_grads_params"),
    Feature(
        "--use-megatron-fsdp with --num-distributed-optimizer-instances above 1",
        _INSTANCES,
        "with --overlap-grad-reduce",
    ),
    Feature(
        "--use-megatron-fsdp with --outer-dp-sharding-strategy optim",
        _INSTANCES | {"ddp.outer_dp_sharding_strategy": "optim"},
    ),
    Feature(
        "--use-megatron-fsdp with optim_grads, experts of one data-parallel rank, and several micro-batches",
        _FSDP | {"ddp.data_parallel_sharding_strategy": "optim_grads", "data_parallel": 2, "expert_data_parallel": 1},
    ),
    Feature("--use-megatron-fsdp with schedule_free_adamw", _AVERAGING | _FSDP),
    Feature(
        "--use-torch-fsdp2",
        _TORCH_FSDP2,
        "also with tensor parallelism; a shard of a shard is of one matrix over the ranks of both axes",
    ),
    Feature(
        "--use-torch-fsdp2 with --save, and experts, or shards that are not equal",
        _TORCH_FSDP2 | {"unsaved": "a weight", "args.save": "a folder", "data_parallel": 2},
    ),
    Feature("--optimizer-cpu-offload", _OFFLOAD, "momenta are in [host memory](planning.md#host-memory)"),
    Feature("--optimizer-cpu-offload with --async-save", _OFFLOAD | {"args.async_save": True}),
    Feature("--optimizer-momentum-dtype bf16", {"config.optimizer_momentum_dtype": "bf16"}, "muon and its relatives"),
    Feature("--optimizer-cuda-graph", {"config.optimizer_cuda_graph": True}),
    Feature(
        "decoupled_weight_decay=False",
        {"config.decoupled_weight_decay": False},
        "adam alone reads it, as in Megatron; others have weight_decay_method",
    ),
    Feature("--ckpt-format torch_dist", {"args.ckpt_format": "torch_dist"}),
    Feature("--ckpt-format torch", {"args.ckpt_format": "torch"}, "the number of ranks stays"),
    Feature("--no-save-optim with schedule_free_adamw", _AVERAGING | {"args.no_save_optim": True}),
    Feature("--override-opt-param-scheduler", note="every group has the rates that the flags of this run give it"),
    Feature("--async-save", note="with --ckpt-format torch_dist --use-persistent-ckpt-worker --async-strategy mcore"),
    Feature("overrides that give parameters another optimizer"),
    Feature("overrides that exclude parameters", note="without the distributed optimizer"),
)


def _distributed_optimizer(release: str) -> dict[str, Any]:
    """What ``--use-distributed-optimizer`` means: 0.20 lays buffers out for whole matrices, 0.19's ``pretrain`` not."""
    facts = {"layer_wise": True, "data_parallel": 2}
    if releases.lays_out_containers(release):
        facts |= {"whole_matrices": True, "ddp.use_distributed_optimizer": True}
    return facts


def support_matrix(release: str) -> list[Row]:
    """What works with a release, ``0.19.2`` or ``0.19``."""
    plain = _of("muon") | {"config.bf16": True}
    distributed = _distributed_optimizer(release)
    rows = []
    for feature in FEATURES:
        settings = {part: SimpleNamespace() for part in ("config", "ddp", "args")}
        facts: dict[str, Any] = {"release": release, **settings}
        for name, value in (plain | (distributed if feature.distributed else {}) | feature.facts).items():
            part, _, field = name.rpartition(".")
            (vars(settings[part]) if part else facts)[field] = value
        run = Run(**facts)
        run = without_layout(run) if against_layout(run) else run
        reasons = [rule.instead.format(run=run) for rule in unsupported(run)]
        rows.append(Row(feature.name, "no" if reasons else "yes", "; ".join(reasons) or feature.note))
    return rows
