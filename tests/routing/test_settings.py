"""The table of settings, and what a value of each may be."""

import math
from pathlib import Path

import pytest

from megatron_eopt.family import LIKE_MUON, OPTIMIZERS
from megatron_eopt.routing import (
    SETTINGS,
    Known,
    Layer,
    OverrideError,
    SettingError,
    check_setting,
    make_entry,
    resolve,
)
from megatron_eopt.routing.settings import OF_ALL
from tests.routing.made import KNOWN, having, model

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "overrides.md"


@pytest.mark.parametrize(
    ("key", "raw", "value"),
    [
        ("lr", 1, 1.0),
        ("lr", 0, 0.0),
        ("betas", [0, 0.5], (0.0, 0.5)),
        ("betas", (0.9, 0.95), (0.9, 0.95)),
        ("num_ns_steps", 5.0, 5),
        ("split", True, "default"),
        ("split", False, "none"),
        ("split", "all", "all"),
        ("exclude", False, False),
        ("optimizer", "sgd", "sgd"),
        ("coefficient_type", "aol", "aol"),
    ],
)
def test_a_value_has_the_type_of_its_setting(key, raw, value):
    found = check_setting(key, raw, KNOWN)
    assert found == value
    assert type(found) is type(value)
    assert hash(found) == hash(value)


@pytest.mark.parametrize("key", [key for key in SETTINGS if key not in ("exclude", "split")])
@pytest.mark.parametrize("raw", [None, True, "", {}, [], -1, math.nan, math.inf, [0.5, 1.0], ["a", "b"]], ids=repr)
def test_no_setting_takes(key, raw):
    with pytest.raises(SettingError) as error:
        check_setting(key, raw, KNOWN)
    assert error.value.key == key


def test_a_choice_is_the_optimizers_own():
    """Shampoo's scale may be none, for 1."""
    for name in ("shampoo", "kl_shampoo"):
        assert check_setting("scale_mode", "none", KNOWN, name) == "none"
    for name in ("muon", "soap"):
        with pytest.raises(SettingError, match="unknown scale mode 'none': expected spectral, unit_rms_norm or shape_"):
            check_setting("scale_mode", "none", KNOWN, name)
    entry = make_entry("*", {"scale_mode": "none"}, Layer.PYTHON, "f:1", KNOWN)
    assert entry.mistakes == ()  # until its parameters' optimizer is known
    with pytest.raises(OverrideError, match=r"f:1: scale_mode: unknown scale mode .none.: .* for muon"):
        resolve([entry], model(), "muon", known=KNOWN)
    settings = resolve([entry], model(), "shampoo", known=KNOWN)["output_layer.weight"].settings
    assert settings == {"scale_mode": "none"}


def those_with(key):
    """The optimizers that have a setting."""
    return sorted(KNOWN.optimizers) if key in OF_ALL else KNOWN.having(key)


def test_optimizers_say_themselves_what_they_take():
    table = {key: those_with(key) for key in SETTINGS}
    muons = {"adaptive_muon", "muon"}
    relatives = {*muons, "muon_hyperball", "polargrad", "scion", "spectron"}
    assert table["lr"] == table["exclude"] == sorted(KNOWN.optimizers)
    assert muons <= set(table["scale_mode"]) == {*LIKE_MUON, "muown", "soap", "shampoo", "kl_shampoo"}
    assert (
        relatives
        <= set(table["num_ns_steps"])
        == {row.name for row in OPTIMIZERS.values() if row.takes("num_ns_steps")}
    )
    assert (
        {*relatives, "soap"}
        <= set(table["split"])
        == {row.name for row in OPTIMIZERS.values() if row.owns == "matrices"}
    )
    for key, some in (("eps", {"adaptive_muon", "soap"}), ("betas", {"lion", "soap"})):
        assert some <= set(table[key]) == {"adam", *(row.name for row in OPTIMIZERS.values() if row.takes(key))}
    assert table["rank"] == ["spectron"]
    own = Known({"mine": {"betas": (0.9, 0.99)}}, ("none", "thirds"))
    entry = make_entry("*", {"optimizer": "mine", "betas": (0, 0)}, Layer.PYTHON, "file:1", own)
    assert entry.settings == {"optimizer": "mine", "betas": (0.0, 0.0)}
    assert check_setting("split", "thirds", own) == "thirds"
    assert check_setting("split", "thirds", Known.registered(["thirds"])) == "thirds"
    entry = make_entry("*", {"optimizer": "mine", "momentum": 0}, Layer.PYTHON, "file:1", own)
    assert entry.mistakes == ("file:1: momentum: mine has no momentum",)


def test_all_mistakes_are_said():
    entry = make_entry("*", {"lr": -1, "mometum": 0.9, "eps": 1}, Layer.PYTHON, "f:1", KNOWN)
    assert entry.mistakes == (
        "f:1: lr: expected a number of at least 0, got -1",
        f"f:1: mometum: unknown setting, did you mean 'momentum' of {having('momentum')}; or 'momentum_beta' of "
        f"spectron?",
    )


def test_the_documentation_has_every_setting_as_it_is():
    text = DOCS.read_text()
    for key, check in SETTINGS.items():
        optimizers = "all" if key in OF_ALL else ", ".join(those_with(key))
        assert f"| `{key}` | {check.expected} | {optimizers} | " in text
