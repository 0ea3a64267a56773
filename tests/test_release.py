"""What a release is made of: wheel and sdist, one version, and the page for the package index."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

import megatron_eopt

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """An sdist, built without network from a copy of this repository, which stands beside it."""
    folder = tmp_path_factory.mktemp("dist")
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    shutil.copytree(ROOT, folder / "copy", ignore=shutil.ignore_patterns(".git", *ignored))
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=folder / "copy", check=True, capture_output=True)
    (found,) = folder.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(sdist):
    """The wheel that is built from the sdist alone."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", sdist]
    subprocess.run(command, cwd=sdist.parent, check=True, capture_output=True)
    (found,) = sdist.parent.glob("*.whl")
    return found


@pytest.mark.wide
def test_a_wheel_has_the_package_and_an_sdist_its_pages(wheel, sdist):
    read = zipfile.ZipFile(wheel)
    package = [path for path in (ROOT / "megatron_eopt").rglob("*") if path.suffix in (".py", ".typed")]
    files = {name for name in read.namelist() if ".dist-info/" not in name}
    assert files == {str(path.relative_to(ROOT)) for path in package}
    metadata = message_from_bytes(read.read(f"megatron_eopt-{megatron_eopt.__version__}.dist-info/METADATA"))
    assert (metadata["Version"], metadata["Requires-Python"]) == (megatron_eopt.__version__, ">=3.12")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    paths = [path for folder in ("docs", "examples") for path in (sdist.parent / "copy" / folder).rglob("*")]
    assert {str(path.relative_to(sdist.parent / "copy")) for path in paths if path.is_file()} <= names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", ".github/"))]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_installation_runs_the_quick_start(kind, request):
    """In an empty environment: some 6 GB from the network each."""
    distribution = request.getfixturevalue(kind)
    command = [sys.executable, ROOT / "scripts" / "smoke.py", distribution]
    done = subprocess.run(command, cwd=distribution.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_the_version_is_that_of_the_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["dynamic"] == ["version"]
    assert citation["version"] == megatron_eopt.__version__


def test_the_page_for_the_package_index_stands_alone():
    """Links into the repository lead nowhere there. What it says is the beginning of README.md."""
    text = (ROOT / PROJECT["readme"]).read_text()
    assert not re.findall(r"\]\((?!https://)", text)
    assert text.partition("\n")[2].partition("weight decay.")[0] in (ROOT / "README.md").read_text()
