"""Install wheels or sdists as a user would, and run the quick start with each.

    python3.12 scripts/smoke.py dist/*

Each gets an empty virtual environment, into which pip installs it with the dependencies that it declares and nothing
else: first without Megatron, for a step of plain torch, then with it. Everything runs in a temporary folder outside of
the repository. The Python that runs this makes the environments, and needs no package. An installation has some 6 GB,
and takes minutes.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = """
from importlib.metadata import version
from pathlib import Path
import sys
import megatron_eopt
folder = Path(megatron_eopt.__file__).parent
assert folder.is_relative_to(sys.prefix), f"imported from {folder}, expected a folder of {sys.prefix}"
assert (folder / "py.typed").is_file(), f"expected py.typed in {folder}"
assert version("megatron-eopt") == megatron_eopt.__version__, "the metadata have another version than the package"
"""

WITHOUT_MEGATRON = """
import importlib.util
import torch
from megatron_eopt import OptimizerConfig, build_optimizer
assert importlib.util.find_spec("megatron") is None, "expected no Megatron beside plain torch"
model = torch.nn.Linear(8, 8)
optimizer = build_optimizer(model, OptimizerConfig(name="muon", lr=1e-3))
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
"""


def quick_start() -> list[str]:
    """The blocks of docs/quick-start.md that are marked as runnable, as programs of bash."""
    page = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
    found = re.findall(r"^<!-- run.*?-->\n\n```bash\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    if not found:
        raise ValueError("docs/quick-start.md: found no block in bash after <!-- run -->, expected those of a training")
    return found


def environment(python: Path) -> dict[str, str]:
    """The caller's, without what leads to other packages than those of an environment."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | {"PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]), "CUDA_VISIBLE_DEVICES": ""}


def run(command: list[str], folder: Path, python: Path) -> None:
    """Run a command and show it; end with its log where it fails."""
    print("$", *command, flush=True)
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment(python), check=False)
    print(f"  {time.monotonic() - began:.0f} s", flush=True)
    if done.returncode:
        logs = "".join(f"\n{log.name}:\n{log.read_text()[-4000:]}" for log in sorted(folder.glob("*.log")))
        sys.exit(f"exit code {done.returncode}, expected 0{logs}")


def smoke(distribution: Path, folder: Path) -> None:
    """Install a wheel or an sdist into an empty environment, and use it."""
    print(f"== {distribution.name}", flush=True)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    work = folder / "work"
    # where the page says that the clone is; the script of the examples is all that it takes from there
    (work / "megatron_eopt" / "examples").mkdir(parents=True)
    shutil.copy(ROOT / "examples" / "pretrain_gpt.py", work / "megatron_eopt" / "examples")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", str(distribution)], work, python)
    for program in (IMPORTED, WITHOUT_MEGATRON):
        run([str(python), "-c", program], work, python)
    run([*pip, "install", "--quiet", f"{distribution}[megatron]"], work, python)
    run([*pip, "check"], work, python)
    for line in ("--version", "doctor", "plan --help"):
        run([str(python.with_name("megatron-eopt")), *line.split()], work, python)
    for program in quick_start():
        run(["bash", "-euo", "pipefail", "-c", program], work, python)


def main() -> None:
    """Try each distribution that is named."""
    if not sys.argv[1:]:
        sys.exit(f"usage: {sys.argv[0]} FILE...  (wheels or sdists, as python -m build leaves them in dist)")
    for distribution in [Path(name).resolve(strict=True) for name in sys.argv[1:]]:
        with tempfile.TemporaryDirectory(prefix="smoke-") as folder:
            smoke(distribution, Path(folder))
    print("OK")


if __name__ == "__main__":
    main()
