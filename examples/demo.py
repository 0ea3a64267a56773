"""Train a small GPT with Muon and with Adam on two CPU cores, resume Muon's run at another tensor parallelism, draw it.

``make demo`` runs it. Each run is ``examples/pretrain_gpt.py``, a script that knows nothing of this package, under its
launcher: real Megatron, two ranks over gloo. Everything it writes lies in ``demo-out/``.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "demo-out"
PREFIX = OUT / "stdlib"
CHECKPOINT = OUT / "checkpoint"

STEPS = 200
RESUMED_FROM = 100
# A resumed run goes on with the same numbers up to rounding: about 1e-6 after a hundred steps at another tensor
# parallelism. Without the optimizer's state it is off by 5e-3 at once and by more than 1e-2 later.
TOLERANCE = 1e-3
LAST = 20  # steps that the final loss is averaged over: that of one batch is noisy

Losses = dict[int, float]  # iteration -> loss

MODEL = (
    "--num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--num-attention-heads 4 --group-query-attention --num-query-groups 2 --position-embedding-type rope "
    "--seq-length 128 --max-position-embeddings 128 --hidden-dropout 0 --attention-dropout 0 "
    "--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 256"
)
# 3e-3 is about Adam's best here: with 1e-3 it is no better, with 6e-3 clearly worse.
SCHEDULE = (
    f"--micro-batch-size 16 --global-batch-size 16 --train-iters {STEPS} --log-interval 1 "
    f"--eval-iters 0 --eval-interval {STEPS} --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 10"
)
DATA = ["--data-path", str(PREFIX), "--data-cache-path", str(OUT / "cache"), "--split", "100,0,0", "--num-workers", "0"]
# Megatron's own kernels instead of Transformer Engine's, and no fusions, which need a GPU.
CPU = (
    "--transformer-impl local --attention-backend unfused --use-cpu-initialization --distributed-backend gloo "
    "--no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-rope-fusion"
)
ADAM = "--optimizer adam"
# Scale 0.2 gives Muon's update the size of Adam's, so one learning rate serves both. Precision 'high' instead of
# Megatron's default 'medium': with that, a CPU multiplies in bf16 if it can, and the figures depend on the machine.
MUON = (
    "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2 --muon-fp32-matmul-prec high"
)
SETTINGS = (
    "Both: same batches, learning rate 3e-3 to 3e-4 (cosine, 10 warm-up steps),\n"
    "weight decay 0.01, fp32. Muon: momentum 0.95, Nesterov, 5 Newton-Schulz steps,\n"
    "scale 0.2, matmul precision 'high'; Adam on the rest. One seed, at about the best\n"
    "learning rate for Adam; what Muon gains here says little about other models."
)

ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|.*\| lm loss: ([-+.\dE]+)")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: ``name`` names its log, ``first`` is the first iteration it trains, up to :data:`STEPS`."""

    name: str
    title: str
    tensor_parallel: int
    own: list[str]
    first: int = 1

    @property
    def options(self) -> list[str]:
        """What no other run has; the figures of each are in a folder of their own."""
        return [*self.own, "--tensorboard-dir", str(OUT / "tensorboard" / self.name)]

    @property
    def steps(self) -> int:
        """How many it makes."""
        return STEPS - self.first + 1

    @property
    def log(self) -> Path:
        """Where all that Megatron prints goes."""
        return OUT / f"{self.name}.log"


RUNS = (
    Run(
        name="muon",
        title="Muon, TP=2",
        tensor_parallel=2,
        own=[*MUON.split(), "--save", str(CHECKPOINT), "--save-interval", str(RESUMED_FROM)],
    ),
    Run(name="adam", title="Adam, TP=2", tensor_parallel=2, own=ADAM.split()),
    Run(
        name="muon-resumed",
        title=f"Muon, resumed from step {RESUMED_FROM} at TP=1",
        tensor_parallel=1,
        own=[*MUON.split(), "--load", str(CHECKPOINT), "--ckpt-step", str(RESUMED_FROM)],
        first=RESUMED_FROM + 1,
    ),
)


def command(run: Run) -> list[str]:
    """The command line of a run, which nobody outside this machine can reach."""
    return [
        *[sys.executable, "examples/loopback.py", "--nproc-per-node", str(run.tensor_parallel)],
        *["-m", "megatron_eopt.run", "--cpu", "examples/pretrain_gpt.py"],
        *["--tensor-model-parallel-size", str(run.tensor_parallel)],
        *[*MODEL.split(), *SCHEDULE.split(), *DATA, *CPU.split(), *run.options],
    ]


def printed_losses(lines: Iterable[str]) -> Iterator[tuple[int, float]]:
    """Iteration and loss of each line of Megatron's log that holds them."""
    for line in lines:
        if match := ITERATION.search(line):
            yield int(match[1]), float(match[2])


def read_losses(lines: Iterable[str], first: int, last: int) -> Losses:
    """The losses of the iterations ``first`` to ``last`` from a log, without the second of them.

    Megatron prints the first step of a process without resetting its sum, so that what it prints for the second is
    the mean of both. No other line is affected.

    Raises:
        ValueError: the log lacks an iteration; Megatron prints no loss where it is not a number.
    """
    losses = dict(printed_losses(lines))
    if missing := sorted(set(range(first, last + 1)) - losses.keys()):
        raise ValueError(f"the log holds no loss for {len(missing)} of the iterations {first} to {last}: {missing[:5]}")
    return {iteration: losses[iteration] for iteration in range(first, last + 1) if iteration != first + 1}


def largest_difference(straight: Losses, resumed: Losses) -> float:
    """Largest relative difference of the resumed run's losses from those of the straight run.

    Raises:
        ValueError: the resumed run is empty, or has iterations that the straight run lacks.
    """
    if not resumed or resumed.keys() - straight.keys():
        raise ValueError(
            f"nothing to compare with: the straight run has {len(straight)} iterations, the resumed one "
            f"{len(resumed)}, {len(resumed.keys() - straight.keys())} of them not in the straight run"
        )
    return max(abs(loss - straight[iteration]) / straight[iteration] for iteration, loss in resumed.items())


def final_loss(losses: Losses) -> float:
    """Mean loss of the last :data:`LAST` iterations."""
    return sum(losses[iteration] for iteration in sorted(losses)[-LAST:]) / LAST


def execute(arguments: list[str], log: Path, threads: int = 1) -> Iterator[str]:
    """Run a command in the repository, its output written to ``log`` and yielded line by line.

    Raises:
        SystemExit: it failed; the message holds the end of the log and where the log lies.
    """
    # A GPU that the machine may have stays out of it, so that the figures are the CPU's.
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            arguments,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            yield line
    if process.returncode != 0:
        # Some sixty lines: the last thirty are torchrun's own about the failure, the cause stands before them.
        end = "\n".join(log.read_text(encoding="utf-8").splitlines()[-60:])
        raise SystemExit(f"{end}\n\nIt failed with exit code {process.returncode}; its log is {log}")


def write_data() -> None:
    """Write the data set, in a process of its own like every run: what Megatron prints goes to a log."""
    print("Data: the sources of Python's standard library, a byte is a token", flush=True)
    *_, last = execute([sys.executable, "examples/stdlib_dataset.py", str(PREFIX)], OUT / "data.log")
    print(f"  {last}", end="", flush=True)


def train(run: Run) -> Losses:
    """Run a training with its progress on the screen and everything else in its log; return its losses.

    Raises:
        SystemExit: it failed, or its log lacks losses.
    """
    number = RUNS.index(run) + 1
    print(f"\nRun {number} of {len(RUNS)}. {run.title}: steps {run.first} to {STEPS}")
    print(f"  starting Megatron; what it prints is in {OUT.name}/{run.log.name}", flush=True)
    start = time.monotonic()
    started = start  # its first step is done
    threads = 2 // run.tensor_parallel  # two busy cores in every run
    lines = []
    for line in execute(command(run), run.log, threads):
        lines.append(line)
        for iteration, loss in printed_losses([line]):
            now = time.monotonic()
            if iteration == run.first:
                started = now
            if iteration % 20 == 0:
                end = ends(run, iteration, starting=started - start, stepping=now - started)
                print(f"  step {iteration:3}   loss {loss:.4f}   {now - start:4.0f} s   all ends at {end}", flush=True)
    try:
        return read_losses(lines, run.first, STEPS)
    except ValueError as error:
        raise SystemExit(f"{run.title}: {error}; its log is {run.log}") from error


def ends(run: Run, iteration: int, starting: float, stepping: float) -> str:
    """The time of day at which all runs will be through, if the later ones start and step as this one.

    Args:
        run: the run that has come to ``iteration``.
        iteration: its last step.
        starting: seconds up to its first step.
        stepping: seconds since then.
    """
    step = stepping / max(1, iteration - run.first)
    left = (STEPS - iteration) * step
    for later in RUNS[RUNS.index(run) + 1 :]:
        left += starting + later.steps * step
    return time.strftime("%H:%M", time.localtime(time.time() + left))


def report_resume(straight: Losses, resumed: Losses) -> bool:
    """Print both runs side by side; true where the resumed one goes on as the straight one does."""
    print(f"\nMuon, saved at step {RESUMED_FROM} with TP=2 and resumed with TP=1:")
    print("   step   straight    resumed")
    for iteration in (RESUMED_FROM + 1, RESUMED_FROM + 3, RESUMED_FROM + 10, RESUMED_FROM + 50, STEPS):
        print(f"  {iteration:5} {straight[iteration]:10.6f} {resumed[iteration]:10.6f}")
    difference = largest_difference(straight, resumed)
    goes_on = difference <= TOLERANCE
    verdict = "the resumed run goes on as if it had never stopped" if goes_on else "THE RESUMED RUN IS ANOTHER ONE"
    print(f"Largest relative difference in {len(resumed)} steps: {difference:.1e} (limit {TOLERANCE:.0e}):")
    print(f"{verdict}.")
    return goes_on


def draw(losses: dict[str, Losses], picture: Path) -> None:
    """Draw the losses of the runs, given by name, over the steps."""
    import matplotlib

    matplotlib.use("Agg")  # there may be no screen
    from matplotlib import pyplot as plt

    styles = {
        "adam": {"color": "#000000", "linewidth": 1.2},
        "muon": {"color": "#e69082", "linewidth": 3},
        "muon-resumed": {"color": "#d1361b", "linewidth": 1, "linestyle": (0, (4, 3))},
    }
    figure, axes = plt.subplots(figsize=(7.2, 5.4))
    for run in RUNS:
        label = f"{run.title}: {final_loss(losses[run.name]):.3f}"
        axes.plot(*zip(*losses[run.name].items(), strict=True), label=label, **styles[run.name])
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per byte; each batch is new)")
    axes.set_xlim(1, STEPS)
    axes.set_title("A small GPT on the sources of Python's standard library,\nMegatron-Core on two CPU ranks")
    axes.grid(alpha=0.3)
    axes.legend(title=f"mean loss of the last {LAST} steps")
    figure.text(0.5, 0.01, SETTINGS, ha="center", fontsize=9)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def main() -> None:
    """Write the data, run the trainings, compare, draw."""
    start = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    print(SETTINGS)
    steps = sum(run.steps for run in RUNS)
    print(f"\n{len(RUNS)} runs of {steps} steps in all, some minutes on two free cores.\n", flush=True)
    write_data()
    losses = {run.name: train(run) for run in RUNS}

    goes_on = report_resume(losses["muon"], losses["muon-resumed"])
    muon, adam = final_loss(losses["muon"]), final_loss(losses["adam"])
    print(f"\nMean loss of the last {LAST} of {STEPS} steps: Muon {muon:.3f}, Adam {adam:.3f}")
    picture = OUT / "loss.png"
    draw(losses, picture)
    print(f"Picture: {picture}   ({time.monotonic() - start:.0f} s in all)")
    if not goes_on:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
