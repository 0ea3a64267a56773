"""Which features of Megatron-Core work with these optimizers, by release: what the rules of ``support`` say of each."""

from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from megatron_eopt.family import ROWS
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.support import Run
from megatron_eopt.megatron.support.rules import unsupported
from megatron_eopt.registry import takes_matrices

RELEASES = releases.SUPPORTED


class Row(NamedTuple):
    """A feature in one release.

    Attributes:
        feature: as the user asks for it.
        works: yes or no.
        note: where it does not, what to take instead; else what is worth knowing.
    """

    feature: str
    works: Literal["yes", "no"]
    note: str


class Feature(NamedTuple):
    """A feature, and a run that has it.

    Attributes:
        name: as the user asks for it.
        facts: fields of :class:`Run` that differ from those of a plain run of Muon in bf16.
        note: what is worth knowing where it works.
        distributed: whether the run has ``--use-distributed-optimizer``.
    """

    name: str
    facts: dict[str, Any] = {}  # noqa: RUF012  it is not changed
    note: str = ""
    distributed: bool = False


def _of(optimizer: str) -> dict[str, Any]:
    return {"optimizer": optimizer, "leaves_scalars": takes_matrices(optimizer)}


def _config(**fields: Any) -> dict[str, Any]:
    return {"config": SimpleNamespace(**({"bf16": True} | fields))}


def _ddp(**fields: Any) -> dict[str, Any]:
    return {"ddp": SimpleNamespace(**fields)}


def _args(**fields: Any) -> dict[str, Any]:
    return {"args": SimpleNamespace(**fields)}


_CUT_TWICE = {"cut_twice": "a weight", "weight_shards": 2}
_WHOLE = "whole matrices are shared out over data-parallel ranks"

FEATURES = (
    *(Feature(f"--optimizer {name}", _of(name)) for name in ROWS),
    Feature("--muon-scalar-optimizer lion", _config(muon_scalar_optimizer="lion")),
    Feature("fp32", _config(bf16=False)),
    Feature("--bf16"),
    Feature("--fp16", _config(bf16=False, fp16=True)),
    Feature("--fp8-param-gather, --fp4-param-gather", _ddp(fp8_param_gather=True)),
    Feature("--loss-scale with --bf16", _config(loss_scale=1024.0)),
    Feature("tensor, pipeline (also interleaved) and data parallelism"),
    Feature("expert parallelism", note="every expert's matrices are matrices of their own"),
    Feature("--moe-single-grouped-weight, --moe-single-grouped-bias (unproven)", {"grouped_experts": "a weight"}),
    Feature("--tensor-parallel-num-weight-shards", _CUT_TWICE),
    Feature(
        "--tensor-parallel-num-weight-shards with optimizer state in checkpoints", _CUT_TWICE | _args(save="a folder")
    ),
    Feature("--use-distributed-optimizer with --bf16", {}, _WHOLE, distributed=True),
    Feature(
        "--use-distributed-optimizer in fp32", _config(bf16=False, use_distributed_optimizer=True), distributed=True
    ),
    Feature("--use-distributed-optimizer with lion", _of("lion"), distributed=True),
    Feature("--use-distributed-optimizer with schedule_free_adamw", _of("schedule_free_adamw"), distributed=True),
    Feature(
        "--use-distributed-optimizer with biases in experts",
        {"expert_vector": "a bias"},
        "as in any other model",
        distributed=True,
    ),
    Feature("--optimizer dist_muon with --bf16", {"layer_wise": True}, _WHOLE),
    Feature(
        "--overlap-param-gather", {}, "with --use-distributed-optimizer and --overlap-grad-reduce", distributed=True
    ),
    Feature(
        "--overlap-param-gather with dist_muon and one data-parallel rank",
        {"layer_wise": True} | _config(overlap_param_gather=True),
    ),
    Feature("--overlap-param-gather-with-optimizer-step", _config(overlap_param_gather_with_optimizer_step=True)),
    Feature("--num-distributed-optimizer-instances above 1", _ddp(num_distributed_optimizer_instances=2)),
    Feature("--use-megatron-fsdp", _ddp(use_megatron_fsdp=True)),
    Feature("--use-torch-fsdp2", {"wrapper": "TorchFullyShardedDataParallel"}),
    Feature("--optimizer-cpu-offload", _config(optimizer_cpu_offload=True)),
    Feature("--use-precision-aware-optimizer", _config(use_precision_aware_optimizer=True)),
    Feature("--optimizer-cuda-graph", _config(optimizer_cuda_graph=True)),
    Feature("decoupled_weight_decay=False with muon, adaptive_muon", _config(decoupled_weight_decay=False)),
    Feature("decoupled_weight_decay=False with any other", _of("lion") | _config(decoupled_weight_decay=False)),
    Feature("--ckpt-format torch_dist", _args(ckpt_format="torch_dist")),
    Feature("--ckpt-format torch_dcp, fsdp_dtensor", _args(ckpt_format="torch_dcp")),
    Feature("--no-save-optim with schedule_free_adamw", _of("schedule_free_adamw") | _args(no_save_optim=True)),
    Feature("--async-save", note="with --ckpt-format torch_dist"),
    Feature("--dump-param-to-param-group-map", _args(dump_param_to_param_group_map="a file")),
    Feature("overrides that give parameters another optimizer", {"routes_optimizers": True}),
    Feature("overrides that exclude parameters", {"excludes": True}, "without the distributed optimizer"),
)
"""In the order of the table."""


def support_matrix(release: str) -> list[Row]:
    """What works with a release of Megatron-Core, ``0.19.2`` or ``0.19``."""
    plain = {"scalar_optimizers": releases.scalar_optimizers_of(release)} | _of("muon") | _config()
    rows = []
    for feature in FEATURES:
        facts = plain | (_distributed(release) if feature.distributed else {}) | feature.facts
        run = Run(release=release, **facts)
        reasons = [rule.instead.format(run=run) for rule in unsupported(run)]
        rows.append(Row(feature.name, "no" if reasons else "yes", "; ".join(reasons) or feature.note))
    return rows


def _distributed(release: str) -> dict[str, Any]:
    """Facts of a run that ``--use-distributed-optimizer`` was given to, as ``megatron.training`` sets it up."""
    layer_wise, whole_matrices = releases.distributed_optimizer(release)
    if not layer_wise:
        return _config(use_distributed_optimizer=True)
    laid_out = _ddp(use_distributed_optimizer=True) | {"whole_matrices": True} if whole_matrices else {}
    return {"layer_wise": True, "data_parallel": 2} | laid_out
