"""What ``make compare`` makes of its runs: settings from the docs, figures from the logs, a table and a picture."""

import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from math import prod
from pathlib import Path

from megatron_eopt.manifest import ParamPattern

LAST = 20  # steps that a loss is averaged over: that of one batch is noisy
BLOCK = 10  # steps that a time is averaged over: SOAP refreshes its bases in every tenth

Losses = dict[int, float]  # iteration -> loss

_ROW = re.compile(r"^\| `(?P<name>\w+)` \| `(?P<flags>[^`|]*)` \|")
_TIME = re.compile(r"iteration +(\d+)/ *\d+ \|.*elapsed time per iteration \(ms\): ([\d.]+)")
_HELD_OUT = re.compile(r"validation loss at .*lm loss value: ([-+.\dE]+)")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of one training.

    Attributes:
        name: of the optimizer.
        losses: of the batches that were trained on; an iteration may lack.
        seconds: of one step, see :func:`seconds_per_step`.
        held_out: loss at the end on batches that no run trains on; None where it was not asked for.
        state: bytes of optimizer state for each of the model's parameters; None where nothing says it.
    """

    name: str
    losses: Losses
    seconds: float
    held_out: float | None = None
    state: float | None = None


def between(page: str, mark: str) -> str:
    """The lines of a page between ``<!-- MARK -->`` and the next ``<!-- end -->``.

    Raises:
        ValueError: the page lacks one of them.
    """
    return _parts(page, mark)[1]


def replaced(page: str, mark: str, lines: str) -> str:
    """The page with other lines between the two comments of :func:`between`."""
    before, _, after = _parts(page, mark)
    return f"{before}\n\n{lines.strip()}\n\n{after}"


def _parts(page: str, mark: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {mark} -->", "<!-- end -->"
    before, found, rest = page.partition(begin)
    inside, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"expected '{begin}' and after it '{end}' around a table, and found {begin!r}: {bool(found)}")
    return before + begin, inside, end + after


def read_settings(page: str) -> dict[str, list[str]]:
    """Name of an optimizer -> its recommended flags, from the table that ``docs/optimizers.md`` marks.

    Raises:
        ValueError: the page has no such table, a row of it cannot be read, or an optimizer has two.
    """
    settings: dict[str, list[str]] = {}
    _, _, *rows = between(page, "settings").strip().splitlines()  # behind the head and the line under it
    for row in rows:
        match = _ROW.match(row)
        if match is None or match["name"] in settings:
            raise ValueError(f"expected a row '| `NAME` | `FLAGS` | ...' for each optimizer, found {row!r}")
        settings[match["name"]] = shlex.split(match["flags"])
    return settings


def rate_flag(flags: Sequence[str]) -> str:
    """The flag of the rate of what the optimizer itself owns: ``--muon-lr`` where it is given, else ``--lr``."""
    return "--muon-lr" if "--muon-lr" in flags else "--lr"


def rate(flags: Sequence[str]) -> float:
    """The value of :func:`rate_flag`."""
    return float(flags[flags.index(rate_flag(flags)) + 1])


def at_rate(flags: Sequence[str], value: float) -> list[str]:
    """The flags with another rate, and a smallest rate that is as much smaller than it as before."""
    changed, factor = list(flags), value / rate(flags)
    for flag in (rate_flag(flags), rate_flag(flags).replace("lr", "min-lr")):
        if flag in changed:
            place = changed.index(flag) + 1
            changed[place] = f"{float(changed[place]) * factor:.3g}"
    return changed


def read_times(lines: Iterable[str]) -> list[float]:
    """Seconds of each iteration, from a log with a line for every one."""
    return [float(match[2]) / 1e3 for line in lines if (match := _TIME.search(line))]


def read_held_out(lines: Iterable[str]) -> float | None:
    """The last validation loss of a log; None where it has none."""
    found = [float(match[1]) for line in lines if (match := _HELD_OUT.search(line))]
    return found[-1] if found else None


def seconds_per_step(times: Sequence[float]) -> float:
    """The mean time of the steps in the fastest block of :data:`BLOCK`, the first left out, which also warms up.

    What else the machine does can only add to a time, so the least of them says most about the run itself.

    Raises:
        ValueError: there are not two whole blocks.
    """
    blocks = [statistics.fmean(block) for block in batched(times, BLOCK) if len(block) == BLOCK]
    if len(blocks) < 2:
        raise ValueError(f"the time of a step is taken from {2 * BLOCK} steps or more, found {len(times)}")
    return min(blocks[1:])


def loss_at(losses: Losses, step: int) -> float:
    """Mean loss of the last :data:`LAST` iterations up to a step."""
    return statistics.fmean(loss for iteration, loss in losses.items() if step - LAST < iteration <= step)


def steps_within(record: Record, seconds: float) -> int:
    """How many whole steps a run makes in a time; no more than it made."""
    # a time of so many steps is to hold them whatever its rounding
    return min(max(record.losses), int(seconds / record.seconds + 1e-9))


def equal_seconds(records: Iterable[Record]) -> float:
    """The time of the run that makes its steps fastest."""
    return min(max(record.losses) * record.seconds for record in records)


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


def table(records: Sequence[Record]) -> str:
    """The Markdown table of the figures."""
    seconds, steps = equal_seconds(records), min(max(record.losses) for record in records)
    head = (
        "optimizer",
        f"loss at step {steps}",
        "held-out loss there",
        f"loss after {seconds:.0f} s",
        "at step",
        "seconds per step",
        "state, bytes per parameter",
    )
    rows = [
        (
            record.name,
            f"{loss_at(record.losses, steps):.3f}",
            _shown(record.held_out, ".3f"),
            f"{loss_at(record.losses, steps_within(record, seconds)):.3f}",
            str(steps_within(record, seconds)),
            f"{record.seconds:.3f}",
            _shown(record.state, ".2f"),
        )
        for record in records
    ]
    return markdown(head, rows)


def sweep_table(found: Mapping[tuple[str, int], Mapping[float, float]], settings: Mapping[str, Sequence[str]]) -> str:
    """The Markdown table of sweeps: (name, steps) -> rate -> loss, the recommended rates in bold."""
    rows = []
    for (name, steps), losses in found.items():
        cells = {at: f"{at:g}: {loss:.3f}" for at, loss in sorted(losses.items())}
        bold = [f"**{cell}**" if at == rate(settings[name]) else cell for at, cell in cells.items()]
        rows.append((name, rate_flag(settings[name]), str(steps), ", ".join(bold)))
    return markdown(("optimizer", "flag", "steps", "rate: loss"), rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    first, *others = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *others])


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def draw(records: Sequence[Record], picture: Path) -> None:
    """Draw losses over steps, and over seconds."""
    import pictures
    from matplotlib.figure import Figure

    with pictures.look():
        figure = Figure(figsize=(pictures.WIDTH, 10))
        of_steps, of_seconds = figure.subplots(2, 1, sharey=True)
        ends = []
        for record in records:
            style = pictures.style(record.name)
            mean = {step: loss_at(record.losses, step) for step in record.losses}
            of_steps.plot(list(mean), list(mean.values()), label=record.name, **style)
            seconds = [step * record.seconds for step in mean]
            of_seconds.plot(seconds, list(mean.values()), label=record.name, **style)
            ends += [loss_at(record.losses, max(record.losses)), loss_at(record.losses, max(record.losses) // 4)]
        of_seconds.axvline(equal_seconds(records), color="gray", linewidth=0.8, linestyle=":")
        of_steps.set(xlabel="step")
        of_seconds.set(xlabel="seconds of training; dotted: the end of the fastest run")
        of_steps.set_ylim(min(ends) - 0.05, max(ends) + 0.05)
        figure.supylabel(f"training loss, mean of the last {LAST} steps (nats per byte)", fontsize=11)
        figure.suptitle(
            "A small GPT on the sources of Python's standard library,\none CPU process: same tokens, one seed"
        )
        for axes in (of_steps, of_seconds):
            pictures.name_ends(axes)
        figure.savefig(picture)
