"""The comparison: its runs follow from the protocol, and its tables and pictures from files of runs."""

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_eopt.megatron.arguments import amend
from megatron_eopt.registry import list_optimizers, takes_matrices
from megatron_eopt.routing import ManifestRow, families

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / "scripts" / "bench"))
import compare  # noqa: E402
import compare_figures as figures  # noqa: E402
import compare_pictures  # noqa: E402
import corpus  # noqa: E402
import pages  # noqa: E402
import protocol  # noqa: E402
import training  # noqa: E402
import trials  # noqa: E402
from protocol import Axis, Run  # noqa: E402

SETTINGS = training.read_settings(training.SETTINGS.read_text())
PAGE = "before\n<!-- settings -->\n\n| optimizer | flags | |\n|---|---|---|\n{}\n\n<!-- end -->\nafter\n"
ONE, OTHER = "| `one` | `--lr 1e-3 --flag` | a note |", "| `other` | `--muon-lr 2` | |"
MUON = protocol.trials("muon")


def cells(table):
    """The cells of each row of a Markdown table behind the first, by the first."""
    lines = table.replace("\u00a0", " ").splitlines()
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in lines if row.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


def parsed(flags):
    parser = amend(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)))
    return parser.parse_args(list(flags))


def made_up(run):
    """The loss of a run that nobody made: Adam's is 2, others are better by less than that, and more steps help."""
    place = [name for name in protocol.SPACES if name != "adam_two_rates"].index(run.named)
    place += 0.5 * (run.optimizer == "adam_two_rates")
    of_trial = abs(int(run.label[6:]) - 5) / 50 if run.label.startswith("trial") else 0.0
    of_rates = abs(math.log2(float(run.label.rpartition("-")[2]))) / 50 if "rates" in run.label else 0.0
    of_size = math.log2(run.steps / 200) / 10 + math.log2(run.width / 128) / 5
    return 2 - place / 40 + of_trial + of_rates - of_size + run.seed % 3 / 1000


def keep(run, results, loss):
    path = trials.path_of(run, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"flags": run.flags, "tune": loss, "test": loss, "training": [4.0, *(3 - k / 20 for k in range(20))]}
    found["text"] = "text"
    path.write_text(json.dumps(found))
    return found


@pytest.fixture
def trained(monkeypatch):
    """Runs that are asked for; what they leave is made up."""
    asked = []

    def execute(run, text, data, results):
        asked.append(run)
        return keep(run, results, made_up(run))

    monkeypatch.setattr(trials, "execute", execute)
    monkeypatch.setattr(corpus, "write", lambda folder: "text")
    return asked


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with all runs of the protocol."""
    results = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "execute", lambda run, text, data, results: keep(run, results, made_up(run)))
        patch.setattr(corpus, "write", lambda folder: "text")
        list(trials.whole(list(protocol.SPACES), results, results, 2))
    return results


@pytest.mark.wide
class TestSettings:
    def test_every_optimizer_is_in_the_docs(self):
        assert sorted(SETTINGS) == sorted([*list_optimizers(), "adam"])

    @pytest.mark.parametrize("name", SETTINGS)
    def test_megatron_takes_the_flags(self, name):
        args = parsed(["--optimizer", name, *SETTINGS[name]])
        largest = args.matrix_lr if takes_matrices(name) else args.lr
        smallest = args.matrix_min_lr if takes_matrices(name) else args.min_lr
        assert training.rate(SETTINGS[name]) == largest
        assert smallest == pytest.approx(largest if args.lr_decay_style == "constant" else largest / 10)

    def test_rows_are_read(self):
        read = training.read_settings(PAGE.format(f"{ONE}\n{OTHER}"))
        assert read == {"one": ["--lr", "1e-3", "--flag"], "other": ["--muon-lr", "2"]}

    @pytest.mark.parametrize("rows", ["| one | `--lr 1` | |", f"{ONE}\n{ONE}"], ids=["no name", "twice"])
    def test_a_row_that_says_nothing_is_an_error(self, rows):
        with pytest.raises(ValueError, match=r"expected a row .* for each optimizer, found '\| `?one"):
            training.read_settings(PAGE.format(rows))

    def test_a_page_without_the_marks_is_an_error(self):
        with pytest.raises(ValueError, match="expected '<!-- settings -->' and after it '<!-- end -->'"):
            training.read_settings("| `one` | `--lr 1` | |")

    def test_lines_are_replaced_between_the_marks_of_a_page(self):
        assert pages.replaced(PAGE.format(ONE), "settings", "new\n") == (
            "before\n<!-- settings -->\n\nnew\n\n<!-- end -->\nafter\n"
        )


class TestProtocol:
    @pytest.mark.full
    @pytest.mark.parametrize("name", protocol.SPACES)
    def test_trials_are_as_many_for_all_and_differ_in_four_settings(self, name):
        of_name = protocol.trials(name)
        assert len(of_name) == 12
        args = [parsed(["--optimizer", run.named, *run.flags]) for run in of_name]
        assert {(one.train_iters, one.lr_warmup_iters, one.hidden_size, one.seed) for one in args} == {
            (200, 0 if name == "schedule_free_adamw" else 10, 128, 1)
        }
        for axis in protocol.SPACES[name].axes:
            values = [float(run.settings[run.settings.index(axis.flag) + 1]) for run in of_name]
            assert len(set(values)) == 12
            assert axis.low <= min(values) < max(values) <= axis.high
            spread = math.log((1 - axis.low) / (1 - axis.high) if axis.decays else axis.high / axis.low)
            found = [math.log(1 - value) if axis.decays else math.log(value) for value in values]
            assert max(found) - min(found) > 0.75 * spread
        for rate, least in ((args[0].lr, args[0].min_lr), (args[0].matrix_lr, args[0].matrix_min_lr)):
            assert rate is None or least == pytest.approx(
                rate if name == "schedule_free_adamw" else rate / 10, rel=1e-2
            )

    def test_values_are_spaced_in_their_logarithm_and_decay_rates_in_that_of_one_less_them(self):
        assert [Axis("--lr", 0.01, 1).at(place) for place in (0, 0.5, 1)] == ["0.01", "0.1", "1"]
        assert [Axis("--b", 0.9, 0.999, decays=True).at(place) for place in (1, 0.5, 0)] == ["0.9", "0.99", "0.999"]

    def test_finals_have_seeds_that_no_trial_had_and_all_else_of_the_best(self):
        best = MUON[3]
        runs = [*protocol.finals(best), *protocol.shorter(best, 100), *protocol.shorter(best, 50)]
        for run in runs:
            assert run.seed not in {trial.seed for trial in MUON}
            assert run.settings == best.settings
        assert [run.steps for run in runs] == [200] * 8 + [100] * 4 + [50] * 4
        assert len({run.label for run in runs}) == 16

    def test_at_another_size_all_rates_change_and_nothing_else(self):
        half, same, double = protocol.size_trials(MUON[0], 256, 400)
        assert same.settings == MUON[0].settings
        for run, factor in ((half, 0.5), (double, 2.0)):
            pairs = zip(run.settings, MUON[0].settings, strict=True)
            changed = [float(one) / float(other) for one, other in pairs if one != other]
            assert changed == pytest.approx([factor] * 4, rel=0.01)
        args = parsed(half.flags)
        assert (args.hidden_size, args.ffn_hidden_size, args.num_attention_heads, args.num_query_groups) == (
            256,
            704,
            8,
            4,
        )
        assert (args.train_iters, args.lr_warmup_iters) == (400, 20)
        assert {run.steps for run in protocol.size_finals(half)} == {400}

    def test_at_the_largest_size_rates_change_by_both_factors(self):
        double = protocol.size_trials(MUON[0], 128, 400)[2]
        half = protocol.size_trials(MUON[0], 256, 200)[0]
        both = [protocol.largest(MUON[0], [double, each]) for each in (half, replace(double, width=256, steps=200))]
        assert both[0].settings == MUON[0].settings
        assert both[1].settings == protocol.scaled(MUON[0].settings, 4)
        assert {(run.width, run.steps) for run in both} == {(256, 400)}
        assert protocol.size_finals(both[1])[0].label == "width-256-steps-400-seed-11"

    def test_steps_that_a_setting_counts_follow_the_length(self):
        run = replace(protocol.trials("ademamix")[0], steps=100)
        assert parsed(["--optimizer", "ademamix", *run.flags]).ademamix_alpha_warmup == 100

    def test_the_best_is_that_of_least_loss_and_one_that_diverged_is_none(self):
        losses = dict.fromkeys(MUON, 2.0) | {MUON[4]: 1.5, MUON[5]: math.inf}
        assert protocol.best_of(MUON, losses) is MUON[4]
        with pytest.raises(ValueError, match="muon: expected a run that did not diverge among"):
            protocol.best_of(MUON, dict.fromkeys(MUON, math.inf))

    def test_leaders_are_adam_muon_and_the_two_best_others(self):
        means = {"adam": 2.0, "muon": 1.9, "soap": 1.5, "dion": 1.7, "scion": 1.6}
        assert protocol.leaders(means) == ["adam", "muon", "soap", "scion"]


@pytest.mark.wide
class TestRunner:
    def test_an_interrupted_comparison_makes_what_is_missing(self, trained, tmp_path):
        keep(MUON[2], tmp_path, 1.25)
        made = trials.make(MUON[:4], "text", tmp_path, tmp_path, 2)
        assert sorted(trained, key=MUON.index) == [MUON[0], MUON[1], MUON[3]]
        assert trials.losses(made)[MUON[2]] == 1.25
        trained.clear()
        assert trials.make(MUON[:4], "text", tmp_path, tmp_path, 2) == made
        assert not trained

    def test_runs_that_fail_are_told_after_the_others_were_made(self, monkeypatch, tmp_path):
        def execute(run, text, data, results):
            if run is MUON[1]:
                raise RuntimeError("trial-02 failed")
            return keep(run, results, 1.0)

        monkeypatch.setattr(trials, "execute", execute)
        with pytest.raises(SystemExit, match="trial-02 failed\nAll other runs are kept: call the same again"):
            trials.make(MUON[:4], "text", tmp_path, tmp_path, 2)
        assert [trials.path_of(run, tmp_path).exists() for run in MUON[:4]] == [True, False, True, True]

    def test_a_file_of_another_protocol_is_refused(self, tmp_path):
        keep(MUON[0], tmp_path, 1.0)
        with pytest.raises(ValueError, match=r"holds a run with the flags .*'--muon-lr'.*; remove it"):
            trials.read(replace(MUON[0], settings=("--lr", "1")), tmp_path)

    def test_results_of_another_text_are_refused_before_anything_is_trained(self, trained, tmp_path):
        keep(MUON[0], tmp_path, 1.0)
        with pytest.raises(SystemExit, match=r"trial-01\.json, and 0 more, trained on another text .*constraints\.txt"):
            trials.make(MUON[:2], "another", tmp_path, tmp_path, 2)
        assert not trained

    def test_interrupted_it_starts_no_other_run(self, monkeypatch, tmp_path):
        asked = []

        def execute(run, text, data, results):
            asked.append(run)
            if len(asked) == 1:
                raise KeyboardInterrupt
            time.sleep(0.2)
            return keep(run, results, 1.0)

        monkeypatch.setattr(trials, "execute", execute)
        with pytest.raises(KeyboardInterrupt):
            trials.make(MUON, "text", tmp_path, tmp_path, 1)
        assert len(asked) < len(MUON)

    @pytest.mark.parametrize(
        ("log", "status", "tune"),
        [
            ("on validation set | lm loss value: 2.5E+00 |\n{} on test set | lm loss value: 2.0E+00 |", 0, 2.5),
            ("on validation set | lm loss value: NAN |\n{} on test set | lm loss value: NAN |", 0, None),
            ("found NaN in local grad norm for bucket #0", 1, None),
            ("gradients were not finite in 10 steps in a row", 1, None),
            ("found info of a device", 1, "failed"),
            ("killed", -9, "failed"),
        ],
    )
    def test_a_log_tells_whether_a_run_diverged(self, monkeypatch, tmp_path, log, status, tune):
        at = "validation loss at iteration 200"

        def run(command, stdout, **others):
            stdout.write(f"{at} {log.format(at)}\n")
            return subprocess.CompletedProcess(command, status)

        monkeypatch.setattr(trials.subprocess, "run", run)
        if tune == "failed":
            with pytest.raises(RuntimeError, match=f"muon trial-01 failed with status {status}; its log is"):
                trials.execute(MUON[0], "text", tmp_path, tmp_path)
            assert not trials.path_of(MUON[0], tmp_path).exists()
        else:
            found = trials.execute(MUON[0], "text", tmp_path, tmp_path)
            assert found["tune"] == tune
            assert trials.read(MUON[0], tmp_path) == found

    def test_sizes_wait_for_all_optimizers(self, trained, tmp_path):
        list(trials.whole(["adam", "muon"], tmp_path, tmp_path, 2))
        assert {run.width for run in trained} == {128}
        assert {run.steps for run in trained} == {200, 100}

    def test_a_run_that_diverged_counts_as_an_infinite_loss(self, tmp_path):
        keep(MUON[0], tmp_path, None)
        assert trials.losses({MUON[0]: trials.read(MUON[0], tmp_path)}) == {MUON[0]: math.inf}

    def test_a_run_trains_and_is_judged_by_held_out_text(self, monkeypatch, tmp_path):
        """And its log says that it used the flags of its trial; the same run again has the same losses."""
        model = training.demo.MODEL.replace("--num-layers 4", "--num-layers 1")
        monkeypatch.setattr(training.demo, "MODEL", model)
        run = replace(MUON[1], steps=20, label="x")
        text = corpus.write(tmp_path)
        found, again = (trials.execute(run, text, tmp_path, tmp_path / str(k)) for k in range(2))
        assert found == again
        assert found["training"][0] > 5 > 3.5 > found["training"][-1]
        assert 2 < found["tune"] < 3.5
        assert 2 < found["test"] < 3.5
        assert found["tune"] != found["test"]
        assert trials.read(run, tmp_path / "0") == found
        assert "0.0176" in trials.log_of(run, tmp_path).read_text()

    def test_a_run_that_diverges_is_told_from_one_that_fails(self, monkeypatch, tmp_path):
        model = training.demo.MODEL.replace("--num-layers 4", "--num-layers 1")
        monkeypatch.setattr(training.demo, "MODEL", model)
        text = corpus.write(tmp_path)
        diverges = replace(protocol.trials("adam")[0], steps=20, label="x", settings=("--lr", "1e30"))
        assert trials.execute(diverges, text, tmp_path, tmp_path)["tune"] is None
        with pytest.raises(RuntimeError, match=r"muon y failed with status \d+; its log is .*muon-y\.log"):
            trials.execute(replace(MUON[0], label="y", settings=("--no-flag",)), text, tmp_path, tmp_path)


@pytest.mark.wide
class TestCorpus:
    def test_files_are_held_out_by_their_names_and_no_text_is_there_twice(self):
        texts = [(f"file{k}.py", f"{k:05}".encode() * 400) for k in range(2600)]
        found = corpus.parts(texts)
        assert {name: len(documents) for name, documents in found.items() if name != "train"} == {"tune": 1, "test": 1}
        assert {len(found[name][0]) for name in corpus.HELD_OUT} == {64 * 512 + 1}
        tune, test = ({found[name][0][at : at + 5] for at in range(0, 64 * 512, 512)} for name in corpus.HELD_OUT)
        assert len(tune) == len(test) == 64
        assert not tune & test
        held = 2600 - len(found["train"])
        assert 2600 / 12 * 0.7 < held < 2600 / 12 * 1.3

    def test_more_text_than_any_run_reads(self):
        listed = list(corpus.sources())
        assert sum(len(text) for _, text in listed) > 50e6
        assert len({text for _, text in listed}) == len(listed)

    def test_another_text_does_not_meet_the_indices_of_the_one_before(self, monkeypatch, tmp_path):
        texts = [(f"file{k}.py", f"{k:05}".encode() * 400) for k in range(2600)]
        monkeypatch.setattr(corpus, "sources", lambda: texts)
        first = corpus.write(tmp_path)
        index = tmp_path / corpus.CACHE / "index"
        index.parent.mkdir()
        index.touch()
        assert corpus.write(tmp_path) == first
        assert index.exists()
        texts.append(("one more.py", b"another text"))
        assert corpus.write(tmp_path) != first
        assert not index.exists()


class TestFigures:
    def test_an_estimate_is_that_of_students_t(self):
        """Of 1..8: deviation sqrt(6), standard error sqrt(6 / 8), 2.365 of them."""
        found = figures.estimate([float(k) for k in range(1, 9)])
        assert (found.mean, found.deviation) == (4.5, pytest.approx(math.sqrt(6)))
        assert found.half == pytest.approx(2.365 * math.sqrt(6 / 8))
        assert found.words == "4.500 ± 2.048"

    def test_a_mean_with_a_run_that_diverged_is_none(self):
        assert figures.estimate([1.0, math.inf]).words == "diverged"
        assert figures.against([1.0, 2.0], [1.0, math.inf]).words == "diverged"
        assert figures.steps_to(2.0, {200: math.inf, 100: 1.0}) is None
        assert figures.steps_to(2.0, {200: 1.0, 100: math.inf}) == 200

    def test_steps_of_single_seeds_are_to_adams_loss_of_the_same_seed(self):
        def summary(losses):
            runs = {run: losses[run.steps] for run in [*protocol.finals(MUON[0]), *protocol.shorter(MUON[0], 100)]}
            return figures.Summary(MUON[0], {}, {run: loss[run.seed - 11] for run, loss in runs.items()}, [])

        adam = summary({200: [2.0, 1.9, 2.0, 1.0, *[9.0] * 4], 100: [3.0] * 4})
        own = summary({200: [1.5] * 8, 100: [2.5, 1.9, 3.0, 2.5]})
        assert figures.steps_of_seeds(own, adam) == [
            pytest.approx(math.sqrt(2) * 100),
            100,
            pytest.approx(200 / 2 ** (1 / 3)),
            None,
        ]
        # the four that ran at both lengths: Adam's mean is 1.725, these are 2.475 and 1.5
        assert figures.steps_of_means(own, adam) == pytest.approx(100 * 2 ** (0.75 / 0.975))
        made = [*protocol.trials("adam"), *adam.test]
        table = figures.table({"adam": replace(adam, tune=dict.fromkeys(made, 1.0)), "muon": own}, {}, {})
        assert cells(table)["muon"][4] == "170 (at most 100 to not reached)"

    def test_differences_are_taken_seed_by_seed(self):
        found = figures.against([1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5])
        assert (found.mean, found.half) == (-0.5, 0.0)

    @pytest.mark.parametrize(
        ("means", "steps"),
        [
            ({200: 1.5, 100: 2.5}, math.sqrt(2) * 100),
            ({200: 1.5, 100: 2.0}, 100),
            ({200: 1.5, 100: 1.9, 50: 2.4}, 100 / 2**0.2),
            ({200: 1.5, 100: 1.9, 50: 2.0}, 50),
            ({200: 2.0, 100: 2.5}, 200),
            ({200: 2.1, 100: 2.5}, None),
        ],
    )
    def test_steps_to_a_loss_lie_between_two_lengths(self, means, steps):
        assert figures.steps_to(2.0, means) == (None if steps is None else pytest.approx(steps))

    def test_the_table_is_what_the_runs_say(self, whole):
        found = figures.summaries(whole)
        table = cells(figures.table(found, {"adam": 0.1, "muon": 0.2}, {"adam": 8.0}))
        assert list(table) == list(reversed(protocol.SPACES))  # the later of the protocol are the better here
        mean = 2 + sum(seed % 3 for seed in range(11, 19)) / 8 / 1000
        assert table["adam"] == [
            f"{mean:.3f} ± 0.001",
            "0.001",
            "-",
            "0",
            "200",
            "20",
            "0.100",
            "8.0",
        ]
        muon = table["muon"]
        assert muon[2] == "-0.025 ± 0.000"
        # the trials at 5 and its neighbours are 0.025 better than Adam's best, less 0.02 for each place
        assert muon[3] == "3"
        # at 100 steps 0.1 worse than at 200: three quarters of an octave are left to lose 0.025
        steps = f"{200 / 2**0.25:.0f}"
        assert muon[4:] == [f"{steps} ({steps} to {steps})", f"{200 / 2**0.25 * 0.2:.0f}", "0.200", "-"]

    def test_an_optimizer_of_which_runs_are_missing_has_no_row(self, whole, tmp_path):
        for name in ("adam", "muon"):
            best = protocol.trials(name)[4]
            for run in [*protocol.trials(name), *protocol.finals(best), *protocol.shorter(best, 100)]:
                keep(run, tmp_path, made_up(run))
        trials.path_of(protocol.finals(MUON[4])[0], tmp_path).unlink()
        assert list(figures.summaries(tmp_path)) == ["adam"]
        assert list(figures.summaries(whole)) == list(protocol.SPACES)

    def test_chosen_settings_are_shown_with_those_at_the_edge(self, whole):
        table = cells(figures.settings_table(figures.summaries(whole)))
        chosen = dict(zip(MUON[4].settings[::2], MUON[4].settings[1::2], strict=True))
        assert f"--muon-lr {chosen['--muon-lr']}" in table["muon"][0]
        assert "min-lr" not in table["muon"][0]
        assert table["muon"][1] == "`--muon-momentum 0.95 --muon-nesterov --muon-preset match_adamw`"
        assert table["muon"][2] == "`--adam-beta2`"  # 0.9979 of at most 0.998
        assert table["muon"][3] == "1.976, 1.996"

    def test_sizes_are_those_of_the_leaders(self, whole):
        found = figures.sizes(figures.summaries(whole), whole)
        names = list(protocol.SPACES)
        assert list(found) == ["adam", "muon", names[-1], names[-2]]
        assert {size for own in found.values() for size in own} == {
            (128, 100),
            (128, 200),
            (128, 400),
            (256, 200),
            (256, 400),
        }
        lines = figures.size_table(found).replace("\u00a0", " ").splitlines()
        assert len(lines) == 2 + 4 * 5
        assert next(line for line in lines if "| 256 | 400 | muon |" in line).endswith("| -0.025 ± 0.000 |")

    @pytest.mark.filterwarnings("error:constrained_layout not applied")  # where names have no room
    def test_pictures_are_drawn(self, whole, tmp_path):
        found = figures.summaries(whole)
        compare_pictures.draw_all(found, tmp_path / "all.png")
        compare_pictures.draw_hero(found, tmp_path / "hero.png")
        compare_pictures.draw_sizes(figures.sizes(found, whole), tmp_path / "sizes.png")
        for name in ("all", "hero", "sizes"):
            assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")

    def test_the_state_is_that_of_all_parameters_and_adams_that_beside_another(self):
        def row(name, owner, state):
            return ManifestRow(
                name, (4, 5), "float32", owner, "", "whole", (), None, 1.0, 1.0, 0.0, {}, {}, (), state, None, False
            )

        rows = [row(f"layers.{k}.weight", "muon", 80) for k in range(3)] + [row("embedding.weight", "adam", 160)]
        found = figures.states({"muon": families(rows), "lion": families([row("weight", "lion", 80)])})
        assert found == {"muon": (3 * 80 + 160) / 80, "lion": 4.0, "adam": 8.0}
        assert figures.states({}) == {}


@pytest.mark.wide
class TestSmall:
    def test_each_optimizer_is_trained_once_as_in_a_recorded_run(self, trained, whole, tmp_path):
        compare.main(["--only", "adam", "muon", "--results", str(whole), "--out", str(tmp_path)])
        assert {(run.optimizer, run.label) for run in trained} == {("adam", "final-seed-11"), ("muon", "final-seed-11")}
        table = cells((tmp_path / "compare.md").read_text())
        assert list(table) == ["muon", "adam"]
        for now, recorded, _ in table.values():
            assert now == recorded

    def test_it_says_which_optimizers_have_no_runs_and_that_the_text_is_another_one(
        self, trained, whole, monkeypatch, tmp_path
    ):
        results = tmp_path / "results"
        shutil.copytree(whole / "adam", results / "adam")
        file = trials.path_of(protocol.finals(protocol.trials("adam")[4])[0], results)
        file.write_text(file.read_text().replace('"text": "text"', '"text": "of another release"'))
        monkeypatch.chdir(tmp_path)
        compare.main(["--only", "muon", "adam", "--results", str(results), "--out", "out"])
        assert [run.optimizer for run in trained] == ["adam"]
        said = (tmp_path / "out" / "compare.md").read_text()
        assert "The text is not that of the recorded runs: torch or megatron-core is of another release." in said
        assert said.endswith("and not trained: muon.\n")

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (["--workers", "0"], "--workers 0: expected 1 or more"),
            (["--whole", "--only", "muon"], "--whole compares with adam: name it behind --only, too"),
            (["--only", "moun"], "argument --only: invalid choice: 'moun'"),
        ],
    )
    def test_wrong_flags_are_refused(self, capsys, trained, flags, said):
        with pytest.raises(SystemExit):
            compare.main(flags)
        assert said in capsys.readouterr().err
        assert not trained

    def test_the_page_is_not_written_without_adam(self, whole, tmp_path):
        shutil.copytree(whole / "muon", tmp_path / "muon")
        with pytest.raises(SystemExit, match="adam, which all are compared with, lacks runs in"):
            compare.main(["--docs", "--results", str(tmp_path)])

    def test_without_kept_runs_it_says_what_to_do(self, tmp_path):
        with pytest.raises(SystemExit, match=r"no optimizer has all its runs .*; --whole makes them"):
            compare.main(["--results", str(tmp_path), "--out", str(tmp_path)])


def less_than_adam(found):
    """Leader -> how far it is below Adam at the size of the comparison, and at the others that were tried."""
    (_, adams), *others = figures.sizes(found, trials.RESULTS).items()
    at = [(protocol.WIDTH, protocol.STEPS), *protocol.SIZES]
    return {name: [-figures.against(own[size], adams[size]).mean for size in at] for name, own in others}


class TestKept:
    """What is in the repository."""

    def test_every_file_is_a_run_of_the_protocol(self):
        found = figures.summaries(trials.RESULTS)
        allowed = {trials.path_of(run, trials.RESULTS) for name in protocol.SPACES for run in protocol.trials(name)}
        for each in found.values():
            short = [run for steps in protocol.LENGTHS for run in protocol.shorter(each.best, steps)]
            allowed |= {trials.path_of(run, trials.RESULTS) for run in [*protocol.finals(each.best), *short]}
            for width, steps in (*protocol.SIZES, protocol.LARGEST):
                of_size = protocol.size_trials(each.best, width, steps)
                finals = protocol.size_finals(of_size[0])
                allowed |= {trials.path_of(run, trials.RESULTS) for run in [*of_size, *finals]}
        allowed.add(trials.RESULTS / "seconds.json")
        kept = set(trials.RESULTS.rglob("*.json"))
        # of an optimizer that is not through, finals may be there
        through = {path for path in kept if path.parent.name in found or path.name.startswith(("trial", "seconds"))}
        assert not through - allowed

    def test_one_text_and_one_release_of_torch_for_all(self):
        texts = {
            (result["text"], result["torch"], result["megatron-core"])
            for path in trials.RESULTS.glob("*/*.json")
            for result in [json.loads(path.read_text())]
        }
        assert len(texts) == 1

    def test_the_page_has_the_tables_of_the_runs(self, monkeypatch, tmp_path):
        page = (pages.DOCS / "compare.md").read_text()
        (tmp_path / "compare.md").write_text(page)
        monkeypatch.setattr(pages, "DOCS", tmp_path)
        monkeypatch.setattr(compare, "DOCS", tmp_path)
        compare.main(["--docs"])
        assert (tmp_path / "compare.md").read_text() == page

    def test_the_gain_of_each_leader_shrinks_with_size(self):
        for first, *larger in less_than_adam(figures.summaries(trials.RESULTS)).values():
            assert all(0 < each < first for each in larger)

    def test_the_least_of_the_rates_was_best_for_two_at_the_larger_width(self):
        found = figures.summaries(trials.RESULTS)
        for name, best in (("adam", 0.5), ("muon", 0.5), ("kl_shampoo", 1.0), ("adaptive_muon", 1.0)):
            tried = protocol.size_trials(found[name].best, 256, 200)
            chosen = protocol.best_of(tried, trials.losses(figures.known(tried, trials.RESULTS)))
            assert chosen == tried[protocol.FACTORS.index(best)]

    def test_the_claim_is_what_the_runs_say(self):
        text = " ".join((ROOT / "README.md").read_text().split())
        found = figures.summaries(trials.RESULTS)
        adam, muon = (figures.estimate(found[name].of(protocol.STEPS)) for name in ("adam", "muon"))
        steps = figures.steps_of_means(found["muon"], found["adam"])
        claim = f"held-out loss of **{muon.words}**, one with Adam at **{adam.words}**"
        assert claim in text
        assert claim in " ".join((ROOT / "docs" / "index.md").read_text().split())
        of_seeds = figures.steps_of_seeds(found["muon"], found["adam"])
        assert (
            f"Muon needs **{steps:.0f} steps** ({min(of_seeds):.0f} to {max(of_seeds):.0f} by single seeds) to end "
            f"where Adam ends after {protocol.STEPS}"
        ) in text
        less = less_than_adam(found)["muon"]
        below = "over four seeds Muon is {:.2f} below Adam, with twice the steps {:.2f}, at twice the width {:.2f}."
        assert f"The gain shrinks with size: {below.format(*less)}" in text
        assert less == sorted(less, reverse=True)
        losses = {name: figures.estimate(each.of(protocol.STEPS)) for name, each in found.items()}
        best = min(losses, key=lambda name: losses[name].mean)
        assert len(losses.keys() - {"adam_two_rates"}) == 14
        assert f"Of fourteen optimizers **{best}** has the lowest loss, {losses[best].words}." in text


def test_a_run_names_its_file(tmp_path):
    assert trials.path_of(Run("muon", "trial-01", (), 1), tmp_path) == tmp_path / "muon" / "trial-01.json"
