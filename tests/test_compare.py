"""The comparison: its runs follow from the protocol, its tables from files of runs, and the pages from those kept."""

import argparse
import json
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import compare
import compare_figures as figures
import corpus
import pages
import protocol
import pytest
import recommended
import training
import trials
from megatron.training.arguments import add_megatron_arguments
from protocol import Axis

from megatron_eopt.megatron.command_line import amend
from megatron_eopt.registry import list_optimizers, takes_matrices
from megatron_eopt.settings.presets import TO_BEGIN_WITH

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = training.read_settings(training.SETTINGS.read_text())
MUON = protocol.trials("muon")
ADAM = protocol.trials("adam")


@pytest.fixture(scope="module")
def parsed():
    """Megatron's parser with our flags, which takes a second to make."""
    parser = amend(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)))
    return lambda *flags: parser.parse_args(list(flags))


def cells(table):
    """The cells of each row of a Markdown table behind the first, by the first."""
    lines = table.replace("\u00a0", " ").splitlines()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {first: others for first, *others in found[2:]}


def made_up(run):
    """The loss of a run that nobody made: Adam's is 2, later optimizers and more steps are better."""
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


def test_the_docs_have_flags_for_every_optimizer_that_megatron_takes(parsed):
    assert sorted(SETTINGS) == sorted([*list_optimizers(), "adam"])
    for name, flags in SETTINGS.items():
        args = parsed("--optimizer", name, *flags)
        largest, smallest = (args.matrix_lr, args.matrix_min_lr) if takes_matrices(name) else (args.lr, args.min_lr)
        assert training.rate(flags) == largest
        assert smallest == pytest.approx(largest if args.lr_decay_style == "constant" else largest / 10)


def test_a_table_of_flags_that_cannot_be_read_is_refused():
    page = "a\n<!-- settings -->\n\n| optimizer | flags | |\n|---|---|---|\n{}\n\n<!-- end -->\nb\n"
    one = "| `one` | `--lr 1e-3 --flag` | a note |"
    assert training.read_settings(page.format(one)) == {"one": ["--lr", "1e-3", "--flag"]}
    assert pages.replaced(page.format(one), "settings", "new\n") == "a\n<!-- settings -->\n\nnew\n\n<!-- end -->\nb\n"
    for rows, message in ((one.replace("`one`", "one"), "expected a row"), (f"{one}\n{one}", "expected a row")):
        with pytest.raises(ValueError, match=message):
            training.read_settings(page.format(rows))
    with pytest.raises(ValueError, match="expected '<!-- settings -->'"):
        training.read_settings(one)


class TestProtocol:
    def test_every_optimizer_has_as_many_trials_which_differ_in_four_settings(self, parsed):
        for name, space in protocol.SPACES.items():
            runs = protocol.trials(name)
            args = parsed("--optimizer", runs[0].named, *runs[0].flags)
            constant = name == "schedule_free_adamw"
            assert (args.train_iters, args.lr_warmup_iters) == (200, 0 if constant else 10)
            assert (args.hidden_size, args.seed, len(runs)) == (128, 1, 12)
            for axis in space.axes:
                values = [float(run.settings[run.settings.index(axis.flag) + 1]) for run in runs]
                assert len(set(values)) == 12
                assert axis.low <= min(values) < max(values) <= axis.high
            for rate, least in ((args.lr, args.min_lr), (args.matrix_lr, args.matrix_min_lr)):
                assert rate is None or least == pytest.approx(rate if constant else rate / 10, rel=1e-2)

    def test_values_are_spaced_in_their_logarithm_and_decay_rates_in_that_of_one_less_them(self):
        assert [Axis("--lr", 0.01, 1).at(place) for place in (0, 0.5, 1)] == ["0.01", "0.1", "1"]
        assert [Axis("--b", 0.9, 0.999, decays=True).at(place) for place in (1, 0.5, 0)] == ["0.9", "0.99", "0.999"]

    def test_the_best_runs_again_with_seeds_that_no_trial_had(self):
        losses = dict.fromkeys(MUON, 2.0) | {MUON[4]: 1.5, MUON[5]: math.inf}
        best = protocol.best_of(MUON, losses)
        assert best is MUON[4]
        runs = [*protocol.finals(best), *protocol.shorter(best, 100), *protocol.shorter(best, 50)]
        assert not {run.seed for run in runs} & {trial.seed for trial in MUON}
        assert {run.settings for run in runs} == {best.settings}
        assert [run.steps for run in runs] == [200] * 8 + [100] * 4 + [50] * 4
        assert len({run.label for run in runs}) == 16
        with pytest.raises(ValueError, match="muon: expected a run that did not diverge among"):
            protocol.best_of(MUON, dict.fromkeys(MUON, math.inf))

    def test_at_other_sizes_all_rates_change_and_nothing_else(self, parsed):
        half, same, double = protocol.size_trials(MUON[0], 256, 400)
        assert same.settings == MUON[0].settings
        for run, factor in ((half, 0.5), (double, 2.0)):
            pairs = zip(run.settings, MUON[0].settings, strict=True)
            changed = [float(one) / float(other) for one, other in pairs if one != other]
            assert changed == pytest.approx([factor] * 4, rel=0.01)
        args = parsed(*half.flags)
        assert (args.hidden_size, args.ffn_hidden_size, args.num_attention_heads) == (256, 704, 8)
        assert (args.train_iters, args.lr_warmup_iters) == (400, 20)
        assert protocol.largest(MUON[0], [double, double]).settings == protocol.scaled(MUON[0].settings, 4)


class TestRunner:
    def test_an_interrupted_comparison_makes_what_is_missing(self, trained, monkeypatch, tmp_path):
        keep(MUON[2], tmp_path, None)
        made = trials.make(MUON[:4], "text", tmp_path, tmp_path, 2)
        assert sorted(trained, key=MUON.index) == [MUON[0], MUON[1], MUON[3]]
        assert trials.losses(made)[MUON[2]] == math.inf  # it diverged
        trained.clear()
        assert trials.make(MUON[:4], "text", tmp_path, tmp_path, 2) == made
        assert not trained

        def execute(run, text, data, results):
            if run is MUON[4]:
                raise RuntimeError("trial-05 failed")
            return keep(run, results, 1.0)

        monkeypatch.setattr(trials, "execute", execute)
        with pytest.raises(SystemExit, match="trial-05 failed\nAll other runs are kept"):
            trials.make(MUON[3:6], "text", tmp_path, tmp_path, 2)
        assert trials.path_of(MUON[5], tmp_path).exists()

    def test_kept_runs_of_another_protocol_or_text_are_refused(self, trained, tmp_path):
        keep(MUON[0], tmp_path, 1.0)
        with pytest.raises(ValueError, match=r"holds a run with the flags .*; remove it"):
            trials.read(replace(MUON[0], settings=("--lr", "1")), tmp_path)
        with pytest.raises(SystemExit, match=r"trial-01\.json, and 0 more, trained on another text"):
            trials.make(MUON[:2], "another", tmp_path, tmp_path, 2)
        assert not trained

    @pytest.mark.parametrize(
        ("log", "status", "tune"),
        [
            ("on validation set | lm loss value: 2.5E+00 |\n{} on test set | lm loss value: 2.0E+00 |", 0, 2.5),
            ("on validation set | lm loss value: NAN |\n{} on test set | lm loss value: NAN |", 0, None),
            ("found NaN in local grad norm for bucket #0", 1, None),
            ("gradients were not finite in 10 steps in a row", 1, None),
            ("found info of a device", 1, "failed"),
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

    @pytest.mark.wide
    def test_a_run_trains_and_is_judged_by_held_out_text(self, monkeypatch, tmp_path):
        """And its log says that it used the flags of its trial; the same run again has the same losses."""
        model = training.demo.MODEL.replace("--num-layers 4", "--num-layers 1")
        monkeypatch.setattr(training.demo, "MODEL", model)
        run = replace(MUON[1], steps=20, label="x")
        text = corpus.write(tmp_path)
        found, again = (trials.execute(run, text, tmp_path, tmp_path / str(k)) for k in range(2))
        assert found == again
        assert found["training"][0] > 5 > 3.5 > found["training"][-1]
        assert all(2 < found[name] < 3.5 for name in ("tune", "test"))
        assert found["tune"] != found["test"]
        assert "0.0176" in trials.log_of(run, tmp_path).read_text()
        diverges = replace(ADAM[0], steps=20, label="x", settings=("--lr", "1e30"))
        assert trials.execute(diverges, text, tmp_path, tmp_path)["tune"] is None


def test_held_out_text_is_in_no_other_set_and_new_text_drops_the_old_indices(monkeypatch, tmp_path):
    texts = [(f"file{k}.py", f"{k:05}".encode() * 400) for k in range(2600)]
    found = corpus.parts(texts)
    tune, test = ({found[name][0][at : at + 5] for at in range(0, 64 * 512, 512)} for name in corpus.HELD_OUT)
    assert len(tune) == len(test) == 64
    trained_on = {text[:5] for text in found["train"]}
    assert not tune & test
    assert not trained_on & (tune | test)
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
    def test_an_estimate_is_that_of_students_t_and_differences_are_taken_seed_by_seed(self):
        """Of 1..8: deviation sqrt(6), standard error sqrt(6 / 8), 2.365 of them."""
        assert figures.estimate([float(k) for k in range(1, 9)]).words == "4.500 ± 2.048"
        assert figures.against([1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5]).words == "-0.500 ± 0.000"
        assert figures.against([1.0, 2.0], [1.0, math.inf]).words == "diverged"

    @pytest.mark.parametrize(
        ("means", "steps"),
        [
            ({200: 1.5, 100: 2.5}, math.sqrt(2) * 100),
            ({200: 1.5, 100: 2.0}, 100),
            ({200: 1.5, 100: 1.9, 50: 2.4}, 100 / 2**0.2),
            ({200: 1.5, 100: 1.9, 50: 2.0}, 50),
            ({200: 2.0, 100: 2.5}, 200),
            ({200: 2.1, 100: 2.5}, None),
            ({200: math.inf, 100: 1.0}, None),
            ({200: 1.0, 100: math.inf}, 200),
        ],
    )
    def test_steps_to_a_loss_lie_between_two_lengths(self, means, steps):
        assert figures.steps_to(2.0, means) == (None if steps is None else pytest.approx(steps))

    def test_steps_of_single_seeds_are_to_adams_loss_of_the_same_seed(self):
        def summary(losses):
            runs = {run: losses[run.steps] for run in [*protocol.finals(MUON[0]), *protocol.shorter(MUON[0], 100)]}
            return figures.Summary(MUON[0], {}, {run: loss[run.seed - 11] for run, loss in runs.items()}, [])

        adam = summary({200: [2.0, 1.9, 2.0, 1.0, *[9.0] * 4], 100: [3.0] * 4})
        own = summary({200: [1.5] * 8, 100: [2.5, 1.9, 3.0, 2.5]})
        of_seeds = [math.sqrt(2) * 100, 100, 200 / 2 ** (1 / 3), None]
        assert figures.steps_of_seeds(own, adam) == [each and pytest.approx(each) for each in of_seeds]
        # the four that ran at both lengths: Adam's mean is 1.725, these are 2.475 and 1.5
        assert figures.steps_of_means(own, adam) == pytest.approx(100 * 2 ** (0.75 / 0.975))

    def test_the_tables_are_what_the_runs_say(self, whole):
        found = figures.summaries(whole)
        table = cells(figures.table(found, {"adam": 0.1, "muon": 0.2}, {"adam": 8.0}))
        assert list(table) == list(reversed(protocol.SPACES))  # the later of the protocol are the better here
        mean = 2 + sum(seed % 3 for seed in range(11, 19)) / 8 / 1000
        assert table["adam"] == [f"{mean:.3f} ± 0.001", "0.001", "-", "0", "200", "20", "0.100", "8.0"]
        # at 100 steps 0.1 worse than at 200: three quarters of an octave are left to lose 0.025
        steps, seconds = f"{200 / 2**0.25:.0f}", f"{200 / 2**0.25 * 0.2:.0f}"
        muon = ["-0.025 ± 0.000", "3", f"{steps} ({steps} to {steps})", seconds, "0.200", "-"]
        assert table["muon"][2:] == muon
        chosen = cells(figures.settings_table(found))["muon"]
        best = MUON[4].settings
        assert f"--muon-lr {best[best.index('--muon-lr') + 1]}" in chosen[0]
        assert chosen[1:] == [
            "`--muon-momentum 0.95 --muon-nesterov --muon-preset match_adamw`",
            "`--adam-beta2`",  # 0.9979 of at most 0.998
            "1.976, 1.996",
        ]
        of_sizes = figures.sizes(found, whole)
        names = list(protocol.SPACES)
        assert list(of_sizes) == ["adam", "muon", *reversed(names[-protocol.LEADERS :])]
        assert "| 256 | 400 | muon |" in figures.size_table(of_sizes)

    def test_an_optimizer_of_which_runs_are_missing_has_no_row(self, whole, tmp_path):
        for name in ("adam", "muon"):
            shutil.copytree(whole / name, tmp_path / name)
        trials.path_of(protocol.finals(MUON[4])[0], tmp_path).unlink()
        assert list(figures.summaries(tmp_path)) == ["adam"]


class TestCommand:
    def test_each_optimizer_is_trained_once_as_in_a_recorded_run(self, trained, whole, tmp_path):
        results = tmp_path / "results"
        shutil.copytree(whole / "adam", results / "adam")
        file = trials.path_of(protocol.finals(ADAM[4])[0], results)
        file.write_text(file.read_text().replace('"text": "text"', '"text": "of another release"'))
        compare.main(["--only", "muon", "adam", "--results", str(results), "--out", str(tmp_path / "out")])
        assert [(run.optimizer, run.label) for run in trained] == [("adam", "final-seed-11")]
        said = (tmp_path / "out" / "compare.md").read_text()
        now, recorded, _ = cells(said)["adam"]
        assert now == recorded
        assert "The text is not that of the recorded runs" in said
        assert said.endswith("and not trained: muon.\n")

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (["--workers", "0"], "--workers 0: expected 1 or more"),
            (["--whole", "--only", "muon"], "--whole compares with adam: name it behind --only, too"),
            (["--docs"], "adam, which all are compared with, lacks runs in"),
            (["--only", "soap"], "no optimizer has all its runs"),
        ],
    )
    def test_what_it_cannot_do_is_refused(self, capsys, trained, whole, tmp_path, flags, said):
        shutil.copytree(whole / "muon", tmp_path / "muon")
        with pytest.raises(SystemExit) as ended:
            compare.main([*flags, "--results", str(tmp_path), "--out", str(tmp_path)])
        assert said in f"{ended.value} {capsys.readouterr().err}"
        assert not trained


class TestKept:
    """What is in the repository."""

    def test_every_file_is_a_run_of_the_protocol_on_one_text(self):
        allowed = {trials.path_of(run, trials.RESULTS) for name in protocol.SPACES for run in protocol.trials(name)}
        for each in figures.summaries(trials.RESULTS).values():
            runs = [*protocol.finals(each.best)]
            for steps in protocol.LENGTHS:
                runs += protocol.shorter(each.best, steps)
            for size in (*protocol.SIZES, protocol.LARGEST):
                of_size = protocol.size_trials(each.best, *size)
                runs += [*of_size, *protocol.size_finals(of_size[0])]
            allowed |= {trials.path_of(run, trials.RESULTS) for run in runs}
        kept = set(trials.RESULTS.glob("*/*.json"))
        assert not kept - allowed
        results = [json.loads(path.read_text()) for path in kept]
        assert len({(each["text"], each["torch"], each["megatron-core"]) for each in results}) == 1

    def test_the_page_has_the_tables_of_the_runs(self, monkeypatch, tmp_path):
        page = (pages.DOCS / "compare.md").read_text()
        (tmp_path / "compare.md").write_text(page)
        monkeypatch.setattr(pages, "DOCS", tmp_path)
        monkeypatch.setattr(compare, "DOCS", tmp_path)
        compare.main(["--docs"])
        assert (tmp_path / "compare.md").read_text() == page

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
        of_sizes = figures.sizes(found, trials.RESULTS)
        at = [(protocol.WIDTH, protocol.STEPS), *protocol.SIZES]
        less = [-figures.against(of_sizes["muon"][size], of_sizes["adam"][size]).mean for size in at]
        below = "over four seeds Muon is {:.2f} below Adam, with twice the steps {:.2f}, at twice the width {:.2f}."
        assert f"The gain shrinks with size: {below.format(*less)}" in text
        assert less == sorted(less, reverse=True)
        losses = {name: figures.estimate(each.of(protocol.STEPS)) for name, each in found.items()}
        best = min(losses, key=lambda name: losses[name].mean)
        assert len(losses.keys() - {"adam_two_rates"}) == 13
        assert f"Of thirteen optimizers **{best}** has the lowest loss, {losses[best].words}." in text


def test_recommended_lines_end_below_adamws_best(monkeypatch):
    monkeypatch.setattr(recommended, "train", lambda *run: pytest.fail(f"{run} is not recorded"))
    runs = recommended.Runs(recommended.RESULTS)
    best = recommended.best_rate(runs)
    for name in recommended.NAMES:
        assert runs.mean(name, best * TO_BEGIN_WITH[name].rate) < runs.mean("adamw", best)
    page = (pages.DOCS / recommended.PAGE).read_text()
    assert pages.between(page, "recommended").strip() == recommended.table(runs)
    readme = (ROOT / "README.md").read_text()
    for name in ("adamw", "muon", "soap", "kl_shampoo"):
        assert f"{runs.mean(name, best * TO_BEGIN_WITH[name].rate):.3f} with" in readme
