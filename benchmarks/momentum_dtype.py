"""What a momentum in bf16 costs: the losses of the demo's GPT, and how far its momenta are from those in fp32.

    python benchmarks/momentum_dtype.py --docs

Muon trains at its recommended flags with momenta in fp32, in bf16 rounded at random (--optimizer-momentum-dtype bf16),
and in bf16 rounded to the nearest, which no flag of the package does: for that, the training process replaces the
rounding. An error is what a momentum in bf16 has beyond the one in fp32 of the same gradients. Each step multiplies it
by the decay rate and adds what the rounding did, so no second run is needed to know it.
"""

import argparse
import json
import runpy
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT / "benchmarks"))

OUT = ROOT / "bench-out" / "momentum-dtype"
PAGE = ROOT / "docs" / "optimizers.md"
KINDS = {"fp32": "fp32", "random": "bf16, at random", "nearest": "bf16, to the nearest"}
TRAIN = "--rounded"  # the first argument of a process that trains


def train(kind: str, beta: float, written: Path, flags: Sequence[str]) -> None:
    """Train in this process, and write down the errors of the momenta in the end."""
    from megatron_eopt.optimizers import muon

    store, errors = muon.store, dict[int, tuple[Tensor, Tensor]]()

    def followed(momenta: Sequence[Tensor], averages: Sequence[Tensor], *rest: object) -> None:
        if kind == "nearest":
            torch._foreach_copy_(list(momenta), list(averages))
        else:
            store(momenta, averages, *rest)  # type: ignore[arg-type]
        for m, average in zip(momenta, averages, strict=True):
            error, _ = errors.setdefault(m.data_ptr(), (torch.zeros_like(average), m))
            error.mul_(beta).add_(m.float() - average)

    muon.store = followed
    sys.argv = ["pretrain_gpt.py", *flags]
    try:
        runpy.run_path(str(ROOT / "examples" / "pretrain_gpt.py"), run_name="__main__")
    finally:
        found = {}
        if errors:
            error = torch.cat([each.flatten() for each, _ in errors.values()])
            exact = torch.cat([m.float().flatten() for _, m in errors.values()]) - error
            found = {
                "rms": float(error.norm() / exact.norm()),
                "median": float((error.abs() / exact.abs().clamp(min=1e-30)).median()),
            }
        written.write_text(json.dumps(found))


def measured(kind: str, beta: float, seed: int, steps: int, out: Path) -> tuple[float, float, dict[str, float]]:
    """The last losses of a run, in training and held out, and the errors of its momenta."""
    import compare
    import compare_figures as figures
    import demo

    flags = [*figures.read_settings(PAGE.read_text(encoding="utf-8"))["muon"], "--muon-momentum", str(beta)]
    flags += ["--seed", str(seed), "--optimizer-momentum-dtype", "fp32" if kind == "fp32" else "bf16"]
    log, written = out / f"{kind}-{beta}-{seed}.log", out / f"{kind}-{beta}-{seed}.json"
    command = compare.command("muon", flags, steps, out)
    at = command.index("examples/pretrain_gpt.py")
    command[at : at + 1] = ["benchmarks/momentum_dtype.py", TRAIN, kind, str(beta), str(written)]
    lines = list(demo.execute(command, log, compare.THREADS))
    held_out = figures.read_held_out(lines)
    assert held_out is not None, log
    return figures.loss_at(demo.read_losses(lines, 1, steps), steps), held_out, json.loads(written.read_text())


def main() -> None:
    """Train all, print the table, and put it into the docs where that is asked for."""
    import compare
    import compare_figures as figures

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=compare.STEPS, help="of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1], help="of weights and batches")
    parser.add_argument("--betas", type=float, nargs="+", default=[0.95, 0.99], help="decay rates of the momentum")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/optimizers.md, too")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of logs")
    arguments = parser.parse_args()
    compare.write_data(arguments.out)
    rows = []
    for beta in arguments.betas:
        for kind, called in KINDS.items():
            runs = [measured(kind, beta, seed, arguments.steps, arguments.out) for seed in arguments.seeds]
            losses = [", ".join(f"{run[i]:.4f}" for run in runs) for i in (0, 1)]
            errors = [
                f"{statistics.fmean(run[2][key] for run in runs):.2%}" if kind != "fp32" else "-"
                for key in ("rms", "median")
            ]
            rows.append((str(beta), called, *errors, *losses))
            print(*rows[-1], sep="  ", flush=True)
    seeds = ", ".join(map(str, arguments.seeds))
    losses = [f"{name} (seeds {seeds})" for name in (f"loss at step {arguments.steps}", "held-out loss there")]
    table = figures.markdown(("momentum", "kept in", "error, RMS", "error, median entry", *losses), rows)
    print(f"\n{table}")
    if arguments.docs:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(figures.replaced(page, "momentum", table), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == [TRAIN]:
        train(sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    else:
        main()
