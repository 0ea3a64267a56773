"""What a momentum in bf16 costs: the losses of the demo's GPT, and how far its momenta are from fp32.

    python scripts/bench/momentum_dtype.py --docs

Muon trains at its recommended flags with momenta in fp32, and rounded at random to bf16 (--optimizer-momentum-dtype).
To round to the nearest, which no flag does, the training process replaces the rounding. An error is what a momentum has
beyond the one in fp32 of the same gradients. Each step multiplies it by the decay rate and adds what the rounding did,
so no second run is needed to know it.
"""

import argparse
import json
import runpy
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.step.foreach import Tensors

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

OUT = ROOT / "bench-out" / "momentum-dtype"
SETTINGS = ROOT / "docs" / "optimizers.md"
PAGE = ROOT / "docs" / "measured.md"
# Kind -> what the table calls it, and the flag's value.
KINDS = {
    "fp32": ("fp32", "fp32"),
    "control": ("fp32, the rate larger by 1e-6", "fp32"),
    "random": ("bf16, at random", "bf16"),
    "nearest": ("bf16, to the nearest", "bf16"),
}
TRAIN = "--rounded"  # the first argument of a process that trains


def train(kind: str, beta: float, written: Path, flags: Sequence[str]) -> None:
    """Train in this process, and write down the errors of the momenta in the end."""
    from megatron_eopt.step.momenta import momentum_stack

    store, errors, kept = momentum_stack.store, dict[int, Tensor](), dict[int, Tensor]()

    def followed(momenta: Tensors, averages: Tensors, step: int) -> None:
        if kind == "nearest":
            torch._foreach_copy_(list(momenta), list(averages))
        else:
            store(momenta, averages, step)
        for m, average in zip(momenta, averages, strict=True):
            kept[m.data_ptr()] = new = m.float()
            errors.setdefault(m.data_ptr(), torch.zeros_like(average)).mul_(beta).add_(new - average)

    momentum_stack.store = followed
    sys.argv = ["pretrain_gpt.py", *flags]
    runpy.run_path(str(ROOT / "examples" / "pretrain_gpt.py"), run_name="__main__")
    found = {}
    if errors:
        pairs = [(kept[key] - error, error) for key, error in errors.items()]
        exact, error = (torch.cat([x.flatten() for x in several]) for several in zip(*pairs, strict=True))
        factor = NewtonSchulz(fp32_matmul_prec="highest")
        factors = [(factor(m), factor(m + error)) for m, error in pairs]
        found = {
            "rms": float(error.norm() / exact.norm()),
            "median": float((error.abs() / exact.abs().clamp(min=1e-30)).median()),
            "factor": statistics.fmean(float((a - b).norm() / a.norm()) for a, b in factors),
        }
    written.write_text(json.dumps(found))


@dataclass(frozen=True)
class Run:
    """What is known of one training: its last losses, and the errors of its momenta."""

    loss: float
    held_out: float
    errors: dict[str, float]


def measured(kind: str, beta: float, seed: int, steps: int, out: Path) -> Run:
    """Train, unless the folder has the run already."""
    import demo
    import training

    flags = [*training.read_settings(SETTINGS.read_text(encoding="utf-8"))["muon"], "--muon-momentum", str(beta)]
    flags += ["--seed", str(seed), "--optimizer-momentum-dtype", KINDS[kind][1]]
    if kind == "control":  # how far runs come apart that differ by rounding
        flags += ["--muon-lr", str(training.rate(flags) * (1 + 1e-6))]
    log, written = (out / f"{kind}-{beta}-{seed}-{steps}.{end}" for end in ("log", "json"))
    command = training.command("muon", flags, steps, out)
    at = command.index("examples/pretrain_gpt.py")
    command[at : at + 1] = ["scripts/bench/momentum_dtype.py", TRAIN, kind, str(beta), str(written)]
    if not written.exists():
        list(demo.execute(command, log, training.THREADS))
    lines = log.read_text(encoding="utf-8").splitlines()
    held_out = training.read_held_out(lines)
    assert held_out is not None, log
    return Run(training.loss_at(demo.read_losses(lines, 1, steps), steps), held_out, json.loads(written.read_text()))


def cells(runs: Sequence[Run], fp32: Sequence[Run]) -> list[str]:
    """Errors and losses, means over seeds, and how held-out losses differ from those of fp32 with the same seeds."""
    losses = [f"{statistics.fmean(each):.4f}" for each in ([r.loss for r in runs], [r.held_out for r in runs])]
    keys, known = ("rms", "median", "factor"), all(run.errors for run in runs)
    errors = [f"{statistics.fmean(run.errors[key] for run in runs):.2%}" if known else "-" for key in keys]
    if runs is fp32:
        return [*errors, *losses, "-"]
    more = [run.held_out - other.held_out for run, other in zip(runs, fp32, strict=True)]
    spread = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else float("nan")
    return [*errors, *losses, f"{statistics.fmean(more):+.4f} ± {spread:.4f}"]


def main() -> None:
    """Train all, print the table, and put it into the docs where that is asked for."""
    import pages
    import training

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=training.STEPS, help="of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="of weights and batches")
    parser.add_argument("--betas", type=float, nargs="+", default=[0.95], help="decay rates of the momentum")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/measured.md, too")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of logs")
    arguments = parser.parse_args()
    training.write_data(arguments.out)
    rows = []
    for beta in arguments.betas:
        found = {
            kind: [measured(kind, beta, seed, arguments.steps, arguments.out) for seed in arguments.seeds]
            for kind in KINDS
        }
        rows += [(str(beta), KINDS[kind][0], *cells(runs, found["fp32"])) for kind, runs in found.items()]
        print(*rows[-len(KINDS) :], sep="\n", flush=True)
    errors = ("error, RMS", "error, median entry", "error of the orthogonal factor")
    head = ("momentum", "kept in", *errors, f"loss at step {arguments.steps}")
    table = pages.markdown((*head, "held-out loss there", "more than fp32"), rows)
    print(f"\n{table}")
    if arguments.docs:
        pages.put(PAGE, "momentum", table)


if __name__ == "__main__":
    if sys.argv[1:2] == [TRAIN]:
        train(sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    else:
        main()
