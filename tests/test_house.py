"""The house itself: which room may import which, and that importing the package changes nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import megatron_eopt

PACKAGE = Path(megatron_eopt.__file__).parent
# From the bottom up; a room imports from its own floor and from those below.
FLOORS = [
    {"redirect", "screen", "version", "kernels", "matrices"},
    {"orthogonalize"},
    {"parallel"},
    {"settings"},
    {"step"},
    {"transforms", "factors"},
    {"optimizers"},
    {"flags"},
    {"optimizer_spec"},
    {"from_config"},
    {"family"},
    {"registry", "routing", "checkpoints"},
    {"metrics"},
    {"megatron", "plain"},
    {"tools"},
    {"", "run", "cli", "__main__"},
]
FILES = sorted(PACKAGE.rglob("*.py"))


def room(module):
    """The room of an imported name; the package's own names stand above all rooms."""
    name = module.split(".")[1] if "." in module else ""
    return name if any(name in rooms for rooms in FLOORS) else ""


def floor(name):
    return next(level for level, rooms in enumerate(FLOORS) if name in rooms)


def imports(path):
    """Modules that a file imports, also inside of functions and by ``import_module``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from literal_beginning(node.args[0])


def literal_beginning(argument):
    """The text of a literal, or the text that an f-string begins with."""
    if isinstance(argument, ast.JoinedStr) and argument.values:
        argument = argument.values[0]
    if isinstance(argument, ast.Constant):
        yield argument.value.rstrip(".")


def own_room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py").replace("__init__", "")


def name_of(path):
    """As it is imported."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path) for path in FILES}


def test_imports_point_downwards():
    for path in FILES:
        here = own_room(path)
        for module in imports(path):
            if module.split(".")[0] == "megatron_eopt":
                assert floor(room(module)) <= floor(here), f"{path} imports {module}"
            assert module.split(".")[0] != "emerging_optimizers", path  # the oracle of the tests
            assert module.split(".")[0] != "megatron" or here in ("megatron", "tools"), path


def in_circles(below):
    """What is left of a graph when everything is taken out, again and again, that depends on nothing in it."""
    while free := {name for name, used in below.items() if not used & below.keys()}:
        below = {name: used for name, used in below.items() if name not in free}
    return below


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


def test_import_imports_no_megatron_and_changes_nothing():
    code = (
        "import os, sys, torch\n"
        "seen = lambda: (torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.get_num_threads(), "
        "torch.random.initial_seed(), torch.is_grad_enabled(), torch.cuda.is_available, dict(os.environ))\n"
        "before = seen()\n"
        "import megatron_eopt, megatron_eopt.tools.cpu, megatron_eopt.run\n"
        "assert seen() == before\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('megatron', 'emerging_optimizers')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
