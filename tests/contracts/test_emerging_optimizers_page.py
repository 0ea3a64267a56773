"""The page for people who come from emerging-optimizers says what holds of its release 0.3.0 and of ours.

Differences are looked for in both packages, and compared with the tables of the page and those below. One that is in
none of them fails.
"""

import ast
import copy
import importlib.util
import inspect
import logging
import re
from math import inf
from pathlib import Path

import emerging_optimizers.orthogonalized_optimizers as matrices
import emerging_optimizers.orthogonalized_optimizers.muon_utils as muon_utils
import emerging_optimizers.psgd.psgd as psgd
import emerging_optimizers.riemannian_optimizers.normalized_optimizer as riemannian
import emerging_optimizers.scalar_optimizers as scalars
import emerging_optimizers.soap as soap
import pytest
import torch

import megatron_eopt
from megatron_eopt import orthogonalize
from megatron_eopt.orthogonalize.coefficients import with_safety
from megatron_eopt.settings.of_class import settings_of
from megatron_eopt.settings.records import EXECUTION
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.users_functions import HOOKS_OF_OTHERS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "from-emerging-optimizers.md").read_text()
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
    if issubclass(cls, BaseOptimizer):  # whose **settings have names
        found |= {key: setting.default for key, setting in settings_of(cls).items() if key not in found}
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


def test_arguments_of_the_other_tables_are_there_and_here():
    given = {"spectral_radius": 3.0, "use_eigh": True}
    for (name, there), (here, both) in renamed_there().items():
        assert there in arguments(theirs(name))
        assert set(here) <= arguments(ours(name)).keys() | {setting.name for setting in EXECUTION}
        if both == "yes":
            ours(name)([torch.nn.Parameter(torch.eye(3))], **{there: given[there]})
    for name, key, default, _ in tables("Defaults that differ")[1]:
        assert code(key)[0] not in arguments(theirs(code(name)[0]))
        assert arguments(ours(code(name)[0]))[code(key)[0]] == value(default)


SAME = {"lr": 0.01, "momentum": 0.9, "nesterov": False, "fp32_matmul_prec": "highest"}
ADAPTIVE = {**SAME, "weight_decay": 0.1}
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


# Differences that are looked for. Of each class: arguments of both, of theirs, and of ours that make the same steps.
PLAIN = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "nesterov": False, "fp32_matmul_prec": "highest"}
SAME_STEPS = {
    "OrthogonalizedOptimizer": (
        {"lr": 0.01, "weight_decay": 0.1, "fp32_matmul_prec": "highest", "weight_decay_method": "decoupled"},
        {"momentum": 0.9, "nesterov": False, "scaled_orthogonalize_fn": torch.sin},
        {"momentum_beta": 0.9, "use_nesterov": False, "use_decoupled_weight_decay": True, "split_qkv": False}
        | {"is_qkv_fn": None, "qkv_split_shapes": None, "orthogonalize_fn": torch.sin, "scale_factor_fn": lambda *_: 1},
    ),
    "Muon": (PLAIN, {}, {}),
    "AdaptiveMuon": (PLAIN, {}, {"align_rms": False}),
    "MuonHyperball": ({**PLAIN, "weight_decay": 0.0}, {}, {}),
    "PolarGrad": (PLAIN, {}, {}),
    "Scion": ({"lr": 0.01, "momentum": 0.9, "fp32_matmul_prec": "highest"}, {"spectral_radius": 2.0}, {"radius": 2.0}),
    "Lion": ({"lr": 0.01, "weight_decay": 0.1}, {}, {}),
    "SOAP": (  # an eps that hides the rounding beside the diagonal, which differs
        {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "fp32_matmul_prec": "highest", "eps": 1.0},
        {"qr_fp32_matmul_prec": "highest"},
        {"basis_of": "current", "precondition_frequency": 1},
    ),
}
RENAMED = {"OrthogonalizedOptimizer": {"momentum": "momentum_beta", "nesterov": "use_nesterov"}}
RENAMED |= {"Scion": {"spectral_radius": "radius"}}
CLASS = pytest.mark.parametrize("name", SAME_STEPS)


def made(name, here, shape=(6, 4), dtype=torch.float32, group=None, **settings):
    """An optimizer of theirs or ours, and its parameter."""
    p = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype))
    both, *own = SAME_STEPS[name]
    if here:
        names = RENAMED.get(name, {})
        settings = {names.get(key, key): x for key, x in settings.items()}
    if here and name == "OrthogonalizedOptimizer" and settings.get("weight_decay_method") == "l2":
        settings["use_decoupled_weight_decay"] = False
    kwargs = {**both, **own[here], **settings}
    if kwargs.get("moment2_method", "adamuon") != "adamuon":
        kwargs.pop("align_rms", None)  # which is adamuon's
    return (ours if here else theirs)(name)([{"params": [p], **(group or {})}], **kwargs), p


def after(name, here, steps=3, **settings):
    """A parameter after some steps; the error, in place of that, by its class."""
    try:
        optimizer, p = made(name, here, **settings)
        stepped(optimizer, [p], range(steps))
    except Exception as error:
        return type(error)
    return p.detach()


def differs(one, other):
    return one is not other and (not torch.is_tensor(one) or not torch.is_tensor(other) or not torch.equal(one, other))


# (class there, or every one, and argument) -> values that are taken there and refused here
REFUSED = {
    ("every", "lr"): [-0.1, inf],
    ("every", "momentum"): [-0.1, 1.0, 1.5],
    ("every", "weight_decay"): [-0.1, inf],
    ("every", "nesterov"): [1, None],
    ("every", "fp32_matmul_prec"): ["best"],
    ("every", "eps"): [0.0, -1.0],
    ("every", "extra_scale_factor"): [-1.0, 0.0, inf],
    ("AdaptiveMuon", "beta2"): [-0.1, 1.0, 1.5],
    ("MuonHyperball", "weight_decay"): [0.1, 1.5],
    ("PolarGrad", "num_ns_steps"): [0],
    ("Scion", "lr"): [1.5],
    ("Scion", "spectral_radius"): [0.0, -1.0],
    ("SOAP", "betas"): [(1.0, 0.9), (0.9, 1.0)],
    ("SOAP", "shampoo_beta"): [-0.1, 1.5],
}
VALUES = {
    "lr": [-0.1, 0.0, 1.5, inf, torch.tensor(0.01)],
    "momentum": [-0.1, 0.0, 1.0, 1.5],
    "weight_decay": [-0.1, 0, 0.1, 1.5, inf],
    "nesterov": [True, False, 1, None],
    "fp32_matmul_prec": ["highest", "high", "medium", "best"],
    "coefficient_type": ["simple", "quintic", "polar_express", "cans", "deepseekv4", "best"],
    "num_ns_steps": [-1, 0, 1, 5],
    "scale_mode": ["spectral", "unit_rms_norm", "shape_scaling", "best"],
    "extra_scale_factor": [-1.0, 0.0, 2.0, inf],
    "moment2_method": ["adamuon", "normuon", "namo", "best"],
    "beta2": [-0.1, 0.0, 1.0, 1.5],
    "eps": [0.0, -1.0, 1e-3],
    "betas": [(0.9, 0.95), (0.0, 0.0), (1.0, 0.9), (0.9, 1.0), [0.9, 0.95]],
    "shampoo_beta": [-0.1, 0.0, 1.0, 1.5],
    "correct_bias": [True, False],
    "use_kl_shampoo": [True, False],
    "use_eigh": [True, False],
    "spectral_radius": [0.0, -1.0, 2.0],
    "weight_decay_method": ["decoupled", "independent", "palm", "best"],
}


@CLASS
def test_values_that_are_taken_there_and_refused_here_are_known(name):
    absent = {code(key)[0] for each, key, _ in tables("Absent")[0] if code(each) == [name]}
    for key in arguments(theirs(name)).keys() - absent - {"scaled_orthogonalize_fn", "use_syrk"}:
        refused = [*REFUSED.get(("every", key), ()), *REFUSED.get((name, key), ())]
        for x in VALUES[key]:
            there, here = (after(name, each, steps=1, **{key: x}) for each in (False, True))
            if torch.is_tensor(there) and not torch.is_tensor(here):
                assert x in refused, (key, x, here)


def test_every_refused_value_is_taken_there_and_refused_here():
    for (name, key), values in REFUSED.items():
        for x in values:
            settings = {"steps": 1, key: x}
            every = [each for each in SAME_STEPS if key in arguments(theirs(each))]
            names = every if name == "every" else [name]
            assert any(
                torch.is_tensor(after(each, False, **settings)) and not torch.is_tensor(after(each, True, **settings))
                for each in names
            ), (key, x)


def test_coefficients_differ_where_the_tables_say_so():
    safeties = {code(name)[0]: (float(safety), which) for name, safety, which in tables("Coefficients")[0]}
    further = {code(name)[0]: said for name, said in tables("Coefficients")[1]}
    known = set(muon_utils._COEFFICIENT_SETS)
    assert known <= set(orthogonalize.get_supported_coefficient_types())
    assert set(matrices.muon.NSCoeffT.__args__) - known == {"custom"}
    assert '`coefficient_type="custom"` is no name here' in PAGE
    repeating = re.search(r"repeat_last_types = (.*)", inspect.getsource(muon_utils.newton_schulz)).group(1)
    for name in known:
        repeats = name in ast.literal_eval(repeating) or further.get(name) == "repeat the last"
        mode = "repeat_last" if repeats else "cycle"
        for steps in range(1, 31):
            sets = muon_utils._COEFFICIENT_SETS[name]
            there = list(muon_utils.get_coefficient_iterator(steps, sets, mode=mode))
            if further.get(name, "").endswith("multiples of 5") and steps > 5 and steps % 5:
                with pytest.raises(ValueError, match="cannot be served"):
                    orthogonalize.get_coefficients(name, steps)
                continue
            safety, which = safeties.get(name, (1.0, "all"))
            safe = [
                with_safety(each, safety) if which == "all" or each == there[0] else each for each in map(tuple, there)
            ]
            assert list(orthogonalize.get_coefficients(name, steps)) == safe, (name, steps)


# A value of each setting that makes another step than SAME_STEPS.
OTHER = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.7, "nesterov": True, "weight_decay_method": "independent"}
OTHER |= {"coefficient_type": "simple", "num_ns_steps": 3, "scale_mode": "unit_rms_norm", "extra_scale_factor": 0.3}
OTHER |= {"beta2": 0.5, "eps": 0.1, "betas": (0.5, 0.5), "shampoo_beta": 0.5, "correct_bias": False}
OTHER |= {"use_kl_shampoo": True, "hyperball_eps": 10.0, "hyperball_radius": 2.0, "moment2_method": "normuon"}
OTHER |= {"max_update_rms": 1e-3, "correct_shampoo_beta_bias": False, "spectral_radius": 3.0}


NEWTON_SCHULZ = {"coefficient_type", "num_ns_steps"}
OF_GROUPS = {"nesterov", "weight_decay_method"}
SCALES = {"scale_mode", "extra_scale_factor"}
# class there -> settings of a group that are in force there and here, and here alone
IN_GROUPS = {
    "OrthogonalizedOptimizer": ({"lr", "momentum", "weight_decay"}, OF_GROUPS),
    "Muon": ({"lr", "momentum", "weight_decay"}, OF_GROUPS | NEWTON_SCHULZ | SCALES),
    "AdaptiveMuon": (
        {"lr", "momentum", "weight_decay", "beta2", "eps"},
        OF_GROUPS | NEWTON_SCHULZ | SCALES | {"moment2_method"},
    ),
    "MuonHyperball": ({"lr", "momentum"}, {"nesterov"} | NEWTON_SCHULZ),
    "PolarGrad": ({"lr", "momentum", "weight_decay"}, OF_GROUPS | NEWTON_SCHULZ),
    "Scion": ({"lr", "momentum"}, NEWTON_SCHULZ | {"spectral_radius"}),
    "Lion": ({"lr", "betas", "weight_decay"}, {"weight_decay_method"}),
    "SOAP": (
        {"lr", "betas", "shampoo_beta", "eps", "weight_decay"},
        OF_GROUPS | {"correct_bias", "use_kl_shampoo"},
    ),
}


@CLASS
def test_settings_of_groups_are_in_force_where_the_page_says_so(name):
    there, here = IN_GROUPS[name]
    refused = {key for row, cell in tables("Groups")[0] if code(row) == [name] for key in code(cell)}
    plain = [after(name, each) for each in (False, True)]
    assert all(map(torch.is_tensor, plain))
    keys = arguments(theirs(name)).keys() | {"lr", "momentum", "weight_decay"}
    found_there, found_here, found_refused = set(), set(), set()
    keys |= {"weight_decay_method"} & arguments_of_any(theirs(name)) | there
    for key in sorted(keys & OTHER.keys()):
        (one, other) = (after(name, each, group={key: OTHER[key]}) for each in (False, True))
        assert torch.is_tensor(one), key  # theirs takes any key
        found_there |= {key} if differs(one, plain[0]) else set()
        found_refused |= {key} if not torch.is_tensor(other) else set()
        found_here |= {key} if torch.is_tensor(other) and differs(other, plain[1]) else set()
    assert found_refused == refused
    assert found_there - refused == there
    assert found_here == there | here


def arguments_of_any(cls):
    return inspect.signature(cls).parameters.keys()


ABSENT_OF_EVERY = OF_GROUPS | {"pre_weight_update_fn_inplace", "post_weight_update_fn_inplace"}
# of SOAP, settings of groups and names of constructor arguments, beside those that the page has as absent
ABSENT_OF_SOAP = {"correct_bias", "fp32_matmul_prec", "use_eigh", "use_kl_shampoo"}


@CLASS
def test_attributes_and_methods_are_there_or_known_to_be_absent(name):
    absent = {code(key)[0] for each, key, _ in tables("Absent")[0] if code(each) == [name]}
    absent |= ABSENT_OF_EVERY | SCALES | {"moment2_method"} | (ABSENT_OF_SOAP if name == "SOAP" else set())
    (there, _), (here, _) = made(name, False), made(name, True)
    found = {each for each in set(dir(there)) - set(dir(here)) if not each.startswith("_")}
    assert found <= absent


def test_functions_are_there_as_the_page_says():
    for (
        name
    ) in "newton_schulz get_muon_scale_factor muon_scale_factor get_coefficient_iterator get_coefficients".split():
        assert f"`{name}`" in PAGE
    for mode in ("spectral", "unit_rms_norm", "shape_scaling"):
        for shape in ((6, 4), (4, 6)):
            assert orthogonalize.muon_scale_factor(*shape, mode) == matrices.get_muon_scale_factor(*shape, mode)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    expected = muon_utils.newton_schulz(x, 5, "quintic")
    torch.testing.assert_close(orthogonalize.newton_schulz(x, 5, "quintic"), expected, rtol=0, atol=1e-5)


def seen_by_users(here, precision):
    """What a function and a method of a user's get: precision, shapes, and names of settings."""
    seen = []

    def function(x):
        seen.append(("function", torch.get_float32_matmul_precision(), tuple(x.shape)))
        return x

    class Users((ours if here else theirs)("OrthogonalizedOptimizer")):
        def orthogonalize(self, p, grad, **settings):
            seen.append(("method", torch.get_float32_matmul_precision(), tuple(grad.shape), frozenset(settings)))
            return super().orthogonalize(p, grad, **settings)

    both, *own = SAME_STEPS["OrthogonalizedOptimizer"]
    key = ("scaled_orthogonalize_fn", "orthogonalize_fn")[here]
    p = torch.nn.Parameter(torch.ones(6, 4))
    group = {"params": [p], "is_qkv": True}
    stepped(Users([group], **{**both, **own[here], key: function, "fp32_matmul_prec": precision}), [p], range(1))
    return seen


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_what_users_functions_and_methods_get_differs_in_names_of_settings_alone(precision):
    there, here = (seen_by_users(each, precision) for each in (False, True))
    names, own = there[0][-1], here[0][-1]
    assert [each[:3] for each in here] == [each[:3] for each in there]
    assert names - own == {"momentum"}
    assert own - names == {"momentum_beta", "use_nesterov", "use_decoupled_weight_decay", "weight_decay_method"}


def kind(name, here, gradient=None, closure=None, **settings):
    """What a step does, in a few words: whether it is an error, and what of the parameter and the gradient changes."""
    optimizer, p = made(name, here, **settings)
    stepped(optimizer, [p], range(0 if gradient is None else 1))  # so that no first step is a special one
    before = p.detach().clone()
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(p.dtype)
    p.grad = p.grad if gradient is None else gradient(p.grad)
    kept = p.grad.clone()
    with torch.compiler.set_stance("force_eager"):
        optimizer.step(*([] if closure is None else [closure]))
    states = [x for x in optimizer.state[p].values() if torch.is_tensor(x)]
    finite = all(x.isfinite().all() for x in (p, *states))
    return finite, torch.equal(p.grad.nan_to_num(7), kept.nan_to_num(7)), p.detach() - before


def one_nan(gradient):
    gradient[0, 0] = float("nan")
    return gradient


OWN_ROWS = {"use_kl_shampoo", "eps"}  # settings that have another shape below
# the second step of SOAP, with sides that gradients span, beside which there is no rounding to divide by
SECOND = {"eps": 0.1, "shape": (5, 5), "gradient": torch.clone}
STEP_ROWS = [  # a row of the table, if the step differs, and how it is made
    ("with a gradient that is not finite", {"gradient": one_nan}),
    ("with a closure", {"closure": lambda: 1.0}),
    ("made with a rate that is a tensor of shape (1,)", {"lr": torch.tensor([0.01])}),
    ('with `weight_decay_method="l2"`', {"weight_decay_method": "l2"}),
    ("of matrices in bf16 or fp64, by Newton-Schulz", {"dtype": torch.bfloat16}),
    ("of matrices in bf16 or fp64, by Newton-Schulz", {"dtype": torch.float64}),
    ("of a momentum whose norm is below 1e-7", {"gradient": lambda x: x * 1e-12, "momentum": 0.0, "weight_decay": 0.0}),
    ("of parameters of other than two dimensions", {"shape": (6,)}),
    ("of parameters of other than two dimensions", {"shape": (3, 4, 2)}),
    ("with KL factors", {"use_kl_shampoo": True, **SECOND}),
    ("with another eps", SECOND),
    ("as usual", {}),
    ("of a gradient of zero", {"gradient": torch.zeros_like}),
    *((f"of shape {shape}", {"shape": shape}) for shape in ((40, 3), (3, 40), (1, 5), (5, 5))),
    *((f"with {key}={x!r}", {key: x}) for key, values in VALUES.items() for x in values if key not in OWN_ROWS),
]


def same_step(name, settings):
    """Whether a step is the same there and here; what one of them has no argument for, or refuses, other tests have."""
    if not settings.keys() - {"gradient", "closure", "dtype", "shape"} <= arguments_of_any(theirs(name)):
        return True
    found = []
    for here in (False, True):
        try:
            found.append(kind(name, here, **settings))
        except Exception as error:
            found.append(error)
    errors = [isinstance(each, Exception) for each in found]
    if any(errors):
        return all(errors) or (errors[1] and settings.keys() <= VALUES.keys())
    (finite, kept, moved), (finite_here, kept_here, moved_here) = found
    tolerance = 0.02 if settings.get("fp32_matmul_prec") == "medium" else 1e-4  # of bf16, and of fp32
    moved, moved_here = moved.nan_to_num(), moved_here.nan_to_num()
    same = torch.allclose(moved, moved_here, rtol=tolerance, atol=1e-6 + tolerance * moved.abs().max().item())
    return (finite, kept) == (finite_here, kept_here) and same


def test_steps_differ_where_the_table_says_so():
    found = {row: [name for name in SAME_STEPS if not same_step(name, settings)] for row, settings in STEP_ROWS}
    assert {row for row, names in found.items() if names} == {row for row, _, _ in tables("Steps")[0]}, found


def hooks_of_theirs():
    """Methods of theirs, and of Megatron's classes, that ours have not."""
    found = set()
    for name in COUNTERPART:
        for cls in theirs(name).__mro__:
            if cls.__module__.startswith("emerging_optimizers"):
                found |= {key for key, each in vars(cls).items() if inspect.isfunction(each)}
    source = Path(importlib.util.find_spec("megatron.core").origin).parent / "optimizer" / "emerging_optimizers.py"
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ClassDef) and node.name.startswith("TensorParallel"):
            found |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    of_ours = [getattr(megatron_eopt, here) for here in COUNTERPART.values()]
    return {key for key in found if not any(hasattr(cls, key) for cls in of_ours)}


def test_every_hook_that_nothing_calls_is_on_the_page_and_known():
    page = (DOCS / "python.md").read_text()
    section = page.partition("## Hooks of other packages")[2].partition("\n## ")[0]
    named = {key for line in section.splitlines() if line.startswith("| `") for key in code(line.split(" | ")[0])}
    assert named == set(HOOKS_OF_OTHERS) == hooks_of_theirs()


@pytest.mark.parametrize("name", COUNTERPART)
def test_a_subclass_with_hooks_that_nothing_calls_gets_one_warning_that_names_them(name, caplog):
    def called(self, *args, **settings):
        raise AssertionError("somebody calls it")

    some = HOOKS_OF_OTHERS[::2]
    cls = type("Own", (ours(name),), dict.fromkeys(some, called))
    needed = [p for p in list(inspect.signature(cls).parameters.values())[1:] if p.default is p.empty]
    values = {"lr": 0.1, "momentum_beta": 0.9, "fp32_matmul_prec": "highest", "weight_decay": 0.0}
    given = {p.name: values.get(p.name, False) for p in needed if p.kind is not p.VAR_KEYWORD}
    given = {key: None if key in ("is_qkv_fn", "qkv_split_shapes") else x for key, x in given.items()}
    p = torch.nn.Parameter(torch.eye(4))
    with caplog.at_level(logging.WARNING):
        optimizer = cls([p], **given)
    told = [message for message in caplog.messages if "no step here calls" in message]
    assert len(told) == 1, told
    assert [key for key in HOOKS_OF_OTHERS if key in told[0]] == list(some)
    p.grad = torch.eye(4)
    optimizer.step()
    caplog.clear()
    ours(name)([torch.nn.Parameter(torch.eye(4))], **given)
    assert not [message for message in caplog.messages if "no step here calls" in message]
