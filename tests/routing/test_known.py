"""Settings that only single optimizers have: found by asking the optimizers, and true of their groups."""

import inspect
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt import EmergingOptimizerEntry, register_optimizer
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.registry import EMERGING_OPTIMIZERS
from megatron_eopt.routing import Known, Layer, OverrideError, SettingError, check_setting, make_entry, resolve
from megatron_eopt.routing.settings import OF_ALL, SETTINGS, check_of
from tests.optimizers.family import OPTIMIZERS, build, decays, every
from tests.routing.made import KNOWN, having, model

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "overrides.md"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
OF_OPTIMIZERS = [(name, key) for name in OPTIMIZERS for key in sorted(KNOWN.optimizers[name]) if key != "split"]

# What half of a default, or its opposite, would not show.
OTHERS = {
    "eps": 0.1,
    "coefficient_type": "simple",
    "scale_mode": "unit_rms_norm",
    "basis_method": "eigh",
    "basis_of": "current",
    "variant": "schedulefree",
    "sort_bases": "after",
    "weight_norm": "hold",
    "relative_update": "bound",
    "moment2_method": "adamuon",
    "root_method": "cans",
    "max_dim": 5,
    "precondition_frequency": 3,
    "warmup_steps": 3,
    "precond_decay_steps": 2,
    "min_precond_lr": 0.1,
    "alpha_warmup": 5,
    "beta3_warmup": 7,
    "rank": 2,
    "num_ns_steps": 3,
    "weight_decay_method": "independent",
}
# What has an effect beside another setting only.
BESIDE = {"r": {"variant": "schedulefree"}, "weight_lr_power": {"variant": "schedulefree"}}
OF_SOAP = {"scale_mode": {"orthogonalize": True}, "sort_bases": {"precondition_frequency": 1}}
OF_MUON = {
    **{key: {"moment2_method": "adamuon"} for key in ("beta2", "eps", "align_rms")},
    **{key: {"weight_norm": "brake"} for key in ("brake_outward", "brake_inward")},
    "update_ratio": {"relative_update": "bound"},
}


def other(key, default):
    if default == "shape_scaling":  # which unit_rms_norm is for more rows than columns
        return "spectral"
    if key in OTHERS:
        return OTHERS[key]
    if isinstance(default, bool):
        return not default
    return tuple(each / 2 for each in default) if isinstance(default, tuple) else default / 2 or 0.5


def after(name, group=None, **settings):
    """A matrix after some steps, in a group with settings of its own or of an optimizer with settings."""
    p = torch.nn.Parameter(torch.randn(6, 5, generator=torch.Generator().manual_seed(0)))
    decay = {"weight_decay": 0.3 if decays(name) else 0.0}
    optimizer = build(name, [{"params": [p], **(group or {})}], **decay, **settings)
    for seed in range(8):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1 + seed))
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize(("name", "key"), [each for each in OF_OPTIMIZERS if each[1] != "fp32_matmul_prec"])
def test_a_group_with_its_own_value_is_an_optimizer_with_that_value(name, key):
    value, muons = other(key, KNOWN.optimizers[name][key]), issubclass(OPTIMIZERS[name].cls, TensorParallelMuon)
    value = "brake" if muons and key == "weight_norm" else value  # beside a weight decay, which hold has none of
    beside = OF_SOAP if name == "soap" else OF_MUON if muons and name != "muown" else BESIDE
    beside = beside.get(key, {})
    if name == "adaptive_muon" and "moment2_method" in beside:  # its default
        beside = {}
    if (name, key) == ("scion", "brake_inward"):
        beside = {**beside, "radius": 0.05}  # so small that steps do not grow the norm
    given = {key: value} | ({"update_ratio": 0.01} if key == "relative_update" else {})  # which bounds them all
    own = after(name, given, **beside)
    assert not torch.equal(own, after(name, **beside)), f"{name} does not read {key} from its groups"
    if key in inspect.signature(OPTIMIZERS[name].cls).parameters:
        assert torch.equal(own, after(name, **given, **beside))


@every
def test_every_argument_of_a_constructor_is_a_setting_of_groups_or_is_refused(name):
    taken = inspect.signature(OPTIMIZERS[name].cls).parameters.keys() - {"params", "lr", "weight_decay"}
    settings, fixed = KNOWN.optimizers[name], KNOWN.fixed[name]
    assert taken <= settings.keys() | fixed
    assert not settings.keys() & fixed
    for key in fixed - {"split_qkv"}:
        with pytest.raises(SettingError, match=rf"^{key}: {name} has one {key} for all its parameters"):
            check_setting(key, 1, KNOWN, name)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("adaptive_muon", {"beta2", "eps", "momentum"}),
        ("soap", {"shampoo_beta", "precondition_frequency", "betas"}),
        ("spectron", {"momentum_beta", "rank"}),
        ("scion", {"radius", "momentum"}),
        ("schedule_free_adamw", {"warmup_steps", "variant"}),
        ("lion", {"maximize", "betas"}),
    ],
)
def test_settings_that_users_ask_for_are_there(name, keys):
    assert keys <= KNOWN.optimizers[name].keys()


def test_whether_factors_are_pairs_and_scales_of_other_rules_are_no_settings():
    assert "pairs" not in KNOWN.optimizers["spectron"]
    for name, row in OPTIMIZERS.items():
        assert ("extra_scale_factor" in KNOWN.optimizers[name]) == ("extra_scale_factor" in row.of_muon)
        own = name in ("soap", "shampoo", "kl_shampoo")
        assert ("scale_mode" in KNOWN.optimizers[name]) == (own or "scale_mode" in row.of_muon)


class Mine(torch.optim.Optimizer):
    """A user's."""

    def __init__(self, params, lr, my_setting=0.5, my_switch=True, betas=(0.9, 0.99, 0.999), table=None):
        self.table = table
        super().__init__(params, {"lr": lr, "my_setting": my_setting, "my_switch": my_switch, "betas": betas})


class Needy(torch.optim.Optimizer):
    """One that cannot be built without what only its run has."""

    def __init__(self, params, teacher, decay=0.9):
        super().__init__(params, {"lr": teacher.lr, "decay": decay})


@pytest.fixture
def mine():
    """Names with a user's optimizers, registered after the import of everything."""
    register_optimizer("mine", EmergingOptimizerEntry(Mine))
    register_optimizer("needy", EmergingOptimizerEntry(Needy))
    yield Known.registered()
    del EMERGING_OPTIMIZERS["mine"], EMERGING_OPTIMIZERS["needy"]


def test_what_says_nothing_of_itself_has_no_settings_of_its_own(monkeypatch):
    def made(params):
        raise AssertionError("nobody asks it to make anything")

    monkeypatch.setitem(EMERGING_OPTIMIZERS, "missing", EmergingOptimizerEntry(made))
    known = Known.registered()
    assert known.optimizers["missing"] == {}
    assert known.optimizers["lion"] == KNOWN.optimizers["lion"]


def refused(*entries, known, optimizer="mine"):
    with pytest.raises(OverrideError) as error:
        resolve([make_entry(*entry, known=known) for entry in entries], model(), optimizer, known=known)
    return str(error.value).splitlines()


def of_file(selector, source, **settings):
    return selector, settings, 2, source


def test_settings_of_a_users_optimizer(mine):
    assert mine.optimizers["mine"] == {"my_setting": 0.5, "my_switch": True, "betas": (0.9, 0.99, 0.999)}
    assert mine.fixed["mine"] == {"table"}
    assert mine.optimizers["needy"].keys() == {"teacher", "decay"}
    entry = make_entry(FC1, {"my_setting": 1, "betas": [0, 0.5, 1]}, Layer.PYTHON, "f:1", mine)
    found = resolve([entry], model(), "mine", known=mine)[FC1]
    assert found.settings == {"my_setting": 1.0, "betas": (0.0, 0.5, 1.0)}
    assert type(found.settings["my_setting"]) is float


def test_what_is_wrong_is_said_of_the_optimizer_of_the_parameter(mine):
    assert refused(of_file(FC1, "f:1", my_setting="fast"), known=mine) == [
        "f:1: my_setting: expected a number, got 'fast'"
    ]
    assert refused(of_file(FC1, "f:1", beta2=0.5), known=mine) == [
        f"f:1: beta2: mine has no beta2: it is a setting of {having('beta2')}; did you mean its 'betas'?, for {FC1}"
    ]
    assert refused(of_file(FC1, "f:1", momentum=0.5), known=mine, optimizer="spectron") == [
        f"f:1: momentum: spectron has no momentum: it is a setting of {having('momentum')}; "
        f"did you mean its 'momentum_beta'?, for {FC1}"
    ]
    assert refused(of_file(FC1, "f:1", my_seting=1), known=mine) == [
        "f:1: my_seting: unknown setting, did you mean 'my_setting' of mine?"
    ]
    assert refused(of_file("optimizer:lion", "f:1", my_seting=1), known=mine, optimizer="lion") == [
        "f:1: my_seting: unknown setting: lion has optimizer, lr, min_lr, lr_mult, weight_decay, start_wd, end_wd, "
        f"wd_mult, exclude, {', '.join(sorted(mine.optimizers['lion'])[:-1])} and {max(mine.optimizers['lion'])}"
    ]
    assert refused(of_file(FC1, "f:1", table=3), known=mine) == [
        "f:1: table: mine has one table for all its parameters, which is set for the run alone"
    ]


def test_a_value_is_of_the_type_that_the_optimizer_of_the_parameter_has(mine):
    """Three betas are right for one optimizer, and two for the others."""
    three, two = of_file(FC1, "f:1", betas=[0.9, 0.9, 0.9]), of_file(FC1, "f:2", betas=[0.9, 0.9])
    assert refused(two, known=mine) == [f"f:2: betas: expected 3 numbers, got (0.9, 0.9) for mine, for {FC1}"]
    assert refused(three, known=mine, optimizer="lion") == [
        f"f:1: betas: expected two numbers in [0, 1), as [0.9, 0.95], got (0.9, 0.9, 0.9) for lion, for {FC1}"
    ]


VALUES = st.one_of(
    st.booleans(),
    st.integers(-10, 10),
    st.floats(allow_nan=True),
    st.text(max_size=3),
    st.none(),
    st.lists(st.floats(-2, 2), max_size=3),
)


@given(st.sampled_from(OF_OPTIMIZERS), VALUES)
def test_a_value_that_is_taken_has_the_type_of_the_default_and_can_be_sorted(named, raw):
    name, key = named
    default = KNOWN.optimizers[name][key]
    try:
        found = check_setting(key, raw, KNOWN, name)
    except SettingError:
        return
    assert default is None or type(found) is type(default)
    assert hash(found) == hash(check_setting(key, found, KNOWN, name))
    if isinstance(found, float):
        assert math.isfinite(found)
    elif isinstance(found, tuple):
        assert len(found) == len(default)


@given(st.sampled_from(OF_OPTIMIZERS), st.sampled_from(sorted(OPTIMIZERS)))
def test_suggestions_are_settings_that_the_optimizer_has(named, optimizer):
    """A key of one optimizer for a parameter of another: what is suggested would be taken."""
    _, key = named
    if key in KNOWN.optimizers[optimizer]:
        default = KNOWN.optimizers[optimizer][key]
        assert default is None or check_setting(key, default, KNOWN, optimizer) == default
        return
    with pytest.raises(SettingError) as error:
        check_setting(key, 1, KNOWN, optimizer)
    assert f"{optimizer} has " in error.value.what
    if "did you mean its" in error.value.what:
        suggested = error.value.what.split("'")[1]
        assert suggested in KNOWN.optimizers[optimizer] or suggested in OF_ALL


@given(st.text("abcdefimnoprstu_2", min_size=1, max_size=10), st.sampled_from([None, *OPTIMIZERS]))
def test_no_key_is_suggested_that_the_optimizer_named_beside_it_has_not(key, optimizer):
    try:
        check_setting(key, 0.5, KNOWN, optimizer)
    except SettingError as error:
        said = error.what.partition("did you mean ")[2].rstrip("?")
        for some in filter(None, said.split("; or ")):
            suggested, _, optimizers = some.removeprefix("its ").partition(" of ")
            names = [optimizer] if optimizer else optimizers.replace(" and ", ", ").split(", ") if optimizers else []
            assert all(suggested.strip("'") in OF_ALL | KNOWN.optimizers[name].keys() for name in names)
            assert names or suggested.strip("'") in OF_ALL


def test_the_documentation_has_every_setting_of_single_optimizers():
    found = {}
    for name in sorted(KNOWN.optimizers):
        for key in KNOWN.optimizers[name].keys() - SETTINGS:
            found.setdefault((key, check_of(key, name, KNOWN).expected), []).append(name)
    lines = [f"| `{key}` | {expected} | {', '.join(names)} |" for (key, expected), names in sorted(found.items())]
    assert "\n".join(lines) in DOCS.read_text(), "\n".join(lines)
