"""The look of pictures: an optimizer is known by its line, and names at lines' ends do not overlap."""

import io
from itertools import combinations, pairwise

import numpy as np
import pictures
import plot_runs as plot
import pytest
from colors import LINES, MAIN, shade
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from megatron_eopt.family import OPTIMIZERS

# Linear RGB as those see it who lack the cones of long or of middle waves (Machado, Oliveira, Fernandes 2009).
SIGHT = {
    "all": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
}
# Oklab (Ottosson 2020), whose distances are those that are seen: 0.02 can just be told, black and white are 1 apart.
TO_LMS = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
TO_LAB = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]


def linear(color):
    rgb = np.array(to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def distance(one, other, sight):
    """How different two colors look."""
    seen = [np.clip(SIGHT[sight] @ linear(color), 0, 1) for color in (one, other)]
    return np.linalg.norm(np.subtract(*(TO_LAB @ np.cbrt(TO_LMS @ rgb) for rgb in seen)))


def test_every_optimizer_has_a_color_of_its_own():
    assert LINES.keys() == {*OPTIMIZERS, "adam", "adam_two_rates"}
    assert len({line.color for line in LINES.values()}) == len(LINES)


@pytest.mark.parametrize("sight", SIGHT)
def test_colors_of_the_same_dashes_look_different(sight):
    for (name, one), (other, two) in combinations(LINES.items(), 2):
        least = 0.12 if {name, other} & {*MAIN} else 0.08
        assert one.dashes != two.dashes or distance(one.color, two.color, sight) > least, f"{name}, {other}"


def test_colors_stand_out_from_the_paper():
    contrast = {name: 1.05 / (linear(line.color) @ (0.2126, 0.7152, 0.0722) + 0.05) for name, line in LINES.items()}
    assert min(contrast.values()) > 2.7, contrast


def test_an_optimizer_without_a_line_is_an_error():
    with pytest.raises(ValueError, match=r"no line for 'sgd' among \['adam', .*colors\.py"):
        pictures.style("sgd")


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        ([0.2, 0.5], [0.2, 0.5]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.3, 0.5, 0.5, 0.52], [0.3, 0.5 - 0.28 / 3, 0.5 + 0.02 / 3, 0.5 + 0.32 / 3]),
        ([0.0, 0.0, 0.98, 0.99], [0.0, 0.1, 0.9, 1.0]),
    ],
)
def test_names_move_as_little_as_they_must(wanted, places):
    found = pictures.apart(wanted, 0.1)
    assert all(above - below > 0.1 - 1e-9 for below, above in pairwise(found))
    assert found == pytest.approx(places)


def test_names_stand_in_the_order_of_the_ends_and_none_upon_another():
    figure = Figure(figsize=(pictures.WIDTH, 4))
    axes = figure.add_subplot()
    for rank, name in enumerate(LINES):
        axes.plot([1, 2], [1, 2 + rank / 1000], label=name, **pictures.style(name))
    axes.plot([1, 2], [5, 5])  # without a name
    pictures.name_ends(axes)
    figure.savefig(io.BytesIO())
    names = [text.get_text() for text in axes.texts]
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # an annotation's own has its line in it
    assert names == list(LINES)
    assert all(below.ymax <= above.ymin + 1 for below, above in pairwise(boxes))


@pytest.fixture
def saved(monkeypatch):
    """The figures that are saved, in place of their files."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, out, **settings: figures.append(figure))
    return figures


@pytest.mark.parametrize("further", range(4))
def test_the_panels_of_runs_leave_no_place_empty(saved, further):
    tags = ["lm loss", "muon/update_rms", "muon/residual", "muon/grad_norm"][: 1 + further]
    plot.draw({"run": {tag: [(1, 1.0), (2, 2.0)] for tag in tags}}, "plot.png")
    figure = saved[0]
    figure.draw_without_rendering()
    places = [axes.get_subplotspec() for axes in figure.axes]
    rows, columns = places[0].get_gridspec().get_geometry()
    assert len(places) == 1 + further
    assert sum(len(place.rowspan) * len(place.colspan) for place in places) == rows * columns


def test_an_optimizer_has_one_color_paler_in_further_runs(saved):
    def run(optimizer):
        return {tag: [(1, 9.0), (2, 1.0)] for tag in ("lm loss", f"{optimizer}/grad_norm", "adam/learning_rate")}

    plot.draw({"one": run("muon"), "other": run("soap"), "again": run("muon")}, "plot.png")
    loss, norms, rates = saved[0].axes
    pale = shade(LINES["muon"].color, 1)
    assert [line.get_color() for line in norms.lines] == [LINES["muon"].color, LINES["soap"].color, pale]
    assert [line.get_color() for line in loss.lines] == [line.get_color() for line in norms.lines]
    assert rates.lines[0].get_color() == LINES["adam"].color
    (legend,) = saved[0].legends
    assert {text.get_text() for text in legend.get_texts()} == {
        f"{run}: {optimizer}"
        for run, own in (("one", "muon"), ("other", "soap"), ("again", "muon"))
        for optimizer in (own, "adam")
    }
