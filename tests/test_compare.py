"""What `make compare` is made of: the settings are those of the docs, the figures those of the runs."""

import argparse
import json
import re
import sys
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_eopt.manifest import ManifestRow, families
from megatron_eopt.megatron.arguments import amend
from megatron_eopt.registry import list_optimizers, takes_matrices
from tests.megatron.runs import LAUNCHER, start

pytestmark = pytest.mark.wide

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / "benchmarks"))
import compare  # noqa: E402
import compare_figures as figures  # noqa: E402
import demo  # noqa: E402
from compare_figures import Record  # noqa: E402

SETTINGS = figures.read_settings(compare.SETTINGS.read_text())
PAGE = "before\n<!-- settings -->\n\n| optimizer | flags | |\n|---|---|---|\n{}\n\n<!-- end -->\nafter\n"
ONE, OTHER = "| `one` | `--lr 1e-3 --flag` | a note |", "| `other` | `--muon-lr 2` | |"


def line(iteration: int, loss: float, milliseconds: float) -> str:
    """A line as Megatron 0.19.2 prints it."""
    return (
        f" [2026-01-31 09:18:39.618176] iteration {iteration:8d}/     200 | consumed samples: {16:12d} "
        f"| elapsed time per iteration (ms): {milliseconds} | learning rate: 2.700000E-03 | global batch size:    16 "
        f"| lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 7.430 |\n"
    )


def record(name: str, seconds: float, steps: int = 100, **further: float) -> Record:
    """A run whose loss at step k is 5 - k / 50."""
    return Record(name=name, seconds=seconds, losses={k: 5 - k / 50 for k in range(1, steps + 1)}, **further)


def cells(table: str) -> dict[str, list[str]]:
    """The cells of each row of a Markdown table behind the first, by the first."""
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines() if row.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


class TestSettings:
    def test_every_optimizer_is_in_the_docs(self):
        assert sorted(SETTINGS) == sorted([*list_optimizers(), "adam"])

    @pytest.mark.parametrize("name", SETTINGS)
    def test_megatron_takes_the_flags(self, name):
        parser = amend(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)))
        parsed = parser.parse_args(["--optimizer", name, *SETTINGS[name]])
        assert parsed.optimizer == name
        largest = parsed.matrix_lr if takes_matrices(name) else parsed.lr
        smallest = parsed.matrix_min_lr if takes_matrices(name) else parsed.min_lr
        assert figures.rate(SETTINGS[name]) == largest
        assert smallest == pytest.approx(largest if parsed.lr_decay_style == "constant" else largest / 10)

    def test_rows_are_read(self):
        read = figures.read_settings(PAGE.format(f"{ONE}\n{OTHER}"))
        assert read == {"one": ["--lr", "1e-3", "--flag"], "other": ["--muon-lr", "2"]}

    @pytest.mark.parametrize("rows", ["| one | `--lr 1` | |", f"{ONE}\n{ONE}"], ids=["no name", "twice"])
    def test_a_row_that_says_nothing_is_an_error(self, rows):
        with pytest.raises(ValueError, match=r"expected a row .* for each optimizer, found '\| `?one"):
            figures.read_settings(PAGE.format(rows))

    def test_a_page_without_the_marks_is_an_error(self):
        with pytest.raises(ValueError, match="expected '<!-- settings -->' and after it '<!-- end -->'"):
            figures.read_settings("| `one` | `--lr 1` | |")

    def test_lines_are_replaced_between_the_marks_of_a_page(self):
        assert figures.replaced(PAGE.format(ONE), "settings", "new\n") == (
            "before\n<!-- settings -->\n\nnew\n\n<!-- end -->\nafter\n"
        )

    def test_a_sweep_changes_the_rate_of_what_the_optimizer_owns(self):
        flags = ["--lr", "3e-3", "--muon-lr", "2e-2", "--muon-min-lr", "2e-3", "--flag"]
        assert figures.at_rate(flags, 6e-2) == ["--lr", "3e-3", "--muon-lr", "0.06", "--muon-min-lr", "0.006", "--flag"]
        assert figures.at_rate(["--min-lr", "1", "--lr", "10"], 5.0) == ["--min-lr", "0.5", "--lr", "5"]


class TestFigures:
    def test_times_are_read_and_the_fastest_ten_steps_behind_the_first_count(self):
        """Every tenth step takes 0.2 s and others 0.1 s; the machine is disturbed in two blocks of four."""
        times = [0.2 if k % 10 == 0 else 0.1 for k in range(1, 41)]
        times[:5], times[24], times[35] = [0.01] * 5, 9.0, 0.3
        read = figures.read_times(line(k, 1.0, 1e3 * seconds) for k, seconds in enumerate(times, 1))
        assert read == pytest.approx(times)
        assert figures.seconds_per_step(read) == pytest.approx(0.11)

    def test_too_few_steps_have_no_time(self):
        with pytest.raises(ValueError, match="taken from 20 steps or more, found 19"):
            figures.seconds_per_step([0.1] * 19)

    def test_losses_at_equal_steps_and_at_equal_seconds(self):
        """The fast run ends after 10 s, when the slow one has made 40 steps."""
        found = cells(figures.table([record("slow", 0.25), record("fast", 0.1)]))
        mean_to = {100: 5 - (81 + 100) / 2 / 50, 40: 5 - (21 + 40) / 2 / 50}
        assert found["slow"][:5] == [f"{mean_to[100]:.3f}", "-", f"{mean_to[40]:.3f}", "40", "0.250"]
        assert found["fast"][:5] == [f"{mean_to[100]:.3f}", "-", f"{mean_to[100]:.3f}", "100", "0.100"]
        assert "| loss after 10 s |" in figures.table([record("slow", 0.25), record("fast", 0.1)])

    def test_a_run_makes_no_more_steps_than_it_made(self):
        assert figures.steps_within(record("fast", 0.1), 60.0) == 100

    def test_the_state_is_that_of_all_parameters_and_adams_that_beside_another(self):
        def row(name: str, owner: str, state: int) -> ManifestRow:
            return ManifestRow(
                name, (4, 5), "float32", owner, "", "whole", (), None, 1.0, 1.0, 0.0, {}, {}, (), state, None, False
            )

        rows = [row(f"layers.{k}.weight", "muon", 80) for k in range(3)] + [row("embedding.weight", "adam", 160)]
        found = figures.states({"muon": families(rows), "lion": families([row("weight", "lion", 80)])})
        assert found == {"muon": (3 * 80 + 160) / 80, "lion": 4.0, "adam": 8.0}

    def test_without_a_manifest_nothing_is_said_of_adam(self):
        assert figures.states({}) == {}
        assert cells(figures.table([record("adam", 0.1, held_out=2.0)]))["adam"][-5:] == [
            "2.000",
            "3.190",
            "100",
            "0.100",
            "-",
        ]

    def test_a_sweep_is_shown_by_rate_with_the_recommended_one_in_bold(self):
        losses = {3e-2: 1.5, 1e-3: 2.0, 3e-3: 1.75}
        table = figures.sweep_table({("muon", 60): losses}, {"muon": ["--muon-lr", "3e-3"]})
        assert cells(table) == {"muon": ["--muon-lr", "60", "0.001: 2.000, **0.003: 1.750**, 0.03: 1.500"]}


@pytest.fixture
def forked(monkeypatch):
    """Runs fork from a process that has imported Megatron, as those of all tests: that takes longer than the runs."""

    def execute(arguments, log, threads=1):
        if "examples/pretrain_gpt.py" not in arguments:
            return run(arguments, log)
        program = [*LAUNCHER[:-1], str(ROOT / "examples" / "pretrain_gpt.py")]
        done = start(1, *arguments[arguments.index("examples/pretrain_gpt.py") + 1 :], program=program)
        assert done.returncode == 0, done.stdout[-4000:]
        log.write_text(done.stdout)
        return iter(done.stdout.splitlines(keepends=True))

    run = demo.execute
    monkeypatch.setattr(demo, "execute", execute)


@pytest.mark.usefixtures("forked")
def test_two_optimizers_leave_a_table_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "MODEL", demo.MODEL.replace("--num-layers 4", "--num-layers 1"))
    compare.main(["--only", "adam", "lion", "--steps", "20", "--out", str(tmp_path)])
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    found = cells((tmp_path / "compare.md").read_text())
    assert list(found) == ["adam", "lion"]
    for name, (at_steps, held_out, *_, state) in found.items():
        log = (tmp_path / f"{name}.log").read_text()
        losses = [float(loss) for loss in re.findall(r"iteration .* lm loss: (\S+)", log)]
        assert float(at_steps) == pytest.approx((losses[0] + sum(losses[2:])) / 19, abs=1e-3)
        assert losses[-1] < losses[0] - 1
        assert 0.5 * losses[-1] < float(held_out) < losses[0]
        assert state == {"adam": "-", "lion": "4.00"}[name]
    assert json.loads((tmp_path / "lion.json").read_text())["families"]


def test_a_sweep_adds_rates_to_those_it_has_and_shows_those_of_the_same_flags(tmp_path, monkeypatch):
    trained = []

    def train(name, flags, steps, out):
        trained.append(figures.rate(flags))
        return Record(name=name, seconds=0.1, losses=dict.fromkeys(range(1, steps + 1), 2 + figures.rate(flags)))

    monkeypatch.setattr(compare, "train", train)
    flags = ["--lr", "0.3", "--min-lr", "0.03"]
    compare.sweep({"lion": flags}, 20, [1.0], tmp_path)
    other = compare.sweep({"lion": [*flags, "--weight-decay", "0.1"]}, 20, [1.0], tmp_path)
    both = compare.sweep({"lion": flags}, 20, [1.0, 2.0], tmp_path)
    assert trained == [0.3, 0.3, 0.6]
    assert cells(other) == {"lion": ["--lr", "20", "**0.3: 2.300**"]}
    assert cells(both) == {"lion": ["--lr", "20", "**0.3: 2.300**, 0.6: 2.600"]}


def test_the_runs_differ_in_their_optimizer_and_its_flags_only(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "free_port", lambda: 1)
    one, other = (compare.command(name, SETTINGS[name], 50, tmp_path) for name in ("muon", "adam"))
    place = one.index("--optimizer")
    assert one[:place] == other[:place]
    assert one[place:] == [
        "--optimizer",
        "muon",
        *SETTINGS["muon"],
        "--optimizer-manifest-file",
        f"{tmp_path}/muon.json",
    ]


def test_the_docs_get_their_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "DOCS", tmp_path)
    (tmp_path / "compare.md").write_text((ROOT / "docs" / "compare.md").read_text())
    compare.put_into_docs("figures", "new figures")
    compare.put_into_docs("sweep", "new sweep")
    page = (tmp_path / "compare.md").read_text()
    assert figures.between(page, "figures").strip() == "new figures"
    assert figures.between(page, "sweep").strip() == "new sweep"
    assert "](compare.png)" in page
