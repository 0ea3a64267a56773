"""The house itself: its size, which room may import which, and that importing the package changes nothing."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_eopt
from megatron_eopt import TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS

PACKAGE = Path(megatron_eopt.__file__).parent
# From the bottom up; a room imports from its own floor and from those below.
FLOORS = [
    {"redirect", "orthogonalize", "matrices"},
    {"parallel"},
    {"optimizers"},
    {"from_config"},
    {"family"},
    {"registry", "overrides", "checkpoints", "manifest"},
    {"metrics"},
    {"megatron", "cpu", "plain"},
    {"", "run", "cli", "doctor", "plan", "plot"},
]
FILES = sorted(PACKAGE.rglob("*.py"))
# Classes that only one other of the package inherits from, each with the reason why it is a class of its own.
SINGLE = {
    "OrthogonalizedOptimizer": "users write their own optimizers as subclasses of it",
    "Execution": "the arguments of one relative that spells out the others itself",
}


def room(module):
    """The room of an imported name; the package's own names stand above all rooms."""
    name = module.split(".")[1] if "." in module else ""
    return name if any(name in rooms for rooms in FLOORS) else ""


def floor(name):
    return next(level for level, rooms in enumerate(FLOORS) if name in rooms)


def imports(path):
    """Modules that a file imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py").replace("__init__", "")


def name_of(path):
    """As it is imported."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    here = own_room(path)
    for module in imports(path):
        if module.split(".")[0] == "megatron_eopt":
            assert floor(room(module)) <= floor(here), f"{here} imports {module}"


def in_circles(below):
    """What is left of a graph when everything is taken out, again and again, that depends on nothing in it."""
    while free := {name for name, used in below.items() if not used & below.keys()}:
        below = {name: used for name, used in below.items() if name not in free}
    return below


def test_circles_are_found():
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": set()}) == {}
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}).keys() == {"a", "b", "c"}


def test_rooms_of_a_floor_import_each_other_in_no_circle():
    below = {}
    for path in FILES:
        used = {room(module) for module in imports(path) if module.split(".")[0] == "megatron_eopt"}
        below.setdefault(own_room(path), set()).update(used - {own_room(path)})
    assert not in_circles(below)


def test_modules_import_each_other_in_no_circle():
    """Also not by an import inside of a function."""
    below = {}
    for path in FILES:
        used = {module if module in MODULES else module.rpartition(".")[0] for module in imports(path)}
        below[name_of(path)] = (used & MODULES) - {name_of(path)}
    assert not in_circles(below)


def lines_of(path):
    return len(path.read_text().splitlines())


def test_the_package_is_small():
    assert len(FILES) <= 174


def test_the_package_has_fewer_than_31_610_lines():
    # 20,000 as it was rebuilt; 2,000 for both FSDPs, host memory, bf16 momenta and the deal over data-parallel ranks;
    # 1,890 for code in checkpoints, hostile files, ranks that differ, interrupted steps, two runs in one folder, and
    # arguments that were taken in silence; 140 for kernels agreed over the world, those of
    # DistributedMuon, and starts that compile on one rank of a node; 90 for weights of replicas in plain torch, and
    # for plans that are compared as they are cut; 40 for kernels of checkpoints that are compiled in turns, for shards
    # that are not copied, and for means of triangles; 210 for momenta in 8 bits; 130 for more that was taken in
    # silence; 110 for SOAP's kernels; 860 for the kernels of a step; 3,720 for the field of 2026: Shampoo, Dion, Muown,
    # AdEMAMix, PSGD-Kron, modifiers, averages of weights, presets, and Megatron-Core 0.20; 690 for thousands of
    # ranks: plans, exchanges and messages that do not grow with them, sweeps, rates of GPUs, MLA, second cuts,
    # and what a run would end on; 270 for norms in one pass, which took a fifth of a step on an H200; 520 for
    # matrices on several data-parallel ranks: their deal, step and plan
    assert sum(map(lines_of, FILES)) < 31_610


def test_a_file_is_at_most_450_lines_long():
    """But for the table of optimizers, and two of one class each, whose arguments and checks are read together."""
    long = {"family.py": 555, "optimizers/base.py": 561, "optimizers/tensor_parallel_muon.py": 690}
    assert not {name for path in FILES if lines_of(path) > long.get(name := str(path.relative_to(PACKAGE)), 450)}


def test_muon_is_read_in_one_file():
    assert lines_of(PACKAGE / "optimizers" / "muon.py") < 300


def test_muon_has_few_names():
    """Methods, properties and attributes of its class and of those of this package that it inherits from."""
    classes = [cls for cls in TensorParallelMuon.__mro__ if cls.__module__.startswith("megatron_eopt.")]
    names = {name for cls in classes for name in vars(cls) if not name.startswith("__")} - {"_abc_impl"}
    assert len(names) <= 76


def test_no_class_is_there_for_a_single_subclass():
    trees = [ast.walk(ast.parse(path.read_text())) for path in FILES]
    classes = [node for tree in trees for node in tree if isinstance(node, ast.ClassDef)]
    own = {node.name for node in classes}
    bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for node in classes for base in node.bases]
    assert {base for base in own if bases.count(base) == 1} == SINGLE.keys()


@pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=lambda row: row.name)
def test_an_optimizer_has_at_most_four_classes_of_ours(row):
    assert sum(cls.__module__.startswith("megatron_eopt.") for cls in row.cls.__mro__) <= 4


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_two_rooms_import_megatron(path):
    if own_room(path) not in ("megatron", "cpu"):
        assert not [module for module in imports(path) if module.split(".")[0] == "megatron"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_one_file_knows_releases_of_megatron(path):
    if path != PACKAGE / "megatron" / "releases.py":
        assert not re.search(r"\(0, [12]\d\)|startswith\(\"0\.[12]", path.read_text()), "ask megatron/releases.py"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_imports_no_megatron_and_changes_nothing():
    code = (
        "import os, sys, torch\n"
        "seen = lambda: (torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.get_num_threads(), "
        "torch.random.initial_seed(), torch.is_grad_enabled(), torch.cuda.is_available, dict(os.environ))\n"
        "before = seen()\n"
        "import megatron_eopt, megatron_eopt.cpu, megatron_eopt.run, megatron_eopt.megatron.releases\n"
        "assert seen() == before\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('megatron', 'emerging_optimizers')])"
    )
    assert run(code) == "[]"


def test_nothing_depends_on_the_oracle():
    for path in FILES:
        assert not [module for module in imports(path) if module.split(".")[0] == "emerging_optimizers"]


def test_no_module_keeps_what_belongs_to_one_optimizer():
    """A second one of the same process would meet it. What a process has replaced is known where it is undone."""
    rebinding = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(isinstance(node, ast.Global) for node in ast.walk(ast.parse(path.read_text())))
    }
    assert rebinding <= {"cpu/__init__.py", "megatron/activation.py"}
