"""The parts of ``make gpu`` that train: runs that are saved and resumed, and a GPT with Muon beside one with Adam."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import demo
import loopback
import torch
import torch.distributed.checkpoint as dcp
from gpu_verdicts import Run, draw, execute, needs
from torch import Tensor
from training import read_times

from megatron_eopt.checkpoints.contents import newest, read_contents

FSDP2 = "examples/train_fsdp2.py --optimizer muon --schedule restarts --restart-every 6 --steps 10"
LOSS = re.compile(r"step (\d+) loss (\S+)")

# A GPT of 124M on bytes with the vocabulary of GPT-2.
GPT = (
    "--num-layers 12 --hidden-size 768 --ffn-hidden-size 3072 --num-attention-heads 12 --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --seq-length 1024 --max-position-embeddings 1024 "
    "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 50256 --micro-batch-size 8 "
    "--global-batch-size 64"
)
OF_CPU = "--use-cpu-initialization --distributed-backend gloo "  # of the demo's flags
RUN = (
    "--bf16 --log-interval 1 --eval-iters 0 --eval-interval 1000000 --split 100,0,0 --num-workers 0 --lr 6e-4 "
    "--min-lr 6e-5 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1"
)
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
OURS = "-m megatron_eopt.run"
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
# measured in no step, as Adam
MUON = "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-preset match_adamw --optimizer-metrics-interval 0"
STEPS = 250  # of Muon beside Adam


def resume(run: Run) -> None:
    """Megatron in bf16 with the distributed optimizer and both overlaps; FSDP2 on one rank: each resumed bitwise."""
    with run.check("Megatron, resumed"):
        needs("megatron")
        folders = [run.work / name for name in ("straight", "resumed")]
        losses = megatron(run, "straight", f"{DISTRIBUTED} {MUON} --save {folders[0]} --save-interval 3", 6)
        onwards = f"{DISTRIBUTED} {MUON} --load {folders[0]} --ckpt-step 3 --save {folders[1]} --save-interval 6"
        resumed_losses = megatron(run, "resumed", onwards, 6, first=4)
        same = resumed_losses == {k: losses[k] for k in resumed_losses}
        run.judge("Megatron, resumed: losses", same, "the same", reason=f"{losses}, {resumed_losses}")
        one, other = (stored(newest(folder)) for folder in folders)
        differing = sorted(key for key in one.keys() | other if key not in one or key not in other)
        differing += [key for key in one.keys() & other if not torch.equal(one[key], other[key])]
        run.judge("Megatron, resumed: checkpoint", bool(one) and not differing, "the same", reason=f"{differing}")
    with run.check("FSDP2, resumed: losses"):
        straight = fsdp2(run, "straight", f"--save {run.work}/fsdp2 --save-every 8")
        resumed = fsdp2(run, "resumed", f"--load {run.work}/fsdp2/8")
        said = f"{straight}, {resumed}"
        run.judge("FSDP2, resumed: losses", resumed == {k: straight[k] for k in (9, 10)}, "the same", reason=said)


def fsdp2(run: Run, name: str, flags: str) -> dict[int, str]:
    """The losses of the example under FSDP2, as it prints them."""
    found = LOSS.findall(launch(run, f"fsdp2-{name}", f"{FSDP2} {flags}"))
    return {int(step): loss for step, loss in found}


def launch(run: Run, name: str, program: str, **environment: str) -> str:
    """What a program of one rank prints; its environment is as torchrun makes it.

    Raises:
        RuntimeError: it failed.
    """
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    store = loopback.listening_store()
    address = loopback.environment(store)
    code, said = execute(run, name, [sys.executable, *program.split()], **ranks, **address, **environment)
    if code:
        raise RuntimeError(f"{name} ended with exit code {code}: {said[-1500:]}")
    return said


def command(run: Run, flags: str, steps: int, launcher: str = OURS) -> str:
    """A training in Megatron: of 124M on a GPU, of the demo's model in a dry run; the last of a flag counts."""
    model = f"{demo.MODEL} --micro-batch-size 2 --global-batch-size 2" if run.tiny else GPT
    data = f"--data-path {run.work}/stdlib --data-cache-path {run.work}/cache"
    script = f"{launcher} {'' if run.on_gpu else '--cpu'} examples/pretrain_gpt.py"
    return f"{script} {model} {kernels_of(run)} {RUN} {data} --train-iters {steps} {flags}"


def kernels_of(run: Run) -> str:
    """Flags of Transformer Engine's kernels where it is installed, otherwise of Megatron's own."""
    if not run.on_gpu:
        return demo.CPU
    if find_spec("transformer_engine"):
        return "--no-gradient-accumulation-fusion"  # which needs apex
    return demo.CPU.replace(OF_CPU, "")


def megatron(run: Run, name: str, flags: str, steps: int, first: int = 1, launcher: str = OURS) -> demo.Losses:
    """The losses of a training in Megatron, which is deterministic on a GPU if it is saved."""
    if not (run.work / "stdlib.bin").exists():
        launch(run, "data", f"examples/stdlib_dataset.py {run.work}/stdlib")
    exact = run.on_gpu and "--save" in flags
    if exact:
        flags += " --deterministic-mode" + (" --attention-backend fused" if find_spec("transformer_engine") else "")
    given = command(run, flags, steps, launcher)
    said = launch(run, name, given, CUDA_DEVICE_MAX_CONNECTIONS="1", **(DETERMINISTIC if exact else {}))
    return demo.read_losses(said.splitlines(), first, steps)


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint of Megatron."""
    found = {key: torch.empty(each.shape, dtype=each.dtype) for key, each in read_contents(folder).tensors.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def gpt(run: Run) -> None:
    """A GPT of 124M in Megatron with Muon and with Adam at one learning rate, not tuned; a picture of the losses."""
    needs("megatron")
    losses, steps = {}, 4 if run.tiny else STEPS
    for name, flags in {"muon": MUON, "adam": "--optimizer adam"}.items():
        losses[name] = megatron(run, name, f"{DISTRIBUTED} {flags}", steps)
        times = read_times((run.work / f"{name}.log").read_text().splitlines())
        run.figures[name] = {"losses": losses[name], "seconds of a step": sorted(times)[len(times) // 2]}
    ratio = demo.final_loss(losses["muon"]) / demo.final_loss(losses["adam"])
    run.at_most(f"124M: loss of Muon over Adam's, mean of the last {demo.LAST} steps", ratio, 1.0, of_gpu=True)
    title = "a GPT of 124M in Megatron-Core, bf16"
    with run.check("a picture of the losses"):
        draw({title: losses}, "step", "training loss (nats per byte)", run.out / "gpt.png")
