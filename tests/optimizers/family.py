"""Every optimizer of the package, built for a few parameters."""

import pytest

from megatron_eopt.family import ROWS

# What is set to let a few steps of small matrices show what the optimizer does.
SETTINGS = {
    "adaptive_muon": {"moment2_method": "normuon"},
    "spectron": {"rank": 3},
    "soap": {"precondition_frequency": 2},
    "schedule_free_adamw": {"warmup_steps": 2},
}
ELEMENTWISE = tuple(name for name, row in ROWS.items() if row.owns == "all")
FOR_VECTORS = tuple(name for name, row in ROWS.items() if row.vectors)
every = pytest.mark.parametrize("name", ROWS)


def build(name, params, **settings):
    """An optimizer of the family."""
    return ROWS[name].cls(params, **{"lr": 0.01, **SETTINGS.get(name, {}), **settings})


def having(*settings):
    """Names of the optimizers whose constructors take all of these."""
    return [name for name, row in ROWS.items() if all(map(row.takes, settings))]


def decays(name):
    """Whether an optimizer has a weight decay."""
    return getattr(ROWS[name].cls, "decays_weights", True)
