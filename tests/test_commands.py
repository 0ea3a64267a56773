"""The commands of the Makefile and what the demo is made of; the demo itself is run by ``make demo``."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

ROOT = Path(__file__).resolve().parent.parent
FIND_PYTHON = ROOT / "scripts" / "find-python.sh"
BOOTSTRAP = ROOT / "scripts" / "bootstrap.sh"

sys.path.insert(0, str(ROOT / "examples"))
import demo  # noqa: E402
import stdlib_dataset  # noqa: E402


def line(iteration: int, loss: str) -> str:
    """A line as Megatron 0.19.2 prints it, behind another rank's output."""
    return (
        f"[Rank 0] done [2026-01-31 09:18:39.618176] iteration {iteration:8d}/     200 | consumed samples: {16:12d} "
        "| elapsed time per iteration (ms): 700.6 | learning rate: 2.700000E-03 | global batch size:    16 "
        f"| lm loss: {loss} | loss scale: 1.0 | grad norm: 7.430 | number of skipped iterations:   0 |\n"
    )


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def good_python(path: Path) -> Path:
    return executable(path, f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')


def find_python(directory: Path, pyenv: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(directory), "PYENV_ROOT": str(pyenv)}
    return subprocess.run(["/bin/sh", FIND_PYTHON], env=environment, capture_output=True, text=True, check=False)


class TestFindPython:
    def test_finds_a_good_one(self, tmp_path):
        good = good_python(tmp_path / "bin" / "python3.12")
        assert find_python(good.parent, tmp_path).stdout == f"{good}\n"

    def test_passes_over_a_shim_that_fails_and_a_python_without_ensurepip(self, tmp_path):
        executable(
            tmp_path / "bin" / "python3.12", "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"
        )
        without_ensurepip = "import sys; sys.modules['ensurepip'] = None; exec(sys.argv[1])"
        executable(
            tmp_path / "bin" / "python3.13",
            f'#!/bin/sh\nwhile [ "$1" != -c ]; do shift; done\nexec "{sys.executable}" -c "{without_ensurepip}" "$2"\n',
        )
        good = good_python(tmp_path / "bin" / "python3")
        assert find_python(good.parent, tmp_path).stdout == f"{good}\n"

    def test_looks_into_the_versions_of_pyenv(self, tmp_path):
        (tmp_path / "bin").mkdir()
        good = good_python(tmp_path / "a pyenv" / "versions" / "3.12.7" / "bin" / "python3.12")
        assert find_python(tmp_path / "bin", tmp_path / "a pyenv").stdout == f"{good}\n"

    def test_says_in_one_line_what_to_install(self, tmp_path):
        # An old Python fails the check by its exit status; that is all the script sees of it.
        old = executable(tmp_path / "bin" / "python3", "#!/bin/sh\nexit 1\n")
        done = find_python(old.parent, tmp_path)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert "apt install python3.12-venv" in done.stderr

    def test_refuses_an_old_version(self, tmp_path):
        pretend = "import sys; sys.version_info = (3, 11, 9); exec(sys.argv[1])"
        old = executable(
            tmp_path / "bin" / "python3",
            f'#!/bin/sh\nwhile [ "$1" != -c ]; do shift; done\nexec "{sys.executable}" -c "{pretend}" "$2"\n',
        )
        assert find_python(old.parent, tmp_path).returncode == 1


class TestBootstrap:
    """With a python that makes no real environment: what is called and when, not what pip does."""

    READ = ("pyproject.toml", "megatron_eopt/version.py", "scripts/constraints.txt")

    @pytest.fixture
    def checkout(self, tmp_path):
        root = tmp_path / "a checkout"
        for folder in ("scripts", "megatron_eopt"):
            (root / folder).mkdir(parents=True)
        for script in (FIND_PYTHON, BOOTSTRAP):
            executable(root / "scripts" / script.name, script.read_text())
        for name in self.READ:
            (root / name).write_text("first\n")
        # As a base it makes an environment that holds itself; as the environment's it notes what pip was asked.
        executable(
            tmp_path / "bin" / "python3.12",
            '#!/bin/sh\ncase "$*" in\n'
            '*"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;\n'
            '*"-m pip"*) echo "$@" >>pip-calls; [ ! -e pip-fails ] ;;\nesac\n',
        )
        return root

    def bootstrap(self, root: Path) -> int:
        environment = {"PATH": f"{root.parent / 'bin'}:/usr/bin:/bin", "PYENV_ROOT": str(root)}
        return subprocess.run(
            ["/bin/sh", root / "scripts" / "bootstrap.sh"], env=environment, capture_output=True, check=False
        ).returncode

    def calls(self, root: Path) -> int:
        return len((root / "pip-calls").read_text().splitlines())

    @pytest.mark.parametrize("changed", READ)
    def test_installs_once_and_again_when_a_file_of_it_changes(self, checkout, changed):
        assert self.bootstrap(checkout) == 0
        assert self.bootstrap(checkout) == 0
        assert self.calls(checkout) == 1
        (checkout / changed).write_text("second\n")
        assert self.bootstrap(checkout) == 0
        assert self.calls(checkout) == 2

    def test_an_install_that_failed_is_tried_again(self, checkout):
        (checkout / "pip-fails").touch()
        assert self.bootstrap(checkout) != 0
        (checkout / "pip-fails").unlink()
        assert self.bootstrap(checkout) == 0
        assert self.calls(checkout) == 2

    def test_a_copied_checkout_installs_itself(self, checkout):
        assert self.bootstrap(checkout) == 0
        copy = checkout.rename(checkout.with_name("copy"))
        assert self.bootstrap(copy) == 0
        assert self.calls(copy) == 2

    def test_an_environment_whose_python_is_gone_is_made_anew(self, checkout):
        assert self.bootstrap(checkout) == 0
        (checkout / ".venv" / "bin" / "python").unlink()
        assert self.bootstrap(checkout) == 0
        assert self.calls(checkout) == 2

    def test_without_a_python_it_fails(self, checkout):
        executable(checkout.parent / "bin" / "python3.12", "#!/bin/sh\nexit 1\n")
        for name in ("python3.13", "python3.14", "python3", "python"):
            executable(checkout.parent / "bin" / name, "#!/bin/sh\nexit 1\n")
        assert self.bootstrap(checkout) != 0
        assert not (checkout / ".venv").exists()


def test_make_keeps_the_callers_python_settings_out():
    """The settings reach make, and none of them what make runs."""
    settings = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV", "PIP_USER", "PIP_TARGET")
    rule = "show:\n\t@env\n"
    done = subprocess.run(
        ["make", "-s", "-f", "Makefile", "-f", "-", "show"],
        cwd=ROOT,
        input=rule,
        env=os.environ | dict.fromkeys(settings, "leaked") | {"UNRELATED": "kept"},
        capture_output=True,
        text=True,
        check=True,
    )
    seen = dict(entry.split("=", 1) for entry in done.stdout.splitlines() if "=" in entry)
    assert seen["UNRELATED"] == "kept"
    assert not seen.keys() & set(settings)


class TestDataset:
    def test_the_bytes_of_each_file_come_back(self, tmp_path):
        texts = [bytes(range(256)) * 3, b"", "naïve\n".encode()]
        files = [tmp_path / f"{i}.py" for i in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_bytes(text)
        tokens = stdlib_dataset.write_dataset(files, tmp_path / "new folder" / "data")
        dataset = IndexedDataset(str(tmp_path / "new folder" / "data"))
        assert [document.astype(np.uint8).tobytes() for document in dataset] == [texts[0], texts[2]]
        assert dataset.document_indices.tolist() == [0, 1, 2]
        assert tokens == len(texts[0]) + len(texts[2])

    def test_nothing_to_write_is_an_error(self, tmp_path):
        with pytest.raises(ValueError, match="0 files were given"):
            stdlib_dataset.write_dataset([], tmp_path / "data")

    def test_the_standard_library_is_enough_for_the_demo(self):
        """Each batch is new, as the picture says: more tokens than the demo reads."""
        sizes = [file.stat().st_size for file in stdlib_dataset.stdlib_sources()]
        assert sum(sizes) > demo.STEPS * 16 * 129


class TestLog:
    def test_losses_are_read_without_the_mean_of_two(self):
        lines = [line(1, "5.533341E+00"), line(2, "5.244781E+00"), "training ...\n", line(3, "4.356644E+00")]
        assert demo.read_losses(lines, 1, 3) == {1: 5.533341, 3: 4.356644}

    def test_a_missing_iteration_is_an_error(self):
        with pytest.raises(ValueError, match=r"for 1 of the iterations 1 to 3: \[2\]"):
            demo.read_losses([line(1, "1.0E+00"), line(3, "1.0E+00")], 1, 3)

    def test_other_lines_hold_no_loss(self):
        assert not list(demo.printed_losses(["saved at iteration     100 to disk\n", "lm loss: 1.0\n"]))


class TestComparison:
    straight = dict.fromkeys(range(1, demo.STEPS + 1), 2.0)
    resumed = dict.fromkeys(range(demo.RESUMED_FROM + 1, demo.STEPS + 1), 2.0)

    def test_largest_difference_is_relative(self):
        assert demo.largest_difference(self.straight, self.resumed | {150: 1.9}) == pytest.approx(0.05)

    @pytest.mark.parametrize(("loss", "goes_on"), [(2.0, True), (2.0 * (1 + 2 * demo.TOLERANCE), False)])
    def test_the_report_can_fail(self, capsys, loss, goes_on):
        assert demo.report_resume(self.straight, self.resumed | {150: loss}) is goes_on
        assert ("THE RESUMED RUN IS ANOTHER ONE" in capsys.readouterr().out) is not goes_on

    @pytest.mark.parametrize("resumed", [{}, {demo.STEPS + 1: 2.0}])
    def test_nothing_in_common_is_an_error(self, resumed):
        with pytest.raises(ValueError, match="nothing to compare with"):
            demo.largest_difference(self.straight, resumed)


class TestDemo:
    def test_a_command_that_fails_shows_the_end_of_its_log(self, tmp_path):
        failing = [sys.executable, "-c", "print('the cause'); raise SystemExit(3)"]
        with pytest.raises(SystemExit, match=r"(?s)the cause.*exit code 3.*data\.log"):
            list(demo.execute(failing, tmp_path / "data.log"))

    def test_the_picture_is_drawn(self, tmp_path):
        losses = {run.name: dict.fromkeys(range(run.first, demo.STEPS + 1), 2.0) for run in demo.RUNS}
        demo.draw(losses, tmp_path / "loss.png")
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    def test_the_runs_differ_in_their_options_only(self):
        muon, adam, resumed = (demo.command(run)[: -len(run.options)] for run in demo.RUNS)
        assert muon == adam
        assert [argument for argument in muon if argument != "2"] == [
            argument for argument, same in zip(resumed, muon, strict=True) if same != "2"
        ]
