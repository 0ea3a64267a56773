"""Which optimizer has which settings, what a value of each may be, and that groups read what they have."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_eopt import EmergingOptimizerEntry, register_optimizer
from megatron_eopt.registry import EMERGING_OPTIMIZERS
from megatron_eopt.routing import OverrideError, resolve
from megatron_eopt.routing.entries import entries_from_dict
from megatron_eopt.routing.settings import (
    OF_ALL,
    check_setting,
    optimizer_names,
    settings_of,
)
from tests.optimizers.family import OPTIMIZERS, RECORDS, build, decays, others
from tests.routing.made import model

FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
OF_OPTIMIZERS = [(name, key) for name in OPTIMIZERS for key in sorted(settings_of(name)) if key != "split"]


def after(name, group=None, **settings):
    """A matrix after some steps, in a group with settings of its own or of an optimizer with settings."""
    p = torch.nn.Parameter(torch.randn(6, 5, generator=torch.Generator().manual_seed(0)))
    decay = {"weight_decay": 0.3 if decays(name) else 0.0}
    optimizer = build(name, [{"params": [p], **(group or {})}], **decay, **settings)
    for seed in range(8):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1 + seed))
        optimizer.step()
    return p.detach()


def beside(name, key):
    """Another setting without which this one has no effect."""
    if OPTIMIZERS[name].settings[key].only_with is None:
        return {}
    other, wanted = OPTIMIZERS[name].settings[key].only_with
    used = {**settings_of(name), **RECORDS[name].settings}[other] in wanted
    return {} if used else {other: wanted[0]}


@pytest.mark.parametrize(("name", "key"), [each for each in OF_OPTIMIZERS if each[1] != "fp32_matmul_prec"])
def test_a_groups_own_value_is_that_of_its_optimizer(name, key):
    """Of some other value: not every one changes the steps of small matrices."""
    values = others(name, key)
    settings = beside(name, key)
    expected = after(name, **settings)
    for value in values:
        try:
            own = after(name, {key: value}, **settings)
        except ValueError:  # out of range, or beside a setting with which it cannot be
            continue
        if not torch.equal(own, expected):
            assert not OPTIMIZERS[name].takes(key) or torch.equal(own, after(name, **{key: value}, **settings))
            return
    assert not values, f"{name} does not read {key} from its groups"


def test_optimizers_have_the_settings_of_their_rules():
    assert "pairs" not in settings_of("spectron")
    for name, row in OPTIMIZERS.items():
        own = settings_of(name)
        assert ("extra_scale_factor" in own) == ("extra_scale_factor" in row.of_muon)
        assert ("scale_mode" in own) == (name in ("soap", "shampoo", "kl_shampoo") or "scale_mode" in row.of_muon)
        assert ("num_ns_steps" in own) == row.takes("num_ns_steps")
        assert ("split" in own) == (row.owns == "matrices")
    for key in ("momentum_beta", "rank"):
        assert optimizers_with(key) == ["spectron"]


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
    yield
    del EMERGING_OPTIMIZERS["mine"], EMERGING_OPTIMIZERS["needy"]


@pytest.mark.parametrize(
    ("key", "raw", "value"),
    [
        ("lr", 1, 1.0),
        ("lr", 0, 0.0),
        ("betas", [0, 0.5], (0.0, 0.5)),
        ("num_ns_steps", 5.0, 5),
        ("split", True, "default"),
        ("split", False, "none"),
        ("split", "per_head", "per_head"),
        ("exclude", False, False),
        ("optimizer", "sgd", "sgd"),
        ("coefficient_type", "aol", "aol"),
    ],
)
def test_a_value_has_the_type_of_its_setting(key, raw, value):
    optimizer = None if key in OF_ALL else optimizers_with(key)[-1]
    found = check_setting(key, raw, optimizer)
    assert found == value
    assert type(found) is type(value)
    assert hash(found) == hash(value)


def resolved(optimizer, **settings):
    return resolve(entries_from_dict({FC1: settings}), model(), optimizer)[FC1].settings


@pytest.mark.usefixtures("mine")
def test_settings_of_a_users_optimizer():
    assert settings_of("mine") == {"my_setting": 0.5, "my_switch": True, "betas": (0.9, 0.99, 0.999)}
    assert settings_of("needy").keys() == {"teacher", "decay"}
    found = resolved("mine", my_setting=1, betas=[0, 0.5, 1])
    assert found == {"my_setting": 1.0, "betas": (0.0, 0.5, 1.0)}
    assert type(found["my_setting"]) is float


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("optimizer", "settings", "said"),
    [
        ("mine", {"my_setting": "fast"}, "my_setting: expected a number, got 'fast'"),
        ("mine", {"beta2": 0.5}, "beta2: mine has no such setting of a parameter, did you mean 'betas'?"),
        ("spectron", {"momentum": 0.5}, "momentum: spectron has no such setting of a parameter, did you mean 'moment"),
        ("mine", {"my_seting": 1}, "my_seting: unknown setting, did you mean 'my_setting'?"),
        ("mine", {"betas": [0.9, 0.9]}, "betas: expected 3 numbers, got (0.9, 0.9)"),
        ("lion", {"betas": [0.9, 0.9, 0.9]}, "betas: expected 2 numbers, got (0.9, 0.9, 0.9)"),
        ("muon", {"tp_mode": "owner"}, "tp_mode: unknown setting"),
    ],
)
def test_what_is_wrong_is_said_of_the_optimizer_of_the_parameter(optimizer, settings, said):
    with pytest.raises(OverrideError) as error:
        resolved(optimizer, **settings)
    assert said in str(error.value)


def optimizers_with(key):
    return [name for name in optimizer_names() if key in settings_of(name)]


VALUES = st.one_of(
    st.booleans(),
    st.integers(-10, 10),
    st.floats(allow_nan=True),
    st.text(max_size=3),
    st.none(),
    st.lists(st.floats(-2, 2), max_size=3),
)


@example(("mars_muon", "weight_decay_method"), [])  # its default is None
@given(st.sampled_from(OF_OPTIMIZERS), VALUES)
def test_a_value_that_is_taken_has_the_type_of_the_default(named, raw):
    name, key = named
    default = settings_of(name)[key]
    try:
        found = check_setting(key, raw, name)
    except ValueError:
        return
    assert default is None or type(found) is type(default)
    assert hash(found) == hash(check_setting(key, found, name))
    if isinstance(found, float):
        assert math.isfinite(found)
    elif isinstance(found, tuple):
        assert len(found) == len(default)
