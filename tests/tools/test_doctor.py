"""What ``megatron-eopt doctor`` says where packages are there, missing, broken or others than their names say."""

import os
import subprocess
import sys
import warnings
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
import torch

from megatron_eopt.cli import main
from megatron_eopt.megatron.releases import SUPPORTED
from tests.megatron.runs import without_emerging_optimizers

pytestmark = pytest.mark.wide

ROOT = Path(__file__).resolve().parents[2]


def doctor(*folders):
    """Exit status and lines of a doctor of its own process, which finds the packages in ``folders`` first."""
    path = os.pathsep.join(map(str, (*folders, ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_eopt.cli", "doctor"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


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


def problems(lines):
    return [line for line in lines if line.startswith(("problem: ", "  what to do: "))]


def test_the_versions_of_this_machine_are_told(tmp_path):
    """Also where Megatron lies in a repository: it adds the commit of that to its version."""
    own = f"{version('megatron-core')}+9d57dbc"
    (tmp_path / "sitecustomize.py").write_text(f"import megatron.core\nmegatron.core.__version__ = '{own}'\n")
    status, lines = doctor(tmp_path, without_emerging_optimizers(tmp_path / "hidden"))
    told = dict(line.split(maxsplit=1) for line in lines)
    assert told["of"] == str(distribution("megatron-core").locate_file("megatron/core"))
    assert (status, lines[-1]) == (0, "Nothing to do.")
    assert (told["torch"], told["megatron-core"]) == (torch.__version__, own)
    assert told["GPU"].startswith("none")


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
    before = seen()
    assert main(["doctor"]) == 0
    assert seen() == before


def test_without_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 1
    assert "problem: torch cannot be imported" in capsys.readouterr().out


def test_without_megatron(tmp_path):
    """Plain torch needs none; a run says how to get one."""
    # a module where the namespace package would be: there is no megatron.core in it
    (tmp_path / "megatron.py").write_text("")
    status, lines = doctor(tmp_path)
    assert (status, lines[-1], "megatron-core       not installed" in lines) == (0, "Nothing to do.", True)
    assert "megatron-eopt[megatron]" in " ".join(lines)
    code = "import sys; sys.modules['megatron'] = None; from megatron_eopt import activate; activate()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "pip install 'megatron-eopt[megatron]'" in done.stderr


def test_a_megatron_that_is_too_old(tmp_path):
    package(tmp_path, "megatron", "", core__optimizer="")
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("__version__ = '0.18.2'\n")
    status, lines = doctor(tmp_path)
    what, do = problems(lines)
    assert (status, what) == (1, "problem: megatron-core 0.18.2 is too old")
    assert f"megatron-core>={SUPPORTED}" in do


def test_a_transformer_engine_that_cannot_be_imported(tmp_path):
    """Nor can what it is made of. Megatron goes on without an engine, and not with such a one."""
    error = "raise ImportError('libcudnn.so.9: cannot open shared object file')"
    package(tmp_path, "transformer_engine", "__version__ = '2.8.0'", pytorch__optimizers=error)
    (tmp_path / "transformer_engine" / "pytorch" / "__init__.py").write_text(error)
    status, lines = doctor(tmp_path)
    assert (status, "transformer-engine  2.8.0" in lines) == (1, True)
    engine, do, *_ = problems(lines)
    assert "transformer-engine cannot be imported: ImportError" in engine
    assert "libcudnn.so.9" in engine
    assert "or uninstall it" in do
