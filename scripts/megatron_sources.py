"""Run tests on a Megatron-Core that is not installed.

    python scripts/megatron_sources.py FOLDER [ARGUMENTS OF PYTEST]

FOLDER has Megatron's sources, or another wheel (``pip install --no-deps --target FOLDER megatron-core==X``). Nothing is
written there: its files are linked from a temporary folder, and what sources lack, the compiled helpers of datasets,
from the installed wheel. Without arguments the tests run that show the features of the support table, short ones, and
those of what only a later release has.
"""

import os
import subprocess
import sys
import tempfile
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ["tests/megatron", "-m", "since or (shows and not full and not wide)"]
DATASETS = Path("megatron", "core", "datasets")


def link(folder: Path, into: Path, helpers: Path) -> None:
    """Link a Megatron from another folder, with compiled helpers of datasets."""
    if not (folder / DATASETS).is_dir():
        raise SystemExit(f"{folder} has no {DATASETS}: name the folder in which megatron is")
    here = DATASETS
    (into / here).mkdir(parents=True)
    while here.name:  # the folders of which one is ours have links to all that is in theirs
        for path in (folder / here).iterdir():
            # a Makefile would have the helpers compiled in the sources
            if not (into / here / path.name).exists() and (here, path.name) != (DATASETS, "Makefile"):
                (into / here / path.name).symlink_to(path.resolve())
        here = here.parent
    compiled = [f"helpers_cpp{suffix}" for suffix in EXTENSION_SUFFIXES]
    if not any((into / DATASETS / name).exists() for name in compiled):
        for path in (helpers / name for name in compiled if (helpers / name).exists()):
            (into / DATASETS / path.name).symlink_to(path.resolve())


def main(folder: str, *arguments: str) -> int:
    """Exit status of pytest."""
    with tempfile.TemporaryDirectory() as name:
        linked = Path(name, "linked")
        link(Path(folder), linked, Path(str(distribution("megatron-core").locate_file(DATASETS))))
        environment = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(linked)]),
            "PYTHONPYCACHEPREFIX": str(Path(name, "cache")),
            "OMP_NUM_THREADS": "1",
        }
        found = "import megatron.core as core; print('megatron-core', core.__version__, 'of', core.__file__)"
        for command in (["-W", "ignore", "-c", found], ["-m", "pytest", "-q", *(arguments or TESTS)]):
            run = [sys.executable, *command]
            if status := subprocess.run(run, env=os.environ | environment, cwd=ROOT, check=False).returncode:
                return status
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(main(*sys.argv[1:]))
