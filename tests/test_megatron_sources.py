"""A Megatron that is not installed is linked, and nothing is written to it."""

import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from megatron_sources import DATASETS, link

HELPERS = f"helpers_cpp{EXTENSION_SUFFIXES[0]}"


@pytest.fixture
def sources(tmp_path):
    """Of a package that says from where it was imported."""
    made = tmp_path / "sources"
    (made / DATASETS).mkdir(parents=True)
    (made / "megatron" / "training").mkdir()
    (made / "megatron" / "training" / "__init__.py").write_text("")
    (made / "megatron" / "core" / "__init__.py").write_text("__version__ = '0.77.0'")
    for name in ("__init__.py", "Makefile", "helpers.py"):
        (made / DATASETS / name).write_text("")
    return made


@pytest.fixture
def wheel(tmp_path):
    (tmp_path / "wheel").mkdir()
    (tmp_path / "wheel" / HELPERS).write_text("the wheel's")
    return tmp_path / "wheel"


def files(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_sources_are_imported_with_the_helpers_of_the_wheel(tmp_path, sources, wheel):
    before, linked = files(sources), tmp_path / "linked"
    link(sources, linked, wheel)
    assert {path.name for path in (linked / DATASETS).iterdir()} == {"__init__.py", "helpers.py", HELPERS}
    code = (
        "import megatron.core, megatron.core.datasets.helpers as x, megatron.training; print(megatron.core.__version__)"
    )
    run = [sys.executable, "-B", "-c", code]
    assert subprocess.run(run, cwd=linked, capture_output=True, text=True, check=True).stdout == "0.77.0\n"
    assert files(sources) == before


def test_helpers_of_its_own_are_taken(tmp_path, sources, wheel):
    (sources / DATASETS / HELPERS).write_text("its own")
    link(sources, tmp_path / "linked", wheel)
    assert (tmp_path / "linked" / DATASETS / HELPERS).read_text() == "its own"


def test_another_folder_is_refused(tmp_path, wheel):
    with pytest.raises(SystemExit, match="has no megatron/core/datasets: name the folder in which megatron is"):
        link(Path(tmp_path), tmp_path / "linked", wheel)
