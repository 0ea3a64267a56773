"""The page for people who come from emerging-optimizers says what holds of its release 0.3.0 and of ours."""

import ast
import copy
import inspect
import re
from pathlib import Path

import emerging_optimizers.orthogonalized_optimizers as matrices
import emerging_optimizers.psgd.psgd as psgd
import emerging_optimizers.riemannian_optimizers.normalized_optimizer as riemannian
import emerging_optimizers.scalar_optimizers as scalars
import emerging_optimizers.soap as soap
import pytest
import torch

import megatron_eopt

PAGE = (Path(__file__).parents[2] / "docs/from-emerging-optimizers.md").read_text()
REQUIRED = inspect.Parameter.empty
# of which a section speaks in sentences, and arguments that are not settings
IN_PROSE = {"self", "params", "args", "kwargs", "weight_decay_method"}


def tables(heading):
    """The tables of a section: lists of rows, which are lists of cells."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"(?:^\|.*\n)+", section.group(1), re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("| ").split(" | ")] for line in b.splitlines()[2:]] for b in blocks]


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


def theirs(name):
    rooms = [room for room in (matrices, psgd, riemannian, scalars, soap) if hasattr(room, name)]
    return getattr(rooms[0], name)


(CLASSES,) = tables("Classes")
COUNTERPART = {code(there)[0]: code(here)[0] for there, here in CLASSES if here != "absent" and "(" not in here}


def arguments(cls):
    """Argument -> default; those that a class passes on by ``*args`` or ``**kwargs`` are its base's."""
    found = {}
    for each in reversed(cls.__mro__):
        if "__init__" in vars(each) and each.__module__.startswith(("emerging_optimizers", "megatron_eopt")):
            parameters = inspect.signature(each.__init__).parameters
            passed_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and "params" not in parameters
            found = (found if passed_on else {}) | {key: p.default for key, p in parameters.items()}
    return {key: default for key, default in found.items() if key not in IN_PROSE}


def ours(name):
    return getattr(megatron_eopt, COUNTERPART[name])


def value(cell):
    return REQUIRED if cell == "required" else ast.literal_eval(cell)


def test_every_optimizer_of_theirs_is_in_the_table_of_classes():
    exported = {
        name
        for room in (matrices, psgd, riemannian, scalars, soap)
        for name, each in vars(room).items()
        if inspect.isclass(each) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    }
    assert exported == {name for there, _ in CLASSES for name in code(there)}
    for there, here in CLASSES:
        if here == "absent":
            assert not any(hasattr(megatron_eopt, name) for name in code(there))


def renamed_there():
    """(class, argument there) -> names here."""
    (rows,) = tables("Renamed arguments")
    return {(code(name)[0], code(there)[0]): (code(here), both) for name, there, here, both in rows}


@pytest.mark.parametrize("name", COUNTERPART)
def test_every_argument_is_the_same_or_in_a_table(name):
    here, renamed = arguments(ours(name)), {key for each, key in renamed_there() if each == name}
    absent = {code(key)[0] for each, key, _ in tables("Absent")[0] if code(each) == [name]}
    rows = [row for row in tables("Defaults that differ")[0] if code(row[0]) == [name]]
    differing = {code(key)[0]: (there, own) for _, key, there, own in rows}
    for key, default in arguments(theirs(name)).items():
        if key in renamed | absent:
            assert key not in here, key
        elif key in differing:
            assert [value(cell) for cell in differing.pop(key)] == [default, here[key]], key
            assert default != here[key], key
        else:
            assert here[key] == default, key
    for key, (there, own) in differing.items():  # under another name there
        (other,) = (k for (each, k), (names, _) in renamed_there().items() if each == name and names == [key])
        assert [value(there), value(own)] == [arguments(theirs(name))[other], here[key]], key


def test_renamed_arguments_are_there_and_here_and_accepted_as_the_table_says():
    given = {"spectral_radius": 3.0, "use_eigh": True}
    for (name, there), (here, both) in renamed_there().items():
        assert there in arguments(theirs(name))
        assert set(here) <= arguments(ours(name)).keys()
        if both == "yes":
            ours(name)([torch.nn.Parameter(torch.eye(3))], **{there: given[there]})


def test_our_own_arguments_have_the_defaults_of_the_table_and_theirs_makes_their_steps():
    for name, key, default, _ in tables("Defaults that differ")[1]:
        assert code(key)[0] not in arguments(theirs(code(name)[0]))
        assert arguments(ours(code(name)[0]))[code(key)[0]] == value(default)


def test_the_decays_of_the_section_are_there():
    p = [torch.nn.Parameter(torch.eye(3))]
    for cls, methods in (
        (megatron_eopt.Lion, "decoupled independent palm l2"),
        (megatron_eopt.Signum, "decoupled independent palm l2"),
        (megatron_eopt.SOAP, "decoupled independent palm"),
    ):
        for method in methods.split():
            assert f"`{method}`" in PAGE
            cls(p, weight_decay_method=method)


SAME = {"lr": 0.01, "momentum": 0.9, "nesterov": False, "fp32_matmul_prec": "highest"}
ADAPTIVE = {**SAME, "weight_decay": 0.1}
CONSTRAINED = {key: SAME[key] for key in ("lr", "momentum", "fp32_matmul_prec")}
# of each row: arguments of both, arguments of theirs, arguments of ours that make the same steps
STATES = {
    "`Muon`": (SAME, {}, {}),
    "`AdaptiveMuon` (adamuon)": (ADAPTIVE, {}, {"align_rms": False}),
    "`AdaptiveMuon` (normuon)": ({**ADAPTIVE, "moment2_method": "normuon"}, {}, {}),
    "`AdaptiveMuon` (namo)": ({**ADAPTIVE, "moment2_method": "namo"}, {}, {}),
    "`MuonHyperball`": ({**SAME, "weight_decay": 0.0}, {}, {}),
    "`PolarGrad`": (SAME, {}, {}),
    "`Scion`": (
        {"lr": 0.01, "fp32_matmul_prec": "highest", "momentum": 0.9},
        {"spectral_radius": 2.0},
        {"radius": 2.0},
    ),
    "`Lion`": ({"lr": 0.01}, {}, {}),
    "`SOAP`": ({"lr": 0.01}, {}, {}),
}


def stepped(optimizer, params, numbers):
    with torch.compiler.set_stance("force_eager"):
        for step in numbers:
            for index, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + index))
            optimizer.step()


@pytest.mark.parametrize(("row", "there", "here", "loads"), tables("State")[0], ids=lambda cell: cell[:30])
def test_state_dicts_load_or_not_as_the_table_says(row, there, here, loads):
    (name,), (both, of_theirs, of_ours) = code(row), STATES[row]
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(6, 4, generator=generator)) for _ in range(2)]
    original = theirs(name)(params, **both, **of_theirs)
    stepped(original, params, range(3))
    assert original.state[params[0]].keys() == set(code(there))
    copies = copy.deepcopy(params)
    optimizer = ours(name)(copies, **both, **of_ours)
    optimizer.init_state()
    assert optimizer.state[copies[0]].keys() == set(code(here))
    state = copy.deepcopy(original.state_dict())
    if loads.startswith("no"):
        with pytest.raises(ValueError, match=r"needs '|has shape"):
            optimizer.load_state_dict(state)
        return
    optimizer.load_state_dict(state)
    if name == "Scion":
        optimizer.param_groups[0]["weight_decay"] = 0
    stepped(original, params, range(3, 6))
    stepped(optimizer, copies, range(3, 6))
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
