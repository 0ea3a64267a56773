"""Tables and pictures of the comparison, from the small files of its runs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import protocol
from pages import markdown
from protocol import Run
from trials import Result, losses, path_of, read

from megatron_eopt.routing import ParamPattern

# Student's t: 95 % of means lie within so many standard errors, by degrees of freedom.
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}


@dataclass(frozen=True)
class Estimate:
    """A mean, half the width of its 95 % interval, and the standard deviation of what it is of."""

    mean: float
    half: float
    deviation: float

    @property
    def words(self) -> str:
        """The mean and its interval."""
        if not math.isfinite(self.mean):
            return "diverged"
        return f"{self.mean:.3f} ± {self.half:.3f}"

    @property
    def cell(self) -> str:
        """The words in one line of a table, however narrow it is."""
        return self.words.replace(" ", "\u00a0")


def estimate(values: Sequence[float]) -> Estimate:
    """The estimate of a mean from two to eight values; an infinite one where a run diverged."""
    if not all(map(math.isfinite, values)):
        return Estimate(math.inf, math.inf, math.inf)
    deviation = statistics.stdev(values)
    half = T_95[len(values) - 1] * deviation / math.sqrt(len(values))
    return Estimate(statistics.fmean(values), half, deviation)


@dataclass(frozen=True)
class Summary:
    """What the files say of one optimizer.

    Attributes:
        best: the trial that was chosen.
        tune: losses on the tuning text, of the trials.
        test: losses on the test text, of the runs with fresh seeds.
        curves: training losses of all runs with fresh seeds and the usual length, see :data:`trials.BLOCK`.
    """

    best: Run
    tune: dict[Run, float]
    test: dict[Run, float]
    curves: list[list[float]]

    def of(self, steps: int) -> list[float]:
        """Test losses of the runs of a length, in the order of their seeds."""
        return [loss for run, loss in self.test.items() if run.steps == steps]

    @property
    def by_length(self) -> dict[int, list[float]]:
        """Steps of a run -> test losses with the seeds that ran at every length."""
        return {steps: self.of(steps)[: len(protocol.FEW_SEEDS)] for steps in {run.steps for run in self.test}}


def known(runs: Sequence[Run], results: Path) -> dict[Run, Result]:
    """The results of those runs that were made."""
    return {run: read(run, results) for run in runs if path_of(run, results).exists()}


def summaries(results: Path) -> dict[str, Summary]:
    """The summary of each optimizer of which all runs at the usual size were made."""
    found = {}
    for name in protocol.SPACES:
        tried = protocol.trials(name)
        of_trials = known(tried, results)
        if len(of_trials) < len(tried):
            continue
        best = protocol.best_of(tried, losses(of_trials))
        again = known(protocol.finals(best), results)
        short = [known(protocol.shorter(best, steps), results) for steps in protocol.LENGTHS]
        if len(again) == len(protocol.FINAL_SEEDS) and len(short[0]) == len(protocol.FEW_SEEDS):
            curves = [result["training"] for result in again.values()]
            found[name] = Summary(best, losses(of_trials), losses(again | short[0] | short[1], "test"), curves)
    return found


def against(own: Sequence[float], adams: Sequence[float]) -> Estimate:
    """The difference to Adam, of runs that share their seeds."""
    return estimate([one - other for one, other in zip(own, adams, strict=True)])


def steps_to(target: float, means: Mapping[int, float]) -> float | None:
    """The length of a run that ends at a loss, from the losses that runs of several lengths end at.

    Between two lengths the loss is straight in the logarithm of the steps.

    Returns:
        None where the longest ends above the target; the shortest length where that is enough.
    """
    (longest, whole), *others = sorted(means.items(), reverse=True)
    if whole > target:
        return None
    for steps, loss in others:
        if loss == math.inf:
            return longest
        if loss > target:
            return steps * (longest / steps) ** ((loss - target) / (loss - whole))
        longest, whole = steps, loss
    return longest


def steps_of_seeds(own: Summary, adam: Summary) -> list[float | None]:
    """:func:`steps_to` of each seed that ran at several lengths, to the loss of Adam's run of that seed."""
    return [
        steps_to(target, {steps: losses[place] for steps, losses in own.by_length.items()})
        for place, target in enumerate(adam.by_length[protocol.STEPS])
    ]


def steps_of_means(own: Summary, adam: Summary) -> float | None:
    """:func:`steps_to` of the means of these seeds."""
    means = {steps: statistics.fmean(losses) for steps, losses in own.by_length.items()}
    return steps_to(statistics.fmean(adam.by_length[protocol.STEPS]), means)


def table(
    found: Mapping[str, Summary],
    seconds: Mapping[str, float],
    state: Mapping[str, float],
    median: Mapping[str, float] | None = None,
    most: Mapping[str, float] | None = None,
) -> str:
    """The Markdown table of results, lowest loss first.

    Args:
        found: of each optimizer, Adam among them.
        seconds: the least of a step, by optimizer; one may lack.
        state: bytes of each parameter of the model, by optimizer; one may lack.
        median: seconds of a step; None where only the least was kept.
        most: the same.
    """
    adam = found["adam"]
    rows = []
    for name, summary in sorted(found.items(), key=lambda item: statistics.fmean(item[1].of(protocol.STEPS))):
        own = estimate(summary.of(protocol.STEPS))
        steps, time = steps_of_means(summary, adam), seconds.get(name)
        less = against(summary.of(protocol.STEPS), adam.of(protocol.STEPS)).cell
        reached = _steps(steps, steps_of_seeds(summary, adam), min(summary.by_length))
        if name == "adam":
            less, reached = "-", str(protocol.STEPS)
        rows.append(
            (
                name,
                own.cell,
                f"{own.deviation:.3f}",
                less,
                str(sum(loss < min(adam.tune.values()) for loss in summary.tune.values())),
                reached,
                "-" if time is None or steps is None else f"{steps * time:.0f}",
                "-" if time is None else f"{time:.3f}{_beside(name, median, most)}",
                f"{state[name]:.1f}" if name in state else "-",
            )
        )
    head = (
        "optimizer",
        "test loss",
        "deviation",
        "less Adam's",
        "better trials",
        "steps to Adam's loss",
        "seconds to it",
        "seconds per step",
        "state, bytes per parameter",
    )
    return markdown(head, rows)


def _beside(name: str, median: Mapping[str, float] | None, most: Mapping[str, float] | None) -> str:
    """Median and most, behind the least."""
    return f" ({median[name]:.3f}, {most[name]:.3f})" if median and most else ""


def _steps(of_means: float | None, of_seeds: Sequence[float | None], shortest: int) -> str:
    """Steps of the means, and in brackets the least and the most of single seeds."""

    def words(steps: float | None) -> str:
        if steps is None:
            return "not reached"
        return f"at most {shortest}" if steps == shortest else f"{steps:.0f}"  # no shorter run was made

    reached = [each for each in of_seeds if each is not None]
    most = max(reached, default=None) if len(reached) == len(of_seeds) else None
    return f"{words(of_means)} ({words(min(reached))} to {words(most)})" if reached else words(of_means)


def settings_table(found: Mapping[str, Summary]) -> str:
    """The Markdown table of the settings that were chosen, and what of them is at the edge of its range."""
    rows = []
    for name, summary in found.items():
        chosen = dict(zip(summary.best.settings[::2], summary.best.settings[1::2], strict=True))
        edges = [axis.flag for axis in protocol.SPACES[name].axes if at_edge(axis, chosen[axis.flag])]
        shown = " ".join(f"{flag} {value}" for flag, value in chosen.items() if flag not in protocol.SMALLEST.values())
        fixed = protocol.SPACES[name].flags.format(steps=protocol.STEPS, warmup=protocol.STEPS // 20)
        outer = ", ".join(f"`{flag}`" for flag in edges)
        first, second = sorted(summary.tune.values())[:2]
        rows.append((name, f"`{shown}`", f"`{fixed}`" if fixed else "", outer, f"{first:.3f}, {second:.3f}"))
    head = ("optimizer", "chosen", "the same in all trials", "in the outer tenth of its range", "its trial, the next")
    return markdown(head, rows)


def at_edge(axis: protocol.Axis, value: str) -> bool:
    """Whether a value lies in the first or the last twentieth of its axis."""
    low, high = sorted((float(axis.at(0.05)), float(axis.at(0.95))))
    return not low <= float(value) <= high


def sizes(found: Mapping[str, Summary], results: Path) -> dict[str, dict[tuple[int, int], list[float]]]:
    """Optimizer -> (width, steps) -> test losses with fresh seeds, of the sizes of which all runs were made."""
    of_leaders: dict[str, dict[tuple[int, int], list[float]]] = {}
    if found.keys() != protocol.SPACES.keys():  # the leaders are not known
        return {}
    for name in protocol.leaders({name: statistics.fmean(each.of(protocol.STEPS)) for name, each in found.items()}):
        best = found[name].best
        by_length = found[name].by_length
        own = {(protocol.WIDTH, steps): by_length[steps] for steps in (protocol.LENGTHS[0], protocol.STEPS)}
        chosen = []
        for width, steps in protocol.SIZES:
            tried = protocol.size_trials(best, width, steps)
            of_trials = known(tried, results)
            if len(of_trials) == len(tried):
                chosen.append(protocol.best_of(tried, losses(of_trials)))
        if len(chosen) == len(protocol.SIZES):
            chosen.append(protocol.largest(best, chosen))
        for run in chosen:
            again = known(protocol.size_finals(run), results)
            if len(again) == len(protocol.FEW_SEEDS):
                own[run.width, run.steps] = list(losses(again, "test").values())
        of_leaders[name] = own
    return of_leaders


def size_table(of_leaders: Mapping[str, Mapping[tuple[int, int], Sequence[float]]]) -> str:
    """The Markdown table of losses at each size, and of differences to Adam."""
    rows = []
    for size in sorted({size for own in of_leaders.values() for size in own}):
        for name, own in of_leaders.items():
            if size in own:
                adams = of_leaders["adam"].get(size)
                less = against(own[size], adams).cell if adams and name != "adam" else "-"
                rows.append((str(size[0]), str(size[1]), name, estimate(own[size]).cell, less))
    return markdown(("width", "steps", "optimizer", "test loss", "less Adam's"), rows)


def state_per_parameter(manifest: Sequence[ParamPattern], owner: str | None = None) -> float:
    """Bytes of optimizer state for each parameter (number) of the model, or of what one owner has.

    Args:
        manifest: of a run.
        owner: its name; None for the whole model.

    Raises:
        ValueError: the owner has no parameters.
    """
    own = [each for each in manifest if owner in (None, each.like.optimizer)]
    elements = sum(each.count * prod(each.like.shape) for each in own)
    if not elements:
        raise ValueError(f"{owner or 'nobody'} owns no parameter in the manifest")
    return sum(each.count * each.like.state_bytes for each in own) / elements


def states(manifests: Mapping[str, Sequence[ParamPattern]]) -> dict[str, float]:
    """Bytes of optimizer state for each parameter of the model, by optimizer.

    Megatron builds its own Adam, of which no manifest is made: its figure is that of what Adam owns beside another.

    Args:
        manifests: of a run of each optimizer but Adam.
    """
    found = {name: state_per_parameter(manifest) for name, manifest in manifests.items()}
    beside = [each for each in manifests.values() if any(family.like.optimizer == "adam" for family in each)]
    return found | ({"adam": state_per_parameter(beside[0], "adam")} if beside else {})
