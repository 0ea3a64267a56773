"""Which features of Megatron-Core work with these optimizers, by release: what the rules of ``support`` say of each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from megatron_eopt.family import ROWS
from megatron_eopt.megatron.support.facts import Run, release_number
from megatron_eopt.megatron.support.rules import unsupported

RELEASES = ("0.19", "0.18", "0.17")
"""The supported ones, the latest first."""

Facts = dict[str, Any]


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
    """A feature, and a run that has it: fields of :class:`Run` that differ from those of a plain run of Muon in bf16.

    Attributes:
        name: as the user asks for it.
        facts: of the release's numbers.
        note: what is worth knowing where it works.
    """

    name: str
    facts: Callable[[tuple[int, int]], Facts] = lambda release: {}
    note: str = ""


def _always(**facts: Any) -> Callable[[tuple[int, int]], Facts]:
    return lambda release: facts


def _config(**fields: Any) -> Callable[[tuple[int, int]], Facts]:
    return _always(config=SimpleNamespace(**({"bf16": True} | fields)))


def _shared(**facts: Any) -> Callable[[tuple[int, int]], Facts]:
    """Facts of a run that ``--use-distributed-optimizer`` was given to, as ``megatron.training`` sets it up.

    0.18 lays the gradient buffers out for whole matrices; the way in which scripts for 0.19 enter (``pretrain`` with a
    config container) does not; 0.17 leaves the flag on the config.
    """

    def by_release(release: tuple[int, int]) -> Facts:
        if release < (0, 18):
            return {"config": SimpleNamespace(bf16=True, use_distributed_optimizer=True), **facts}
        if release < (0, 19):
            ddp = SimpleNamespace(use_distributed_optimizer=True)
            return {"layer_wise": True, "ddp": ddp, "data_parallel": 2, "whole_matrices": True} | facts
        return {"layer_wise": True, "data_parallel": 2} | facts

    return by_release


def _facts(name: str) -> Facts:
    matrices = ROWS[name].owns == "matrices"
    return {"optimizer": name, "takes_matrices": matrices, "leaves_scalars": matrices}


_LION, _AVERAGING = _facts("lion"), _facts("schedule_free_adamw")
_CUT_TWICE = {"cut_twice": "a weight", "weight_shards": 2}
_WHOLE = "whole matrices are shared out over data-parallel ranks"

FEATURES = (
    *(Feature(f"--optimizer {name}", _always(**_facts(name))) for name in ROWS),
    Feature("--muon-scalar-optimizer lion", _config(muon_scalar_optimizer="lion")),
    Feature("fp32", _config(bf16=False)),
    Feature("--bf16"),
    Feature("--fp16", _config(bf16=False, fp16=True)),
    Feature("--fp8-param-gather, --fp4-param-gather", _always(ddp=SimpleNamespace(fp8_param_gather=True))),
    Feature("--loss-scale with --bf16", _config(loss_scale=1024.0)),
    Feature("tensor, pipeline (also interleaved) and data parallelism"),
    Feature("expert parallelism", note="every expert's matrices are matrices of their own"),
    Feature(
        "--moe-single-grouped-weight, --moe-single-grouped-bias (unproven)",
        _always(grouped_experts="a weight"),
    ),
    Feature("--tensor-parallel-num-weight-shards", _always(**_CUT_TWICE)),
    Feature(
        "--tensor-parallel-num-weight-shards with optimizer state in checkpoints",
        _always(args=SimpleNamespace(save="a folder"), **_CUT_TWICE),
    ),
    Feature("--use-distributed-optimizer with --bf16", _shared(), _WHOLE),
    Feature("--use-distributed-optimizer in fp32", _shared(config=SimpleNamespace(use_distributed_optimizer=True))),
    Feature("--use-distributed-optimizer with lion", _shared(**_LION)),
    Feature("--use-distributed-optimizer with schedule_free_adamw", _shared(**_AVERAGING)),
    Feature(
        "--use-distributed-optimizer with biases in experts", _shared(expert_vector="a bias"), "as in any other model"
    ),
    Feature("--optimizer dist_muon with --bf16", _always(layer_wise=True), _WHOLE),
    Feature("--overlap-param-gather", _shared(), "with --use-distributed-optimizer and --overlap-grad-reduce"),
    Feature(
        "--overlap-param-gather with dist_muon and one data-parallel rank",
        _always(layer_wise=True, config=SimpleNamespace(bf16=True, overlap_param_gather=True)),
    ),
    Feature("--overlap-param-gather-with-optimizer-step", _config(overlap_param_gather_with_optimizer_step=True)),
    Feature(
        "--num-distributed-optimizer-instances above 1",
        _always(ddp=SimpleNamespace(num_distributed_optimizer_instances=2)),
    ),
    Feature("--use-megatron-fsdp", _always(ddp=SimpleNamespace(use_megatron_fsdp=True))),
    Feature("--use-torch-fsdp2", _always(wrapper="TorchFullyShardedDataParallel")),
    Feature("--optimizer-cpu-offload", _config(optimizer_cpu_offload=True)),
    Feature("--use-precision-aware-optimizer", _config(use_precision_aware_optimizer=True)),
    Feature("--optimizer-cuda-graph", _config(optimizer_cuda_graph=True)),
    Feature("decoupled_weight_decay=False with muon, adaptive_muon", _config(decoupled_weight_decay=False)),
    Feature(
        "decoupled_weight_decay=False with any other",
        _always(config=SimpleNamespace(bf16=True, decoupled_weight_decay=False), **_LION),
    ),
    Feature("--ckpt-format torch_dist", _always(args=SimpleNamespace(ckpt_format="torch_dist"))),
    Feature("--ckpt-format torch_dcp, fsdp_dtensor", _always(args=SimpleNamespace(ckpt_format="torch_dcp"))),
    Feature(
        "--no-save-optim with schedule_free_adamw", _always(args=SimpleNamespace(no_save_optim=True), **_AVERAGING)
    ),
    Feature("--async-save", note="with --ckpt-format torch_dist"),
    Feature("--dump-param-to-param-group-map", _always(args=SimpleNamespace(dump_param_to_param_group_map="a file"))),
    Feature("overrides that give parameters another optimizer", _always(routes_optimizers=True)),
    Feature("overrides that exclude parameters", _always(excludes=True), "without the distributed optimizer"),
)
"""In the order of the table."""


def support_matrix(release: str) -> list[Row]:
    """What works with a release of Megatron-Core, ``0.19.2`` or ``0.19``."""
    return [_row(feature, release) for feature in FEATURES]


def _row(feature: Feature, release: str) -> Row:
    number = release_number(release)
    plain: Facts = {
        "optimizer": "muon",
        "release": release,
        "config": SimpleNamespace(bf16=True),
        "scalar_optimizers": ("adam", "lion") if number >= (0, 19) else ("adam",),
    }
    run = Run(**(plain | feature.facts(number)))
    reasons = [rule.instead.format(run=run) for rule in unsupported(run)]
    return Row(feature.name, "no" if reasons else "yes", "; ".join(reasons) or feature.note)
