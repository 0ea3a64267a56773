"""The part of ``make gpu`` that times iterations in Megatron with Transformer Engine, by ours and by Megatron's own."""

from statistics import median
from typing import NamedTuple

from gpu_training import DISTRIBUTED, MUON, OURS, megatron
from gpu_verdicts import Run, needs
from training import read_times

ALONE = "scripts/bench/megatron_alone.py"
SECONDS_OF_ONE = 60  # a training is not begun in the last of the part
WARM_UP = 5  # iterations that are not timed
OFF_BY_FP8 = 0.01  # of the loss

# 4 layers, each with 32 experts of which a token takes 4
EXPERTS = (
    "--num-layers 4 --ffn-hidden-size 768 --num-experts 32 --moe-router-topk 4 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
)
ADAM = "--optimizer adam"
SILENT = "--optimizer-metrics-interval 0"  # measured in no step, as Adam
FP8 = "--fp8-format hybrid"


class Row(NamedTuple):
    """A training: its flags, how many iterations, and what starts it."""

    flags: str
    steps: int = 25
    launcher: str = OURS


ROWS = {  # those first that decide
    "Adam": Row(f"{DISTRIBUTED} {ADAM}"),
    "Muon": Row(f"{DISTRIBUTED} {MUON}"),
    "SOAP": Row(f"{DISTRIBUTED} --optimizer soap --soap-precondition-frequency 1 {SILENT}", 12),
    "adaptive_muon": Row(f"{DISTRIBUTED} {MUON} --optimizer adaptive_muon"),
    "experts: Adam": Row(f"{DISTRIBUTED} {EXPERTS} {ADAM}"),
    "experts: Muon": Row(f"{DISTRIBUTED} {EXPERTS} {MUON}"),
    "experts: Muon, figures in each step": Row(f"{DISTRIBUTED} {EXPERTS} {MUON} --optimizer-metrics-interval 1"),
    "Muon in FP8": Row(f"{DISTRIBUTED} {MUON} {FP8}"),
    "Megatron's Muon": Row("--optimizer muon --muon-momentum 0.95 --muon-extra-scale-factor 0.2", 25, ALONE),
    "Megatron's SOAP": Row("--optimizer soap", 8, ALONE),
}


def iterations(run: Run) -> None:
    """Milliseconds of an iteration of 124M and of experts in Megatron with Transformer Engine, bf16 and FP8."""
    needs("megatron")
    if run.on_gpu:
        needs("transformer_engine")
    losses = {}
    for name, row in ROWS.items():
        if not run.has_time(name, SECONDS_OF_ONE):
            continue
        if not run.on_gpu and FP8 in row.flags:
            run.judge(name, None, "", reason="FP8 needs a GPU")
            continue
        with run.check(name):
            if row.launcher == ALONE:
                needs("emerging_optimizers")
            log = "".join(letter for letter in name if letter.isalnum())
            warm_up, steps = (1, 3) if run.tiny else (WARM_UP, row.steps)
            found = losses[name] = megatron(run, log, row.flags, steps, launcher=row.launcher)
            ms = 1e3 * median(read_times((run.work / f"{log}.log").read_text().splitlines())[warm_up:])
            run.figures[name] = {"losses": found, "ms": ms}
            run.tell(name, ms, "ms", f"loss {found[1]:.3f} and {found[steps]:.3f} in iterations 1 and {steps}")
    if "Muon in FP8" in losses:
        bf16, fp8 = (losses[name][ROWS[name].steps] for name in ("Muon", "Muon in FP8"))
        run.at_most("Muon in FP8: loss over that in bf16", fp8 / bf16, 1 + OFF_BY_FP8)
