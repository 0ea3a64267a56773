"""What a step of stacks exchanges, as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_eopt.parallel.exchange_cost import Exchange, busiest, most_buffers
from megatron_eopt.parallel.plan_records import grouped
from megatron_eopt.parallel.rectangles import Shape
from megatron_eopt.screen import aligned, counted, figure, megabytes

NOTHING = "Ranks exchange nothing in a step."

_COLUMNS = ("matrices", "group", "scheme", "sent MB", "calls")


@dataclass(frozen=True)
class Kind:
    """Matrices of one line."""

    shape: Shape
    group: str  # label of the ranks that have them
    scheme: str


@dataclass(frozen=True)
class Alike:
    """Equal matrices of a chunk, and what they would exchange by themselves."""

    kind: Kind
    count: int
    exchanges: list[Exchange]


def exchange_table(stacks: Sequence[Alike], listed: Sequence[Sequence[list[Exchange]]]) -> str:
    """A line for equal matrices, for each collective, and for all.

    ``listed`` has the exchanges of chunks, by what takes turns.
    """
    every = list(chain(*chain(*listed)))
    if not every:
        return NOTHING
    rows = []
    for kind, some in grouped(stacks, lambda each: each.kind).items():
        count = sum(each.count for each in some)
        sent = busiest(list(chain(*(each.exchanges for each in some))))
        height, width = kind.shape
        rows.append([f"{count} of {height} x {width}", kind.group, kind.scheme, figure(sent / 1e6), ""])
    of_shapes = len(rows)
    for (collective, group), of_both in grouped(every, lambda each: (each.collective, each.group)).items():
        rows.append([collective.replace("_", "-"), group, "", *_sums(of_both)])
    rows.append([f"all {sum(each.count for each in stacks)}", "", "", *_sums(every)])
    lines = aligned(_COLUMNS, rows, _COLUMNS[3:])
    lines.insert(len(lines) - len(rows) + of_shapes, "")
    chunks = sum(map(len, listed))
    most = max(map(most_buffers, listed))
    lines += [
        "",
        "Each line is of the rank that is busiest with it, in one step. A call serves all",
        "matrices of a chunk. Norms, and numbers by which ranks agree, are not counted.",
        f"Temporaries: exchanges take at most {megabytes(most)} MB, in {counted(chunks, 'chunk')}.",
        "What a step takes on one rank comes on top.",
    ]
    return "\n".join(lines)


def _sums(exchanges: Sequence[Exchange]) -> list[str]:
    calls = sum(exchange.calls for exchange in exchanges)
    return [figure(busiest(exchanges) / 1e6), f"{calls:,}"]
