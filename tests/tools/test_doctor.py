"""What ``megatron-eopt doctor`` says where packages are there, missing, broken or others than their names say."""

import json
import os
import re
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from megatron_eopt.cli import main
from megatron_eopt.megatron.releases import SUPPORTED
from megatron_eopt.registry import list_optimizers
from megatron_eopt.tools import doctor as doctor_itself
from megatron_eopt.tools.doctor import Report
from tests.megatron.runs import without_emerging_optimizers

pytestmark = pytest.mark.wide

ROOT = Path(__file__).resolve().parents[2]


def doctor(*folders, flags=("--json",)):
    """A doctor of its own process, which finds the packages in ``folders`` first."""
    path = os.pathsep.join(map(str, (*folders, ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_eopt.cli", "doctor", *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout) if "--json" in flags else done.stdout


def package(folder, name, init, **files):
    """A package of this name in a folder for PYTHONPATH; files are given as ``subpackage__module=source``."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(init)
    for path, source in files.items():
        file = folder.joinpath(name, *path.split("__")).with_suffix(".py")
        file.parent.mkdir(exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(source)
    return folder


def told(said):
    return [f"{problem['what']}: {problem['do']}" for problem in said["problems"]]


def test_the_versions_of_this_machine_are_told(tmp_path):
    status, said = doctor(without_emerging_optimizers(tmp_path / "hidden"))
    assert (status, said["ok"], said["problems"]) == (0, True, [])
    facts = said["facts"]
    assert facts["python"] == sys.version.split()[0]
    assert facts["torch"] == torch.__version__
    assert facts["megatron-core"] == version("megatron-core")
    assert facts["--optimizer"] == ", ".join(list_optimizers())
    assert any("no GPU" in note for note in said["notes"])


def test_the_release_is_told_where_megatron_lies_in_a_repository(tmp_path):
    """It adds the commit of that repository to its version."""
    (tmp_path / "sitecustomize.py").write_text(
        "import megatron.core\nmegatron.core.__version__ = megatron.core.__version__.partition('+')[0] + '+9d57dbc'\n"
    )
    _, said = doctor(tmp_path, without_emerging_optimizers(tmp_path / "hidden"))
    assert said["facts"]["megatron-core"] == version("megatron-core")


def test_nothing_to_do_is_one_line():
    status, said = doctor(flags=())
    assert (status, said.count("\n")) == (0, 1)
    assert said.startswith("Nothing to do. For 2 notes and what is installed: megatron-eopt doctor --all")


def test_all_is_told_behind_the_problems(tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError('libtriton.so')\n")
    status, said = doctor(tmp_path, flags=("--all",))
    assert status == 1
    assert said.startswith("problem: ")
    assert re.search(
        r"^problem: triton .* cannot be imported: .*\n  what to do: install the release torch asks for$",
        said,
        re.MULTILINE,
    )
    assert f"megatron-core        {version('megatron-core')}\n" in said


def test_in_this_process_no_setting_is_changed(capsys):
    def seen():
        return (
            torch.get_float32_matmul_precision(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.random.get_rng_state().tolist(),
            list(warnings.filters),
            sys.stdout,
        )

    main(["doctor"])  # what its imports change, as Megatron's do, is not its own doing
    capsys.readouterr()
    before = seen()
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert seen() == before


def test_nothing_may_follow(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--", "--bf16"])
    assert ended.value.code == 2
    assert "nothing is expected after --, got --bf16" in capsys.readouterr().err


def test_without_megatron(tmp_path):
    # a module where the namespace package would be: there is no megatron.core in it
    (tmp_path / "megatron.py").write_text("")
    status, said = doctor(tmp_path)
    assert status == 1
    assert said["facts"]["megatron-core"] == "not installed"
    releases = f"{SUPPORTED[-1]} to {SUPPORTED[0]}"
    expected = f"megatron-core is not installed: pip install megatron-core, {releases} are supported"
    assert told(said) == [expected]
    _, text = doctor(tmp_path, flags=())
    what, do, rest = text.splitlines()
    assert (what, do) == ("problem: megatron-core is not installed", f"  what to do: {expected.partition(': ')[2]}")
    assert rest.endswith("megatron-eopt doctor --all")


def test_a_megatron_that_is_too_old(tmp_path):
    package(tmp_path, "megatron", "", core__optimizer="")
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("__version__ = '0.16.1'\n")
    status, said = doctor(tmp_path)
    assert status == 1
    assert told(said) == [f"megatron-core 0.16.1 is too old: take one of {SUPPORTED[-1]} to {SUPPORTED[0]}"]


def test_a_transformer_engine_that_cannot_be_imported(tmp_path):
    package(tmp_path, "transformer_engine", "raise ImportError('libcudnn.so.9: cannot open shared object file')")
    metadata = tmp_path / "transformer_engine-2.8.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.8.0\n")
    status, said = doctor(tmp_path)
    assert status == 1
    engine, core = told(said)
    assert engine == (
        "transformer-engine 2.8.0 cannot be imported: ImportError: libcudnn.so.9: cannot open shared object file: "
        "reinstall it for this torch and CUDA, or uninstall it: Megatron fails with it, or takes another Adam"
    )
    # Megatron goes on without an engine, but not with one that cannot be imported
    assert core.startswith(f"megatron-core {version('megatron-core')} cannot be imported: ImportError: libcudnn")
    assert said["facts"]["Adam beside them"] == "unknown without Megatron-Core"


def test_what_a_package_needs_is_imported_too(tmp_path, monkeypatch):
    package(tmp_path, "engine", "__version__ = '2.8.0'", pytorch__optimizers="raise ImportError('no extension')")
    monkeypatch.syspath_prepend(tmp_path)
    report = Report()
    doctor_itself._look_at(report, "engine", "reinstall it", "engine", "engine.pytorch.optimizers")
    assert report.installed == {"engine": "2.8.0"}
    what = "engine 2.8.0 cannot be imported: ImportError: no extension"
    assert report.problems == [{"what": what, "do": "reinstall it"}]


def megatron(monkeypatch, release="0.19.2", error=None):
    """What is said of Megatron where it has this release, and ``megatron.training`` this error."""
    monkeypatch.setattr(doctor_itself, "_version_of", lambda module: release)
    monkeypatch.setattr(doctor_itself, "_import_error", lambda first, *more: None if more else error)
    report = Report()
    doctor_itself._look_at_megatron(report)
    *notes, of_adam = report.notes
    assert "is torch's" in of_adam
    assert report.problems == []
    return notes


def test_megatron_training_needs_what_it_does_not_declare(monkeypatch):
    (note,) = megatron(monkeypatch, error="ImportError: No module named psutil")
    assert "megatron.training cannot be imported (ImportError: No module named psutil)" in note
    assert "pip install psutil pyyaml" in note


def test_what_is_newer_than_what_was_tried_is_noted(monkeypatch):
    (note,) = megatron(monkeypatch, "1.0.0rc1")
    assert note == "megatron-core 1.0.0rc1 is newer than 0.20, the latest that was tried"
    (note,) = megatron(monkeypatch, "0.20.0")
    tried = "megatron-core 0.20.0 is supported as Megatron's main branch was on 22 August 2026"
    assert note == f"{tried}: what has changed since then is untried"
    assert megatron(monkeypatch) == []
