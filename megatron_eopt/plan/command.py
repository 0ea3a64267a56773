"""The command ``megatron-eopt plan``: the cost of a step.

``plan --model llama3-70b --tensor-model-parallel-size 8`` takes a model, or its sizes by Megatron's flags.
``plan -- FLAGS`` takes the flags of a pretrain command, and also says which optimizer each parameter will have.
"""

import argparse
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import get_args

from megatron_eopt.family import DEFAULT_TP_MODE
from megatron_eopt.from_config import workspace_from
from megatron_eopt.manifest.sizes import check_sizes
from megatron_eopt.orthogonalize.coefficients import get_supported_coefficient_types
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.timing import fastest, saved_times, shares
from megatron_eopt.parallel.cost import DEFAULT_RATES, Rates, Work
from megatron_eopt.parallel.explain import explain, figure
from megatron_eopt.parallel.plan import TpMode, make_plan
from megatron_eopt.parallel.workspace import Workspace
from megatron_eopt.plan.models import GPUS, MODELS, Model, Parallel, dealt_matrices
from megatron_eopt.plan.sweep import Point, draw, numbers_of, point_of, swept, where_it_stops
from megatron_eopt.plan.sweep import table as swept_table
from megatron_eopt.routing import table, write_json
from megatron_eopt.routing.text import aligned, megabytes

_OF_RUN = {"--world-size", "--full", "--json"}
_NEEDS = {  # of the model -> what has an effect on no other
    "num_experts": {
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
        "--moe-ffn-hidden-size",
        "--moe-shared-expert-intermediate-size",
        "--first-dense-layers",
    },
    "kv_lora_rank": {"--q-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"},
}
_OF_POINTS = """A step is that of the busiest rank, with 10 ps an entry for momentum, decay and update.
The mean is what it would take if the work were shared evenly. The gather brings bf16 parameters to all data-parallel
ranks, at the same bandwidth: between nodes it takes as much longer as their network is slower. State is a momentum and
a copy of the parameters, in fp32. Embeddings, output layer and activations are not counted."""
_QUIET = 2.0  # seconds before progress is printed


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.set_defaults(run=_print_plan)
    parser.usage = "%(prog)s [OPTIONS, which --help lists] [-- FLAGS OF A RUN]"
    model = parser.add_argument_group("model")
    model.add_argument("--model", choices=MODELS, help="its sizes, which the flags below override")
    for field in fields(Model):
        if field.name == "swiglu":
            model.add_argument("--swiglu", action="store_true", default=None, help="fc1 has gate and up")
        else:
            model.add_argument(f"--{field.name.replace('_', '-')}", type=_positive)
    model.add_argument("--split-gate-up", action="store_true", help="gate and up as two matrices; Megatron has one")
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--sweep-gpus", metavar="FIRST..LAST", help="a line for each number of GPUs, and where to stop")
    ranks.add_argument("--picture", metavar="FILE", help="draw the sweep there, by matplotlib")
    said = {"data": "over which the layer-wise distributed optimizer deals whole parameters"}
    said["expert-tensor"] = "of experts, by default as --tensor-model-parallel-size"
    for name in ("tensor-model", "expert-tensor", "expert-model", "pipeline-model", "data"):
        field_name, default = name.removesuffix("-model").replace("-", "_"), None if name == "expert-tensor" else 1
        flag = f"--{name}-parallel-size"
        ranks.add_argument(flag, dest=field_name, type=_positive, default=default, help=said.get(name))
    muon = parser.add_argument_group("Muon")
    muon.add_argument("--muon-tp-mode", choices=get_args(TpMode), default=DEFAULT_TP_MODE)
    sets, iteration = get_supported_coefficient_types(), NewtonSchulz()
    muon.add_argument("--muon-coefficient-type", choices=sets, default=iteration.coefficient_type)
    muon.add_argument("--muon-num-ns-steps", type=_positive, default=iteration.steps)
    products = muon.add_mutually_exclusive_group()
    products.add_argument("--dense", action="store_true", help="without kernels for symmetric products")
    products.add_argument("--kernel-times", metavar="FILE", help="of make gpu: the fastest kernel and its time")
    muon.add_argument("--exchange-itemsize", type=int, choices=(2, 4), default=2, help="bytes of an entry on the wire")
    gib, temporaries = Workspace.bytes / 2**30, "for temporaries of a step"
    muon.add_argument("--optimizer-workspace", type=float, default=gib, metavar="GIB", help=temporaries)
    rates = parser.add_argument_group("rates of one rank")
    published = "half of its published operations, two thirds of its NVLink; the flags below override them"
    rates.add_argument("--gpu", choices=GPUS, help=published)
    flops, sent = DEFAULT_RATES.flops / 1e12, DEFAULT_RATES.bytes / 1e9
    rates.add_argument("--tflops", type=_above_zero, help=f"TFLOP/s, instead of the GPU's or {flops:g}")
    rates.add_argument("--bandwidth", type=_above_zero, help=f"GB/s sent, instead of the GPU's or {sent:g}")
    rates.add_argument("--latency", type=float, default=DEFAULT_RATES.latency * 1e6, help="us of a collective")
    run = parser.add_argument_group("with -- and the flags of a Megatron pretrain command, which say all of the above")
    run.add_argument("--world-size", type=_positive, help="ranks of the run; as few as its parallel sizes allow")
    run.add_argument("--full", action="store_true", help="a line for each parameter, not for all that are alike")
    run.add_argument("--json", metavar="FILE", help="write the optimizer of each parameter there, too")


def _print_plan(options: argparse.Namespace, flags: Sequence[str] | None) -> int:
    if flags is not None:
        return _print_planned_run(options, flags)
    if of_run := _given(options) & _OF_RUN:
        raise ValueError(f"{', '.join(sorted(of_run))} would have no effect without -- and the flags of a run")
    iteration = NewtonSchulz(steps=options.muon_num_ns_steps, coefficient_type=options.muon_coefficient_type)
    share, itemsize = 1.0 if options.dense else 0.5, options.exchange_itemsize
    work = Work(schedule=iteration.schedule, restarts=iteration.restarts, share=share, itemsize=itemsize)
    rates = _rates(options)
    sizes = {field.name: getattr(options, field.name) for field in fields(Parallel)}
    parallel = Parallel(**sizes | {"expert_tensor": options.expert_tensor or options.tensor})
    model, mode = _model(options), options.muon_tp_mode
    check_sizes(vars(model) | _named_by_megatron(parallel))
    for needed, names in _NEEDS.items():
        if getattr(model, needed) is None and (unused := sorted(_given(options) & names)):
            raise ValueError(f"{', '.join(unused)} would have no effect without --{needed.replace('_', '-')}")
    if model.first_dense_layers > model.num_layers:
        raise ValueError(f"--first-dense-layers {model.first_dense_layers} is more than {model.num_layers} layers")
    if parallel.pipeline > model.num_layers:
        raise ValueError(f"--pipeline-model-parallel-size {parallel.pipeline} is more than {model.num_layers} layers")
    workspace = Workspace(bytes=workspace_from(options)["workspace"])
    if options.sweep_gpus is not None:
        return _print_sweep(options, model, parallel, work, rates, workspace)
    if options.picture is not None:
        raise ValueError("--picture would have no effect without --sweep-gpus")
    stage = dealt_matrices(model, parallel, work, mode, rates, split_gate_up=options.split_gate_up)
    plan = make_plan(stage.matrices, mode, work, rates, workspace=workspace)
    deals = stage.deals
    if options.kernel_times is not None:  # not for the plan: a run makes it before its ranks agree on times
        times, source = saved_times(options.kernel_times, ("tf32",) if itemsize == 4 else ("bf16", "fp16"))
        work = replace(work, share=shares(times))
        print(f"Symmetric products by {fastest(times)}, as measured on {source}.\n")
        stage = dealt_matrices(model, parallel, work, mode, rates, split_gate_up=options.split_gate_up)
    print(explain(plan, work, rates, workspace))
    for deal in deals:
        print(f"\n{deal}.")
    gpus = parallel.tensor * parallel.pipeline * parallel.data
    point = point_of(stage, plan, gpus, parallel.data, work, rates, workspace)
    print(f"\n{swept_table([point])}\n\n{_OF_POINTS}")
    _print_notes(options, model, parallel, [point])
    return 0


def _print_notes(options: argparse.Namespace, model: Model, parallel: Parallel, points: Sequence[Point]) -> None:
    has = math.inf if options.gpu is None else GPUS[options.gpu].memory
    if full := [f"{each.gpus:,}" for each in points if sum(each.memory) > has]:
        gpus = f"{', '.join(full)} GPU{'s' * (full != ['1'])}"
        print(f"\nnote: with {gpus} that is more memory than the {has / 1e9:.0f} GB of one {options.gpu}.")
    if model.num_layers % parallel.pipeline:
        shared = f"{model.num_layers} layers are not shared equally by {parallel.pipeline} pipeline stages"
        print(f"\nnote: {shared}. This is the plan of a longest stage of {-(-model.num_layers // parallel.pipeline)}.")
        print("Megatron takes --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers for that.")


def _print_sweep(
    options: argparse.Namespace, model: Model, parallel: Parallel, work: Work, rates: Rates, workspace: Workspace
) -> int:
    if given := _given(options) & {"--data-parallel-size", "--kernel-times"}:
        raise ValueError(f"{', '.join(sorted(given))} would have no effect with --sweep-gpus")
    if options.picture is not None and not (folder := Path(options.picture).absolute().parent).is_dir():
        raise ValueError(f"--picture {options.picture}: there is no folder {folder}")
    of_stage = math.lcm(parallel.tensor, parallel.expert_tensor * parallel.expert)
    gpus = numbers_of(options.sweep_gpus, of_stage * parallel.pipeline)
    mode, split = options.muon_tp_mode, options.split_gate_up
    points = swept(model, parallel, gpus, work, mode, rates, workspace, split_gate_up=split)
    print(f"{swept_table(points)}\n\n{where_it_stops(points, work, mode, rates)}\n")
    modelled = f"{rates.flops / 1e12:,.4g} TFLOP/s and {rates.bytes / 1e9:,.4g} GB/s"
    print(f"Modelled at {modelled}, nothing overlapped.\n{_OF_POINTS}")
    _print_notes(options, model, parallel, points)
    if options.picture is not None:
        draw(points, options.picture)
        print(f"\nDrawn in {options.picture}.")
    return 0


def _print_planned_run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    if not flags:
        raise ValueError("expected the flags of a pretrain command after --")
    given = _given(options)
    unused = sorted(given - _OF_RUN)
    if unused:
        more = "; ranks are data-parallel by --world-size N before --" if "--data-parallel-size" in given else ""
        if {"--gpu", "--tflops", "--bandwidth", "--latency", "--kernel-times"} & given:
            assumed = f"{DEFAULT_RATES.flops / 1e12:g} TFLOP/s and {DEFAULT_RATES.bytes / 1e9:g} GB/s"
            more = f", and it plans with {assumed} on every GPU; plan --model takes other rates"
        raise ValueError(f"{', '.join(unused)} would have no effect: the flags after -- say all of the run{more}")
    if misplaced := [flag for flag in flags if flag.partition("=")[0] in ("--world-size", "--data-parallel-size")]:
        raise ValueError(f"{misplaced[0]} is no flag of Megatron's: give --world-size N, before --")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the CPU stands in for the run's GPUs
    from megatron_eopt.megatron.described import planned_run

    begun = time.monotonic()

    def progress(done: int, stages: int) -> None:
        if time.monotonic() - begun > _QUIET:
            print(f"megatron-eopt plan: {done} of {stages} pipeline stages planned", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, of missing packages
        try:
            run = planned_run(flags, options.world_size, progress)
        except ValueError as error:
            if missing := re.search(r"assert args\.(?:encoder_)?(\w+) is not None", str(error)):
                raise ValueError(f"the flags after -- lack --{missing[1].replace('_', '-')}") from None
            if "world size" not in str(error) and "data_parallel_size" not in str(error):
                raise
            ranks = options.world_size or "as few as the parallel sizes allow, by default"
            raise ValueError(f"{error}; the world size is that of --world-size before -- ({ranks})") from None
    print(f"{run.layout}\n\n{table(run.families, full=options.full)}")
    named = ("pipeline stage", "matrices", *(f"{kind} MB" for kind in run.stages[0][1]._fields), "all MB")
    lines = [[str(i), f"{n:,}", *map(megabytes, (*held, sum(held)))] for i, (n, held) in enumerate(run.stages)]
    print("\nmemory of each GPU:", *aligned(named, lines, named), sep="\n")
    print(
        "state: with fp32 copies of bf16 parameters; of whole parameters that are dealt to data-parallel ranks, what "
        "the fullest\nrank holds at most. Activations are not counted. Matrices are those of all ranks of a stage.\n"
        f"\nA step takes the longest in pipeline stage {run.slowest}: {figure(run.seconds * 1e3)} ms on its busiest "
        "rank. That is 10 ps an entry for\nmomentum, decay and update, and what this rank orthogonalizes:"
    )
    for explained in run.explained:
        print(f"\n{explained}")
    for kind, messages in (("warning", run.warnings), ("note", run.notes), ("problem", run.problems)):
        for message in messages:
            print(f"\n{kind}: {message}")
    if options.json is not None:
        write_json(run.families, options.json)
    return 1 if run.problems else 0


def _given(options: argparse.Namespace) -> set[str]:
    plan: argparse.ArgumentParser = options.parser
    names = {action.dest: action.option_strings[0] for action in plan._actions}  # there is no public way
    return {names[name] for name, value in vars(options).items() if name in names and value != plan.get_default(name)}


def _named_by_megatron(parallel: Parallel) -> dict[str, int]:
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "data_parallel_size": parallel.data,
    }


def _rates(options: argparse.Namespace) -> Rates:
    published = DEFAULT_RATES if options.gpu is None else GPUS[options.gpu].rates
    flops = published.flops if options.tflops is None else options.tflops * 1e12
    sent = published.bytes if options.bandwidth is None else options.bandwidth * 1e9
    return Rates(flops=flops, bytes=sent, latency=options.latency * 1e-6)


def _model(options: argparse.Namespace) -> Model:
    given = {x.name: value for x in fields(Model) if (value := getattr(options, x.name)) is not None}
    if options.model is not None:
        return replace(MODELS[options.model], **given)
    missing = [field.name for field in fields(Model) if field.default is MISSING and field.name not in given]
    if missing:
        raise ValueError(f"name a --model, or give {', '.join(f'--{name.replace("_", "-")}' for name in missing)}")
    return Model(**given)


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
