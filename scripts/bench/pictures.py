"""One look for all pictures of the docs: names at lines' ends, and sizes for a narrow screen."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from colors import MAIN
from colors import style as style

WIDTH = 6.4  # inches: letters of 11 points are read on a screen of 390 pixels, too
GAP = 1.2  # between the middles of two names, in letters

LOOK = {
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",  # not transparent: a page may be dark
    "figure.titlesize": 11,
    "font.size": 11,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "lines.dashed_pattern": (4, 1.2),
    "lines.dotted_pattern": (1.2, 0.8),
    "savefig.dpi": 180,
}


def look() -> Any:
    """Context in which a figure is made, drawn and saved."""
    return matplotlib.rc_context(LOOK)


def apart(wanted: Sequence[float], gap: float) -> list[float]:
    """The places in [0, 1] nearest to the wanted ones, in their order and with a gap between two.

    By isotonic regression: what would overlap moves together, around its mean.

    Args:
        wanted: ascending.
        gap: if there is not room for all, they reach below 0.
    """
    blocks: list[tuple[float, int]] = []  # lowest place, and how many stand upon it
    for index, place in enumerate(wanted):
        blocks.append((place - index * gap, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (one, of_one), (other, of_other) = blocks[-2:]
            together = of_one + of_other
            blocks[-2:] = [((one * of_one + other * of_other) / together, together)]
    lowest = [place for place, count in blocks for _ in range(count)]
    room = 1 - (len(lowest) - 1) * gap
    return [min(max(place, 0.0), room) + index * gap for index, place in enumerate(lowest)]


def name_ends(axes: Any) -> None:
    """Write the label of each line beside its end, in place of a legend.

    Call it last: the limits of the axes, their scales and other panels are to stand.
    """
    axes.figure.draw_without_rendering()  # lays the panels out
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = []
    for line in axes.get_lines():
        points = line.get_xydata()
        points = points[np.isfinite(points).all(axis=1)]
        if len(points) and not line.get_label().startswith("_"):
            x, y = to_axes.transform(points[-1])
            ends.append((min(max(y, 0.0), 1.0), min(x, 1.0), line))
    ends.sort(key=lambda end: end[0])
    size = matplotlib.rcParams["font.size"] - (2 if len(ends) > 8 else 0)
    inches = axes.get_window_extent().height / axes.figure.dpi
    for (y, x, line), place in zip(ends, apart([y for y, *_ in ends], GAP * size / 72 / inches), strict=True):
        name = line.get_label()
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(1.06, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            size=size,
            weight="bold" if name in MAIN else "normal",
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
                "linewidth": 0.9,
                "relpos": (0, 0.5),  # from the left of the name
                "shrinkA": 1,
                "shrinkB": 0,
            },
        )
