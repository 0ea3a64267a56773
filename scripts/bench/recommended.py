"""Train a small GPT in plain torch by the recommended line of each optimizer, and by AdamW at three rates.

    python scripts/bench/recommended.py --docs

The line is ``build_optimizer(model, NAME, lr=RATE)``, with the rate that is best for AdamW times what the table of
settings to begin with says of the optimizer. Nothing else is chosen. All runs take twenty minutes of an idle core. Each
is kept in ``scripts/bench/results/recommended.json``, and what is there is not trained again. ``--docs`` puts the table
into the page of benchmarks.
"""

import argparse
import json
import math
import statistics
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from pages import BENCHMARKS, markdown, put
from timing import ROOT, machine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from megatron_eopt import build_optimizer
from megatron_eopt.settings.presets import TO_BEGIN_WITH

sys.path.insert(0, str(ROOT / "examples"))

from small_model import CONTEXT, SmallModel

RESULTS = ROOT / "scripts" / "bench" / "results" / "recommended.json"
RATES = (1e-3, 3e-3, 1e-2)  # of AdamW
NAMES = ("muon", "adaptive_muon", "soap", "kl_shampoo")
SEEDS = (0, 1, 2)
WIDTH, LAYERS, HEADS = 128, 5, 4  # 1.06 million parameters
STEPS, WARMUP, BATCH = 300, 20, 8
HELD_OUT = 256  # sequences
ONE_IN = 10  # files that no run trains on


def text() -> tuple[Tensor, Tensor]:
    """Bytes of the top-level modules of the standard library: to train on, and every tenth one held out."""
    train = list[bytes]()
    held_out = list[bytes]()
    for number, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        (held_out if number % ONE_IN == ONE_IN - 1 else train).append(path.read_bytes())
    return _as_tokens(train), _as_tokens(held_out)


def _as_tokens(texts: Iterable[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8).long()


def loss_of(model: nn.Module, corpus: Tensor, sequences: int, generator: torch.Generator) -> Tensor:
    """The loss on sequences that begin anywhere."""
    starts = torch.randint(len(corpus) - CONTEXT, (sequences,), generator=generator)
    windows = torch.stack([corpus[start : start + CONTEXT + 1] for start in starts.tolist()])
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def factor_at(step: int) -> float:
    """Of the rates: a linear warm-up, and a cosine down to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def train(name: str, lr: float, seed: int) -> float:
    """The held-out loss of a run."""
    corpus, held_out = text()
    torch.manual_seed(seed)
    model = SmallModel(WIDTH, LAYERS, HEADS)
    optimizer = build_optimizer(model, name, lr=lr)
    scheduler = LambdaLR(optimizer, factor_at)
    generator = torch.Generator().manual_seed(1000 + seed)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, corpus, BATCH, generator).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        return loss_of(model, held_out, HELD_OUT, torch.Generator().manual_seed(0)).item()


class Runs:
    """Losses by optimizer, rate and seed, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.losses: dict[str, float] = json.loads(path.read_text())["losses"] if path.exists() else {}

    def mean(self, name: str, lr: float) -> float:
        """The mean of all seeds, trained where they are missing."""
        return statistics.fmean(self.of(name, lr, seed) for seed in SEEDS)

    def of(self, name: str, lr: float, seed: int) -> float:
        """One loss."""
        key = f"{name} {lr:g} {seed}"
        if key not in self.losses:
            self.losses[key] = round(train(name, lr, seed), 4)
            print(f"{key}: {self.losses[key]}", flush=True)
            self.path.write_text(json.dumps({"machine": machine(), "losses": self.losses}, indent=1) + "\n")
        return self.losses[key]


def best_rate(runs: Runs) -> float:
    """AdamW's."""
    return min(RATES, key=lambda rate: runs.mean("adamw", rate))


def table(runs: Runs) -> str:
    """The table of the page."""
    best = best_rate(runs)
    lines = [("adamw", rate) for rate in RATES]
    lines += [(name, best * TO_BEGIN_WITH[name].rate) for name in NAMES]
    rows = []
    for name, rate in lines:
        losses = [runs.of(name, rate, seed) for seed in SEEDS]
        less = [loss - runs.of("adamw", best, seed) for loss, seed in zip(losses, SEEDS, strict=True)]
        difference = "-" if (name, rate) == ("adamw", best) else f"{statistics.fmean(less):+.3f}"
        of_seeds = ", ".join(f"{loss:.3f}" for loss in losses)
        call = f'`build_optimizer(model, "{name}", lr={rate:g})`'
        rows.append((call, f"{statistics.fmean(losses):.3f}", of_seeds, difference))
    return markdown(("the line", "held-out loss", "of three seeds", "less AdamW's best"), rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="write the table into the page, too")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    runs = Runs(RESULTS)
    made = table(runs)
    print(made)
    if options.docs:
        put(BENCHMARKS, "recommended", made)


if __name__ == "__main__":
    main()
