"""Flags of ``megatron-eopt plan``; without torch, for its help."""

import argparse
import math
from dataclasses import fields
from typing import get_args

from megatron_eopt.parallel.rates import DEFAULT_RATES
from megatron_eopt.parallel.records import TpMode
from megatron_eopt.parallel.workspace import Workspace
from megatron_eopt.tools.plan.given import check
from megatron_eopt.tools.plan.sizes import GPUS, MODELS, Model, Parallel, flag

_RANKS = {  # of Parallel
    "tensor": ("--tensor-model-parallel-size", None),
    "expert_tensor": ("--expert-tensor-parallel-size", "of experts (as --tensor-model-parallel-size)"),
    "expert": ("--expert-model-parallel-size", None),
    "pipeline": ("--pipeline-model-parallel-size", None),
    "data": ("--data-parallel-size", "over which the layer-wise distributed optimizer deals whole parameters (1)"),
}
_SAID = {  # of Model
    "ffn_hidden_size": "four times --hidden-size, with --swiglu two thirds of that",
    "swiglu": "fc1 has gate and up",
    "split_gate_up": "gate and up as two matrices; Megatron has one",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.usage = "%(prog)s [OPTIONS, which --help lists] [-- FLAGS OF A RUN]"
    parser.set_defaults(check=check)
    model = parser.add_argument_group("model")
    model.add_argument("--model", choices=MODELS, metavar="NAME", help=f"one of {', '.join(MODELS)}")
    for field in fields(Model):
        if field.type is bool:
            model.add_argument(flag(field.name), action="store_true", default=None, help=_SAID[field.name])
        else:
            model.add_argument(flag(field.name), type=_positive, metavar="N", help=_SAID.get(field.name))

    ranks = parser.add_argument_group("ranks")
    ranks.add_argument(
        "--sweep-gpus", metavar="FIRST..LAST", help="a line for each doubling of GPUs, and where to stop"
    )
    for field in fields(Parallel):
        name, what = _RANKS[field.name]
        ranks.add_argument(name, dest=field.name, type=_positive, default=field.default, metavar="N", help=what)
    ranks.set_defaults(expert_tensor=None)

    muon = parser.add_argument_group("Muon, by the flags of a run")
    muon.add_argument("--muon-tp-mode", choices=get_args(TpMode))
    muon.add_argument("--muon-coefficient-type", metavar="SET")
    muon.add_argument("--muon-num-ns-steps", type=_positive, metavar="N")
    muon.add_argument("--dense", action="store_true", help="without kernels for symmetric products")
    muon.add_argument("--exchange-itemsize", type=int, choices=(2, 4), default=2, help="bytes of an entry sent (2)")
    workspace = Workspace.bytes / 2**30
    muon.add_argument(
        "--optimizer-workspace",
        type=float,
        default=workspace,
        metavar="GIB",
        help=f"for temporaries of a step ({workspace:g})",
    )

    rates = parser.add_argument_group("rates of one rank")
    rates.add_argument("--gpu", choices=GPUS, help="half of its published operations, two thirds of its NVLink")
    rates.add_argument(
        "--tflops", type=_above_zero, metavar="N", help=f"TFLOP/s (of --gpu, or {DEFAULT_RATES.flops / 1e12:g})"
    )
    rates.add_argument(
        "--bandwidth", type=_above_zero, metavar="N", help=f"GB/s sent (of --gpu, or {DEFAULT_RATES.bytes / 1e9:g})"
    )
    latency = DEFAULT_RATES.latency * 1e6
    rates.add_argument(
        "--latency", type=float, default=latency, metavar="N", help=f"microseconds of a collective ({latency:g})"
    )

    run = parser.add_argument_group("before -- and the flags of a Megatron run, which say the above")
    run.add_argument(
        "--world-size", type=_positive, metavar="N", help="ranks of the run; as few as its parallel sizes allow"
    )
    run.add_argument("--full", action="store_true", help="a line for each parameter, not for all that are alike")
    run.add_argument("--json", metavar="FILE", help="write the optimizer of each parameter there, too")


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
