"""The part of ``make gpu`` that trains in Megatron with Transformer Engine, by ours and by Megatron's own."""

import re
import sys
from importlib.util import find_spec
from statistics import median
from typing import NamedTuple

import demo
import loopback
from gpu_run import Run, needs

OURS = "-m megatron_eopt.run"
ALONE = "scripts/bench/megatron_alone.py"
SECONDS_OF_ONE = 60  # a training is not begun in the last of the part
WARM_UP = 5  # iterations that are not timed
OFF_BY_FP8 = 0.01  # of the loss
TOKENS = 2**19  # of a training step of which Muon may take so much more than fused Adam
OVER_ADAM = 1.03

# A GPT of 124M on bytes with the vocabulary of GPT-2.
LENGTH, BATCH = 1024, 64
GPT = (
    "--num-layers 12 --hidden-size 768 --ffn-hidden-size 3072 --num-attention-heads 12 --normalization RMSNorm "
    f"--disable-bias-linear --position-embedding-type rope --seq-length {LENGTH} --max-position-embeddings {LENGTH} "
    "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 50256 --micro-batch-size 8 "
    f"--global-batch-size {BATCH}"
)
# 4 layers, each with 32 experts of which a token takes 4
EXPERTS = (
    "--num-layers 4 --ffn-hidden-size 768 --num-experts 32 --moe-router-topk 4 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
)
RUN = (
    "--bf16 --log-interval 1 --eval-iters 0 --eval-interval 1000000 --split 100,0,0 --num-workers 0 --lr 6e-4 "
    "--min-lr 6e-5 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1"
)
OF_CPU = "--use-cpu-initialization --distributed-backend gloo "  # of the demo's flags
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
ADAM = "--optimizer adam"
SILENT = "--optimizer-metrics-interval 0"  # measured in no step, as Adam
MUON = f"--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-preset match_adamw {SILENT}"
FP8 = "--fp8-format hybrid"
_TIME = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")


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


def megatron(run: Run) -> None:
    """Milliseconds and losses of 124M and of experts in Megatron with Transformer Engine, bf16 and FP8."""
    needs("megatron")
    if run.on_gpu:
        needs("transformer_engine")
    launch(run, "data", f"examples/stdlib_dataset.py {run.work}/stdlib")
    times: dict[str, float] = {}
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
            warm_up, steps = (1, 3) if run.tiny else (WARM_UP, row.steps)
            log = "".join(letter for letter in name if letter.isalnum())
            lines = launch(run, log, command(run, row, steps), CUDA_DEVICE_MAX_CONNECTIONS="1").splitlines()
            found = losses[name] = demo.read_losses(lines, 1, steps)
            times[name] = median([float(ms) for line in lines for ms in _TIME.findall(line)][warm_up:])
            run.figures[name] = {"losses": found, "ms": times[name]}
            run.tell(name, times[name], "ms", f"loss {found[1]:.3f} and {found[steps]:.3f} in steps 1 and {steps}")
    if {"Adam", "Muon"} <= times.keys():
        adam = times["Adam"] * TOKENS / (BATCH * LENGTH)
        more = 1 + (times["Muon"] - times["Adam"]) / adam
        run.at_most("a training step of 0.5M tokens with Muon, over Adam's", more, OVER_ADAM, of_gpu=True)
    if "Muon in FP8" in losses:
        bf16, fp8 = (losses[name][ROWS[name].steps] for name in ("Muon", "Muon in FP8"))
        run.at_most("Muon in FP8: loss over that in bf16", fp8 / bf16, 1 + OFF_BY_FP8)


def launch(run: Run, name: str, program: str, **environment: str) -> str:
    """What a program of one rank prints; its environment is as torchrun makes it.

    Raises:
        RuntimeError: it failed.
    """
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    store = loopback.listening_store()
    address = loopback.environment(store)
    code, said = run.execute(name, [sys.executable, *program.split()], **ranks, **address, **environment)
    if code:
        raise RuntimeError(f"{name} ended with exit code {code}: {said[-1500:]}")
    return said


def command(run: Run, row: Row, steps: int) -> str:
    """A training in Megatron: of 124M on a GPU, of the demo's model in a dry run; the last of a flag counts."""
    model = f"{demo.MODEL} --micro-batch-size 2 --global-batch-size 2" if run.tiny else GPT
    data = f"--data-path {run.work}/stdlib --data-cache-path {run.work}/cache --train-iters {steps}"
    script = f"{row.launcher} {'' if run.on_gpu else '--cpu'} examples/pretrain_gpt.py"
    return f"{script} {model} {kernels_of(run)} {RUN} {data} {row.flags}"


def kernels_of(run: Run) -> str:
    """Flags of Transformer Engine's kernels where it is installed, otherwise of Megatron's own."""
    if not run.on_gpu:
        return demo.CPU
    if find_spec("transformer_engine"):
        return "--no-gradient-accumulation-fusion"  # which needs apex
    return demo.CPU.replace(OF_CPU, "")
