"""What train_fsdp2.py and train_ddp.py share: a small transformer on bytes, its data, its arguments and the loop."""

import argparse
import ast
import logging
import os
import shlex
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, CosineAnnealingWarmRestarts, LRScheduler
from torch.optim.optimizer import Optimizer

from megatron_eopt.plain import build_optimizer, list_optimizers
from megatron_eopt.settings.presets import TO_BEGIN_WITH

BYTES = 256
CONTEXT = 64
CORPUS = 200_000  # bytes of docstrings: enough for some hundred small batches

ADAMW_LR = 3e-3  # trains this model well
OPTIONS: dict[str, dict[str, Any]] = {"spectron": {"rank": 16}, "scion": {"radius": 3.0}}  # for so small a model


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each added to its normalized input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations (batch x length x width) to such."""
        normed = self.attention_norm(x)
        q, k, v = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        x = x + self.attended(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.mlp_norm(x)).relu().square())


class SmallModel(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch x length) to logits (batch x length x 256)."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def docstrings() -> Tensor:
    """Docstrings of Python's standard library, which needs no download, as bytes."""
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                texts.append(ast.get_docstring(node) or "")
        if sum(map(len, texts)) > CORPUS:
            break
    return torch.tensor(list("\n".join(filter(None, texts)).encode()), dtype=torch.long)


def batch(corpus: Tensor, step: int, size: int) -> tuple[Tensor, Tensor]:
    """This rank's share of a batch: tokens and those that follow them. A step's batch is the same in every run."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(corpus) - CONTEXT, (size,), generator=generator)
    own = starts.chunk(dist.get_world_size())[dist.get_rank()]
    text = torch.stack([corpus[start : start + CONTEXT + 1] for start in own.tolist()])
    return text[:, :-1], text[:, 1:]


def parse_arguments(description: str) -> argparse.Namespace:
    """The command line of both examples."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--optimizer", choices=list_optimizers(), default="muon")
    parser.add_argument("--lr", type=float, help=f"by default what is recommended beside {ADAMW_LR:g} of AdamW")
    parser.add_argument("--schedule", choices=["constant", "cosine", "restarts"], default="constant")
    parser.add_argument("--restart-every", type=int, default=50, help="steps, for --schedule restarts")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of all ranks together")
    parser.add_argument("--save", type=Path, help="where checkpoints go, each in STEP, the last step's too")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--load", type=Path, help="the checkpoint to go on from, such as SAVE/100")
    parser.add_argument(
        "--replicas", type=int, default=1, help="FSDP2 alone: copies of the model, each in shards (HSDP)"
    )
    return parser.parse_args()


def optimizer_of(model: nn.Module, arguments: argparse.Namespace, **options: Any) -> Optimizer:
    """The optimizer that the command line asks for, as it is recommended."""
    name = arguments.optimizer
    lr = ADAMW_LR * TO_BEGIN_WITH[name].rate if arguments.lr is None else arguments.lr
    return build_optimizer(model, name, lr=lr, options={**OPTIONS.get(name, {}), **options})


def scheduler_of(optimizer: Optimizer, arguments: argparse.Namespace) -> LRScheduler:
    """A scheduler of torch; it multiplies the rate of every group."""
    if arguments.schedule == "cosine":
        return CosineAnnealingLR(optimizer, T_max=arguments.steps)
    if arguments.schedule == "restarts":
        return CosineAnnealingWarmRestarts(optimizer, T_0=arguments.restart_every)
    return ConstantLR(optimizer, factor=1.0)


@contextmanager
def ranks() -> Iterator[torch.device]:
    """The process group of what torchrun started, over NCCL where there is a GPU for each rank, else over gloo.

    Yields:
        the device of this rank.
    """
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise SystemExit(
            f"{sys.argv[0]}: torchrun has to start the ranks, also where there is one alone. Write\n"
            f"    torchrun --nproc-per-node 2 {shlex.join(sys.argv)}"
        )
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()
        # a thread of gloo may still wait to free the tensors of the last exchange; a process that ends then aborts
        time.sleep(0.2)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    arguments: argparse.Namespace,
    first: int,
    save: Callable[[int], None],
) -> None:
    """Train up to the last step, and print the loss of each.

    Args:
        model: as it lies on the ranks.
        optimizer: its.
        scheduler: the optimizer's.
        arguments: the command line.
        first: steps that were made before.
        save: called with the number of steps so far where a checkpoint is due.
    """
    corpus = docstrings()
    device = next(model.parameters()).device
    for step in range(first + 1, arguments.steps + 1):
        tokens, targets = (x.to(device) for x in batch(corpus, step, arguments.batch_size))
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item() / dist.get_world_size()} lr {scheduler.get_last_lr()}", flush=True)
        if arguments.save and (step % arguments.save_every == 0 or step == arguments.steps):
            save(step)
