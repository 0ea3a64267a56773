"""The line of each optimizer in every picture of the docs."""

from typing import Any, NamedTuple

OTHER = "#777777"  # of what is none of ours
MAIN = ("muon", "adam")  # drawn wider than others, and above them


class Line(NamedTuple):
    """Color and dashes of an optimizer."""

    color: str
    dashes: str = "-"


# Muon and its relatives are solid, Shampoo and its relatives dashed, what knows no matrices dotted, but for Adam,
# and SinkGD, which has no momentum, both.
# Colors of the same dashes differ also for the colour-blind: tests/test_pictures.py says by how much.
LINES = {
    "adam": Line("#000000"),
    "adam_two_rates": Line("#151515", ":"),  # a control of the comparison
    "muon": Line("#d1361b"),
    "adaptive_muon": Line("#0036b4"),
    "spectron": Line("#9b4c76"),
    "scion": Line("#f97000"),
    "polargrad": Line("#3a98bd"),
    "muon_hyperball": Line("#724cff"),
    "mars_muon": Line("#4c4554"),
    "dion": Line("#4f92f7"),
    "dion2": Line("#076fb7"),
    "sinkgd": Line("#2f5d3a", "-."),
    "soap": Line("#5ca265", "--"),
    "shampoo": Line("#7f4100", "--"),
    "kl_shampoo": Line("#cd00cf", "--"),
    "psgd_kron": Line("#7a5a98", "--"),
    "lion": Line("#a59200", ":"),
    "signum": Line("#0067b9", ":"),
    "schedule_free_adamw": Line("#77a49b", ":"),
    "ademamix": Line("#8d003b", ":"),
}


def style(name: str) -> dict[str, Any]:
    """Arguments of ``Axes.plot`` for the line of an optimizer.

    Raises:
        ValueError: it has none.
    """
    if name not in LINES:
        raise ValueError(f"no line for {name!r} among {sorted(LINES)}: add it to scripts/bench/colors.py")
    color, dashes = LINES[name]
    main = name in MAIN
    return {"color": color, "linestyle": dashes, "linewidth": 2.6 if main else 1.5, "zorder": 3 if main else 2}


def shade(color: str, number: int) -> str:
    """The color of an optimizer in the run of this number: each further one is paler."""
    strength = 0.55**number
    mixed = [round(255 - strength * (255 - int(color[at : at + 2], 16))) for at in (1, 3, 5)]
    return "#" + "".join(f"{part:02x}" for part in mixed)
