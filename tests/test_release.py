"""What a release is made of: one version, metadata, wheel and sdist, and the files that people and services read."""

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
from packaging.version import Version

import megatron_eopt
from tests.test_docs import broken_links, missing_files

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


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
def test_a_wheel_has_the_package_and_an_sdist_also_its_pages(wheel, sdist):
    read = zipfile.ZipFile(wheel)
    package = [path for path in (ROOT / "megatron_eopt").rglob("*") if path.suffix in (".py", ".typed")]
    files = {name for name in read.namelist() if ".dist-info/" not in name}
    assert files == {str(path.relative_to(ROOT)) for path in package}
    info = f"megatron_eopt-{megatron_eopt.__version__}.dist-info"
    metadata = message_from_bytes(read.read(f"{info}/METADATA"))
    assert (metadata["Version"], metadata["Requires-Python"]) == (megatron_eopt.__version__, ">=3.12")
    assert read.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert b"megatron-eopt = megatron_eopt.cli:main" in read.read(f"{info}/entry_points.txt")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    copy = sdist.parent / "copy"
    folders = ("megatron_eopt", "docs", "examples")
    paths = [path for folder in folders for path in (copy / folder).rglob("*")]
    assert {str(path.relative_to(copy)) for path in paths if path.is_file()} <= names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", ".github/"))]
    assert not [name for name in names if re.search(r"__pycache__|\.pyc$|^(build|dist|site|\.venv)/", name)]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_installation_runs_the_quick_start_with_what_it_declares(kind, request):
    """In an empty environment: some 6 GB from the network each."""
    distribution = request.getfixturevalue(kind)
    command = [sys.executable, ROOT / "scripts" / "smoke.py", distribution]
    done = subprocess.run(command, cwd=distribution.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.endswith("OK\n")


def test_the_version_stands_in_one_place_and_the_citation_says_what_the_metadata_say():
    version = megatron_eopt.__version__
    assert PROJECT["dynamic"] == ["version"]
    texts = [*ROOT.glob("*.toml"), *ROOT.glob("*.yml"), *ROOT.glob("megatron_eopt/**/*.py"), *ROOT.glob("scripts/*")]
    named = [path for path in texts if path.is_file() and version in path.read_text()]
    assert named == [ROOT / "megatron_eopt" / "version.py"]
    assert (CITATION["version"], CITATION["cff-version"]) == (version, "1.2.0")
    for key in ("license", "authors", "keywords"):
        assert CITATION[key] == PROJECT[key]


def test_the_changelog_has_the_form_of_keep_a_changelog():
    before, *releases = re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)
    assert before.startswith("# Changelog\n")
    assert releases[0].startswith("[Unreleased]\n")
    for release in releases:
        assert re.match(r"\[(Unreleased|\d+\.\d+\.\d+)\]( - \d{4}-\d\d-\d\d)?\n", release)
        kinds = re.findall(r"^### (.+)$", release, flags=re.MULTILINE)
        assert len({*kinds}) == len(kinds)
        assert {*kinds} <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    version = Version(megatron_eopt.__version__)
    assert version.is_prerelease or f"\n## [{version}]" in CHANGELOG
    entries = [*filter(None, CHANGELOG.partition("\n## ")[2].splitlines()[1:])]
    for line in entries:  # each is one short line
        assert re.match(r"- \S|#{2,4} \S|<!--.*-->$", line)
        assert len(line) <= 120
    assert len({*entries}) == len(entries)


def test_links_lead_somewhere_and_named_files_exist():
    for name in ("CHANGELOG.md", ".github/CONTRIBUTING.md", "PYPI.md", ".github/SECURITY.md"):
        assert not list(broken_links(ROOT / name))
        assert not list(missing_files(ROOT / name))


def test_the_page_for_the_package_index_stands_alone():
    """Links into the repository lead nowhere there. What it says is the beginning of README.md."""
    text = (ROOT / PROJECT["readme"]).read_text()
    assert not re.findall(r"\]\((?!https://)", text)
    common = text.partition("\n")[2].partition("weight decay.")[0]
    assert common in (ROOT / "README.md").read_text()


def test_workflows_have_bounds():
    """Few permissions, a timeout for each job, actions by their hash, and one run at a time."""
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {}
        assert workflow["concurrency"]["group"]
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] <= 120
            assert job["permissions"] in ({"contents": "read"}, {"id-token": "write"})
            for step in job["steps"]:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step.get("uses", f"a/b@{0:040}"))


def test_the_public_ci_runs_what_the_own_one_runs_and_publishes_only_where_asked():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert jobs["test"]["strategy"]["matrix"]["target"] == ["test", "test-wide"]
    assert {'make "$TARGET"', "make lint", "python -m build", "python scripts/smoke.py dist/*"} <= {*runs}
    assert any("mkdocs build --strict" in run for run in runs)
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert release[True] == {"workflow_dispatch": None}  # YAML 1.1 reads the key "on" as true
    assert release["jobs"]["build"]["if"] == "vars.RELEASE_ENABLED == 'true'"
    assert release["jobs"]["publish"]["needs"] == "build"
