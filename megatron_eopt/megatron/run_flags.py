"""The flags of a run: those of the table of optimizers, and those whatever the optimizer."""

from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.flags import CliFlag
from megatron_eopt.parallel.workspace import Workspace
from megatron_eopt.settings.records import MOMENTUM_DTYPES
from megatron_eopt.settings.values import ABOVE_0, count

RUN_FLAGS = (  # whatever the optimizer
    CliFlag(
        "optimizer_overrides", "File with settings of single parameters, YAML or JSON.", default=None, metavar="FILE"
    ),
    CliFlag(
        "optimizer_manifest",
        "Print which optimizer has which parameter: a line for those alike (short), for each (full), or none.",
        default="short",
        choices=("short", "full", "none"),
    ),
    CliFlag("optimizer_manifest_file", "Write that to this file, as JSON.", default=None, metavar="FILE"),
    CliFlag(
        "optimizer_workspace",
        "GiB that a step of Muon may take, beside its largest matrix.",
        default=Workspace.bytes / 2**30,
        metavar="GIB",
        check=ABOVE_0,
        execution=True,
    ),
    CliFlag(
        "balanced_deal",
        "Let Megatron's distributed optimizer deal matrices by size, not by operations.",
        default=True,
    ),
    CliFlag(
        "optimizer_momentum_dtype",
        "Keep momenta of Muon and its relatives in bf16, rounded at random.",
        default="fp32",
        choices=tuple(MOMENTUM_DTYPES),
    ),
    CliFlag(
        "optimizer_metrics_interval",
        "Steps from one measured step to the next; 0 for none, by default --log-interval.",
        default=None,
        kind=int,
        metavar="STEPS",
        check=count(0),
    ),
    CliFlag("checksums", "Save no checksums in torch_dist checkpoints, and compare none on load.", default=True),
    CliFlag(
        "trust_checkpoint_globals",
        "Classes and functions, with commas between, that checkpoints may name and have called.",
        default=None,
        metavar="NAMES",
    ),
)
LATER = (  # flags of Megatron's since 0.20
    CliFlag("use_syrk", "", default=False, shared=True, megatrons=True, optimizer="muon"),
    CliFlag("split_glu", "", default=True, shared=True, megatrons=True, optimizer="muon"),
)
BESIDE = (  # flags of Megatron's for its own optimizers, of which some of ours read some
    CliFlag("beta1", default=0.9, megatrons=True, optimizer="adam"),
    CliFlag("beta2", default=0.999, megatrons=True, optimizer="adam"),
    CliFlag("eps", default=1e-8, megatrons=True, optimizer="adam"),
    CliFlag("momentum", default=0.9, megatrons=True, optimizer="sgd"),
    CliFlag("optimizer_cpu_offload", default=False, megatrons=True, execution=True),
)
OF_OPTIMIZERS = (*(flag for row in OPTIMIZERS.values() for flag in row.flags), *LATER, *BESIDE)
FLAGS = (*(flag for flag in OF_OPTIMIZERS if not flag.megatrons), *RUN_FLAGS)
"""Those that Megatron has not."""
