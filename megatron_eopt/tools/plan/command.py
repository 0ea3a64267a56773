"""The command ``megatron-eopt plan``: the cost of a step.

``plan --model llama3-70b --tensor-model-parallel-size 8`` takes a model, or its sizes by Megatron's flags.
``plan -- FLAGS`` takes the flags of a pretrain command, and also says which optimizer each parameter will have.
"""

import argparse
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, get_args

from megatron_eopt.family import DEFAULT_TP_MODE
from megatron_eopt.from_config import workspace_from
from megatron_eopt.orthogonalize.coefficients import get_supported_coefficient_types
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.parallel.cost import DEFAULT_RATES, Rates, Work
from megatron_eopt.parallel.explain import explain, figure
from megatron_eopt.parallel.plan import TpMode
from megatron_eopt.parallel.workspace import Workspace
from megatron_eopt.routing import table, write_json
from megatron_eopt.routing.text import aligned, megabytes
from megatron_eopt.tools.plan.models import GPUS, MODELS, Model, Parallel
from megatron_eopt.tools.plan.sweep import Point, numbers_of, point_of, swept, where_it_stops
from megatron_eopt.tools.plan.sweep import table as swept_table

if TYPE_CHECKING:
    from megatron_eopt.tools.plan.described import PlannedRun

_OF_RUN = {"--world-size", "--full", "--json"}
_OF_EXPERTS = {
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--moe-ffn-hidden-size",
    "--moe-shared-expert-intermediate-size",
    "--first-dense-layers",
}
_OF_LATENT_ATTENTION = {"--q-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"}
_RANKS = {  # of Parallel
    "tensor": ("--tensor-model-parallel-size", None),
    "expert_tensor": ("--expert-tensor-parallel-size", "of experts, by default as --tensor-model-parallel-size"),
    "expert": ("--expert-model-parallel-size", None),
    "pipeline": ("--pipeline-model-parallel-size", None),
    "data": ("--data-parallel-size", "over which the layer-wise distributed optimizer deals whole parameters"),
}
_SWITCHES = {"swiglu": "fc1 has gate and up", "split_gate_up": "gate and up as two matrices; Megatron has one"}
_OF_POINTS = """A step is that of the busiest rank, with 10 ps an entry for momentum, decay and update.
The mean is what it would take if the work were shared evenly. The gather brings bf16 parameters to all data-parallel
ranks, at the same bandwidth: between nodes it takes as much longer as their network is slower. State is a momentum and
a copy of the parameters, in fp32. Embeddings, output layer and activations are not counted."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.set_defaults(run=_print_plan)
    parser.usage = "%(prog)s [OPTIONS, which --help lists] [-- FLAGS OF A RUN]"
    model = parser.add_argument_group("model")
    model.add_argument("--model", choices=MODELS, help="its sizes, which the flags below override")
    for field in fields(Model):
        if field.type is bool:
            model.add_argument(_flag(field.name), action="store_true", default=None, help=_SWITCHES[field.name])
        else:
            model.add_argument(_flag(field.name), type=_positive)

    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--sweep-gpus", metavar="FIRST..LAST", help="a line for each number of GPUs, and where to stop")
    for field in fields(Parallel):
        flag, what = _RANKS[field.name]
        ranks.add_argument(flag, dest=field.name, type=_positive, default=field.default, help=what)
    ranks.set_defaults(expert_tensor=None)

    muon = parser.add_argument_group("Muon")
    iteration = NewtonSchulz()
    muon.add_argument("--muon-tp-mode", choices=get_args(TpMode), default=DEFAULT_TP_MODE)
    muon.add_argument(
        "--muon-coefficient-type", choices=get_supported_coefficient_types(), default=iteration.coefficient_type
    )
    muon.add_argument("--muon-num-ns-steps", type=_positive, default=iteration.steps)
    muon.add_argument("--dense", action="store_true", help="without kernels for symmetric products")
    muon.add_argument("--exchange-itemsize", type=int, choices=(2, 4), default=2, help="bytes of an entry on the wire")
    muon.add_argument(
        "--optimizer-workspace",
        type=float,
        default=Workspace.bytes / 2**30,
        metavar="GIB",
        help="for temporaries of a step",
    )

    rates = parser.add_argument_group("rates of one rank")
    rates.add_argument(
        "--gpu",
        choices=GPUS,
        help="half of its published operations, two thirds of its NVLink; the flags below override them",
    )
    rates.add_argument(
        "--tflops", type=_above_zero, help=f"TFLOP/s, instead of the GPU's or {DEFAULT_RATES.flops / 1e12:g}"
    )
    rates.add_argument(
        "--bandwidth", type=_above_zero, help=f"GB/s sent, instead of the GPU's or {DEFAULT_RATES.bytes / 1e9:g}"
    )
    rates.add_argument("--latency", type=float, default=DEFAULT_RATES.latency * 1e6, help="us of a collective")

    run = parser.add_argument_group("with -- and the flags of a Megatron pretrain command, which say all of the above")
    run.add_argument("--world-size", type=_positive, help="ranks of the run; as few as its parallel sizes allow")
    run.add_argument("--full", action="store_true", help="a line for each parameter, not for all that are alike")
    run.add_argument("--json", metavar="FILE", help="write the optimizer of each parameter there, too")


def _print_plan(options: argparse.Namespace, flags: Sequence[str] | None) -> int:
    if flags is not None:
        return _print_planned_run(options, flags)
    model = _model(options)
    sizes = {field.name: getattr(options, field.name) for field in fields(Parallel)}
    parallel = Parallel(**sizes | {"expert_tensor": options.expert_tensor or options.tensor})
    _check(options, model, parallel)
    iteration = NewtonSchulz(steps=options.muon_num_ns_steps, coefficient_type=options.muon_coefficient_type)
    work = Work(
        schedule=iteration.schedule,
        restarts=iteration.restarts,
        share=1.0 if options.dense else 0.5,
        itemsize=options.exchange_itemsize,
    )
    mode = options.muon_tp_mode
    rates = _rates(options)
    workspace = Workspace(bytes=workspace_from(options)["workspace"])
    if options.sweep_gpus is None:
        point = point_of(model, parallel, work, mode, rates, workspace)
        points = [point]
        print(explain(point.plan, work, rates, workspace))
        for deal in point.stage.deals:
            print(f"\n{deal}.")
        print(f"\n{swept_table(points)}\n\n{_OF_POINTS}")
    else:
        of_stage = math.lcm(parallel.tensor, parallel.expert_tensor * parallel.expert)
        gpus = numbers_of(options.sweep_gpus, of_stage * parallel.pipeline)
        points = swept(model, parallel, gpus, work, mode, rates, workspace)
        print(f"{swept_table(points)}\n\n{where_it_stops(points, work, mode, rates)}\n")
        print(
            f"Modelled at {rates.flops / 1e12:,.4g} TFLOP/s and {rates.bytes / 1e9:,.4g} GB/s, nothing overlapped.\n"
            f"{_OF_POINTS}"
        )
    _print_notes(options.gpu, model, parallel, points)
    return 0


def _check(options: argparse.Namespace, model: Model, parallel: Parallel) -> None:
    """Refuse flags without effect, and more stages or dense layers than layers."""
    without_effect = {"without -- and the flags of a run": _OF_RUN}
    if model.num_experts is None:
        without_effect["without --num-experts"] = _OF_EXPERTS
    if model.kv_lora_rank is None:
        without_effect["without --kv-lora-rank"] = _OF_LATENT_ATTENTION
    if options.sweep_gpus:
        without_effect["with --sweep-gpus"] = {"--data-parallel-size"}
    given = _given(options)
    for why, flags in without_effect.items():
        if given & flags:
            raise ValueError(f"{', '.join(sorted(given & flags))} would have no effect {why}")
    if max(model.first_dense_layers, parallel.pipeline) > model.num_layers:
        raise ValueError(
            f"--first-dense-layers {model.first_dense_layers} or --pipeline-model-parallel-size {parallel.pipeline} is "
            f"more than {model.num_layers} layers"
        )


def _print_notes(gpu: str | None, model: Model, parallel: Parallel, points: Sequence[Point]) -> None:
    if gpu is not None:
        memory = GPUS[gpu].memory
        full = [f"{point.gpus:,}" for point in points if sum(point.memory) > memory]
        if full:
            print(
                f"\nnote: with {', '.join(full)} GPUs that is more memory than the {memory / 1e9:.0f} GB of one {gpu}."
            )
    if model.num_layers % parallel.pipeline:
        print(
            f"\nnote: {model.num_layers} layers are not shared equally by {parallel.pipeline} pipeline stages. This is "
            f"the plan of a longest stage of {-(-model.num_layers // parallel.pipeline)}.\n"
            "Megatron takes --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers for that."
        )


def _print_planned_run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    if not flags:
        raise ValueError("expected the flags of a pretrain command after --")
    unused = sorted(_given(options) - _OF_RUN)
    if unused:
        raise ValueError(
            f"{', '.join(unused)} would have no effect: the flags after -- say all of the run but --world-size, and "
            f"rates are the default ones"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the CPU stands in for the run's GPUs
    from megatron_eopt.tools.plan.described import planned_run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, of missing packages
        run = planned_run(flags, options.world_size)
    _print_run(run, options.full)
    if options.json is not None:
        write_json(run.families, options.json)
    return 1 if run.problems else 0


def _print_run(run: "PlannedRun", full: bool) -> None:
    print(f"{run.layout}\n\n{table(run.families, full=full)}")
    head = ("pipeline stage", "matrices", "parameters MB", "gradients MB", "state MB", "temporaries MB", "all MB")
    lines = []
    for number, (matrices, memory) in enumerate(run.stages):
        lines.append([str(number), f"{matrices:,}", *map(megabytes, memory), megabytes(sum(memory))])
    print("\nmemory of each GPU:", *aligned(head, lines, head), sep="\n")
    print(
        "state: with fp32 copies of bf16 parameters; of whole parameters that are dealt to data-parallel ranks, what "
        "the fullest\nrank holds at most. Activations are not counted. Matrices are those of all ranks of a stage.\n"
        f"\nA step takes the longest in pipeline stage {run.slowest}: {figure(run.seconds * 1e3)} ms on its busiest "
        "rank. That is 10 ps an entry for\nmomentum, decay and update, and what this rank orthogonalizes:"
    )
    if not run.explained:
        print("\nnothing by a plan: work and temporaries of these optimizers are not in the figures")
    for explained in run.explained:
        print(f"\n{explained}")
    for kind, messages in (("warning", run.warnings), ("note", run.notes), ("problem", run.problems)):
        for message in messages:
            print(f"\n{kind}: {message}")


def _given(options: argparse.Namespace) -> set[str]:
    """Flags that differ from their defaults."""
    plan: argparse.ArgumentParser = options.parser
    given = set()
    for action in plan._actions:  # there is no public way
        if action.dest in options and getattr(options, action.dest) != plan.get_default(action.dest):
            given.add(action.option_strings[0])
    return given


def _rates(options: argparse.Namespace) -> Rates:
    rates = DEFAULT_RATES if options.gpu is None else GPUS[options.gpu].rates
    if options.tflops is not None:
        rates = replace(rates, flops=options.tflops * 1e12)
    if options.bandwidth is not None:
        rates = replace(rates, bytes=options.bandwidth * 1e9)
    return replace(rates, latency=options.latency * 1e-6)


def _model(options: argparse.Namespace) -> Model:
    given = {}
    for field in fields(Model):
        value = getattr(options, field.name)
        if value is not None:
            given[field.name] = value
    if options.model is not None:
        return replace(MODELS[options.model], **given)
    missing = [_flag(field.name) for field in fields(Model) if field.default is MISSING and field.name not in given]
    if missing:
        raise ValueError(f"name a --model, or give {', '.join(missing)}")
    return Model(**given)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, got {text}")
    return value


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return int(text)
