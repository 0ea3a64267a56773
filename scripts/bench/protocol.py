"""The protocol of the comparison as data: what is trained, with which settings, seeds, lengths and widths.

docs/compare.md says it in words and why. Every run follows from this file and from results of earlier runs, so that
nothing is left to choose once the first has started.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

TRIALS = 12
TRIAL_SEED = 1
FINAL_SEEDS = tuple(range(11, 19))
FEW_SEEDS = FINAL_SEEDS[:4]  # of runs at another length or width
WIDTH, STEPS = 128, 200
LENGTHS = (100, 50)  # shorter runs; the second where the first already ends below Adam's loss
# (width, steps) of the runs that show how the gain changes with size.
SIZES = ((128, 400), (256, 200))
FACTORS = (0.5, 1.0, 2.0)  # of all rates, tried at each of these sizes
LARGEST = (256, 400)  # where rates change by the factors that were best at both
LEADERS = 3  # beside Adam and Muon
POINTS_SEED = 20261126

# A tenth of the rate is where its schedule ends.
SMALLEST = {"--lr": "--min-lr", "--muon-lr": "--muon-min-lr", "--decoupled-lr": "--decoupled-min-lr"}


@dataclass(frozen=True)
class Axis:
    """A setting that trials vary: its flag, and the bounds of its range.

    Values are spaced evenly in their logarithm; those of a decay rate (``decays``) in the logarithm of one less it.
    """

    flag: str
    low: float
    high: float
    decays: bool = False

    def at(self, place: float) -> str:
        """The value at a place in [0, 1), with three digits."""
        low, high = (1 - self.high, 1 - self.low) if self.decays else (self.low, self.high)
        value = low * (high / low) ** place
        return f"{1 - value:.4g}" if self.decays else f"{value:.3g}"


@dataclass(frozen=True)
class Space:
    """What trials of an optimizer have in common, and the four settings that they vary.

    Attributes:
        flags: of all trials.
        axes: the settings.
        optimizer: for ``--optimizer``; None where the space has its name.
    """

    flags: str
    axes: tuple[Axis, Axis, Axis, Axis]
    optimizer: str | None = None


def around(flag: str, value: float) -> Axis:
    """From a quarter of a value to four times it."""
    return Axis(flag, value / 4, value * 4)


DECAY = Axis("--weight-decay", 0.01, 0.3)
BETA2 = Axis("--adam-beta2", 0.9, 0.998, decays=True)
BETA1 = Axis("--adam-beta1", 0.7, 0.97, decays=True)


def of_matrices(rate: float, flags: str) -> Space:
    """The space of an optimizer of matrices, with Adam for the other parameters."""
    return Space(flags, (around("--muon-lr", rate), DECAY, around("--lr", 3e-3), BETA2))


MUON = "--muon-momentum 0.95 --muon-nesterov"
SPACES = {
    "adam": Space("", (around("--lr", 3e-3), DECAY, BETA1, BETA2)),
    # A control: Adam with a rate of its own for embeddings and output layer, as it has beside an optimizer of matrices.
    "adam_two_rates": Space("", (around("--lr", 3e-3), DECAY, around("--decoupled-lr", 3e-3), BETA2), "adam"),
    "muon": of_matrices(0.018, f"{MUON} --muon-preset match_adamw"),
    "adaptive_muon": of_matrices(0.018, f"--adaptive-muon-moment2-method normuon {MUON} --muon-preset match_adamw"),
    "soap": of_matrices(0.003, "--soap-precondition-frequency 1 --adam-beta1 0.95"),
    "muon_hyperball": of_matrices(0.06, MUON),
    "mars_muon": of_matrices(0.018, "--muon-momentum 0.95 --muon-preset match_adamw"),
    "scion": of_matrices(0.0027, "--scion-radius 50"),
    "schedule_free_adamw": Space(
        "--lr-decay-style constant --lr-warmup-iters 0 --schedule-free-adamw-warmup-steps {warmup}",
        (around("--lr", 2e-3), DECAY, BETA1, BETA2),
    ),
    "shampoo": of_matrices(0.006, "--shampoo-basis-method eigh"),
    "kl_shampoo": of_matrices(0.054, "--kl-shampoo-basis-method eigh"),
    "psgd_kron": of_matrices(0.001, ""),
    "dion": of_matrices(0.02, "--dion-rank-fraction 0.25"),
    "ademamix": Space(
        "--ademamix-alpha-warmup {steps} --ademamix-beta3-warmup {steps}",
        (around("--lr", 3e-3), DECAY, Axis("--ademamix-alpha", 2, 16), BETA2),
    ),
}


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        optimizer: its name.
        label: what no other run of the optimizer has; with the name it is the path of its result.
        settings: flags and values that trials vary, with the smallest rates.
        seed: of weights and batches.
        width: of the model.
        steps: of the run, over which its schedule is spread.
    """

    optimizer: str
    label: str
    settings: tuple[str, ...]
    seed: int
    width: int = WIDTH
    steps: int = STEPS

    @property
    def named(self) -> str:
        """The optimizer's name for ``--optimizer``."""
        return SPACES[self.optimizer].optimizer or self.optimizer

    @property
    def flags(self) -> list[str]:
        """All flags that differ from those of another run."""
        warmup = self.steps // 20
        heads = self.width // 32
        model = f"--hidden-size {self.width} --ffn-hidden-size {self.width * 11 // 4} --num-attention-heads {heads}"
        schedule = f"--num-query-groups {heads // 2} --train-iters {self.steps} --lr-warmup-iters {warmup}"
        own = SPACES[self.optimizer].flags.format(warmup=warmup, steps=self.steps)
        return [*f"{model} {schedule} --seed {self.seed} {own}".split(), *self.settings]


Losses = Mapping[Run, float]  # a run that diverged has an infinite one


def points() -> list[list[float]]:
    """The places of the trials in [0, 1)^4, the same for every optimizer: a scrambled Sobol sequence."""
    engine = torch.quasirandom.SobolEngine(4, scramble=True, seed=POINTS_SEED)
    return engine.draw(TRIALS, dtype=torch.float64).tolist()


def settings_at(space: Space, place: Sequence[float]) -> tuple[str, ...]:
    """Flags and values at a place of a space; rates decay to a tenth, unless the rate is constant."""
    found: list[str] = []
    for axis, coordinate in zip(space.axes, place, strict=True):
        value = axis.at(coordinate)
        found += [axis.flag, value]
        if axis.flag in SMALLEST:
            least = float(value) if "constant" in space.flags else float(value) / 10
            found += [SMALLEST[axis.flag], f"{least:.3g}"]
    return tuple(found)


def scaled(settings: Sequence[str], factor: float) -> tuple[str, ...]:
    """Settings with all rates changed by a factor."""
    rates = {*SMALLEST, *SMALLEST.values()}
    pairs = zip(settings[::2], settings[1::2], strict=True)
    return tuple(
        part for flag, value in pairs for part in (flag, f"{float(value) * factor:.3g}" if flag in rates else value)
    )


def trials(optimizer: str) -> list[Run]:
    """The trials, from which the setting of least loss is taken."""
    space = SPACES[optimizer]
    return [
        Run(optimizer, f"trial-{number:02}", settings_at(space, place), TRIAL_SEED)
        for number, place in enumerate(points(), 1)
    ]


def finals(best: Run) -> list[Run]:
    """The best trial again with seeds that no trial had."""
    return [replace(best, label=f"final-seed-{seed}", seed=seed) for seed in FINAL_SEEDS]


def shorter(best: Run, steps: int) -> list[Run]:
    """The best trial with fewer steps and some of the fresh seeds."""
    label = {LENGTHS[0]: "short", LENGTHS[1]: "shorter"}[steps]
    return [replace(best, label=f"{label}-seed-{seed}", seed=seed, steps=steps) for seed in FEW_SEEDS]


def _at_size(best: Run, width: int, steps: int, factor: float) -> Run:
    label = f"width-{width}-steps-{steps}-rates-{factor:g}"
    return replace(best, label=label, settings=scaled(best.settings, factor), width=width, steps=steps)


def size_trials(best: Run, width: int, steps: int) -> list[Run]:
    """The best trial at another size, with all rates halved, kept and doubled."""
    return [_at_size(best, width, steps, factor) for factor in FACTORS]


def largest(best: Run, chosen: Sequence[Run]) -> Run:
    """The best trial at the largest size, by what was chosen at the others."""
    return _at_size(best, *LARGEST, math.prod(float(run.label.rpartition("-rates-")[2]) for run in chosen))


def size_finals(best: Run) -> list[Run]:
    """The best of the trials at a size with fresh seeds."""
    at = best.label.partition("-rates-")[0]
    return [replace(best, label=f"{at}-seed-{seed}", seed=seed) for seed in FEW_SEEDS]


def best_of(runs: Sequence[Run], losses: Losses) -> Run:
    """The run of least loss; of equal ones the first.

    Raises:
        ValueError: all of them diverged.
    """
    best = min(runs, key=losses.__getitem__)
    if not math.isfinite(losses[best]):
        raise ValueError(f"{best.optimizer}: expected a run that did not diverge among {[run.label for run in runs]}")
    return best


def leaders(means: Mapping[str, float]) -> list[str]:
    """Adam, Muon, and the others of least mean loss."""
    others = sorted(means.keys() - {"adam", "adam_two_rates", "muon"}, key=means.__getitem__)
    return ["adam", "muon", *others[:LEADERS]]
